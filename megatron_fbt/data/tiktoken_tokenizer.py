"""tiktoken tokenizers: a file of ranks (NAME.tiktoken) and what it does not say (NAME.tiktoken.json) beside it.

Nothing is downloaded. The JSON file holds::

    {"pat_str": "...", "special_tokens": {"<|endoftext|>": 50256}, "eod": "<|endoftext|>"}
"""

import base64
import binascii
import hashlib
import json
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import numpy

from megatron_fbt.data.tokenizer import Tokenizer
from megatron_fbt.data.unencodable import unencodable
from megatron_fbt.errors import ConfigError, DataError

TIKTOKEN_FILE = "tokenizer.tiktoken"
"""Name of a copy of a file of ranks."""
_PROBE = (
    "  two  spaces\n\n\tx = 1234567 - y_2!?\r\n d'\u00e9j\u00e0 \u4e2d\u6587 \u0416 \U0001f600\u200d\u3000\x01 I'LL \n "
)


class TiktokenTokenizer(Tokenizer):
    """Byte pairs as tiktoken merges them. Special tokens that a document spells out are encoded as ordinary text."""

    def __init__(self, path):
        """
        Args:
            path: NAME.tiktoken; NAME.tiktoken.json must lie beside it.

        Raises:
            ConfigError: The package tiktoken is not installed.
            DataError: A file is missing or not what it should be.
        """
        self.path = Path(path)
        if not self.path.is_file():
            raise DataError(f"tokenizer {path}: no such file; it must be a file of ranks, NAME.tiktoken")
        content = self.path.read_bytes()
        self._ranks = _read_ranks(self.path, content)
        self._facts = _read_facts(self._facts_path)
        self._special: Dict[str, int] = self._facts["special_tokens"]
        shared = sorted(set(self._special.values()) & set(self._ranks.values()))
        if shared or len(set(self._special.values())) != len(self._special):
            raise DataError(f"tokenizer {self._facts_path}: ids of special_tokens are not theirs alone: {shared[:5]}")
        self.vocab_size = max([*self._ranks.values(), *self._special.values()]) + 1
        facts = json.dumps([self._facts["pat_str"], sorted(self._special.items()), self._facts.get("eod")])
        digest = hashlib.sha256(content + b"\0" + facts.encode()).hexdigest()
        self.unique_identifiers = OrderedDict([("class", type(self).__name__), ("sha256", digest)])
        self._build()
        self._check_lossless()

    @property
    def _facts_path(self) -> Path:
        return self.path.with_name(self.path.name + ".json")

    def _build(self) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise ConfigError("data.tokenizer.type is 'tiktoken': pip install tiktoken") from error
        try:
            self._encoding = tiktoken.Encoding(
                self.path.stem,
                pat_str=self._facts["pat_str"],
                mergeable_ranks=self._ranks,
                special_tokens=self._special,
            )
        except Exception as error:
            raise DataError(f"tokenizer {self.path}: tiktoken refuses it: {error}") from error
        self._bytes = {token: piece for piece, token in self._ranks.items()}

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name not in ("_encoding", "_bytes")}

    def __setstate__(self, state) -> None:
        self.__dict__.update(state)
        self._build()

    def _check_lossless(self) -> None:
        lacking = [byte for byte in range(256) if bytes([byte]) not in self._ranks]
        if lacking:
            raise DataError(f"tokenizer {self.path}: it has no token for {len(lacking)} of the 256 bytes")
        if self.detokenize(self.tokenize(_PROBE)) != _PROBE:
            raise DataError(f"tokenizer {self._facts_path}: its pat_str matches parts of a text only; the rest is lost")

    def files(self) -> Dict[str, Path]:
        return {TIKTOKEN_FILE: self.path, f"{TIKTOKEN_FILE}.json": self._facts_path}

    @property
    def eod(self) -> int:
        name = self._facts.get("eod")
        if name is None:
            raise DataError(
                f"tokenizer {self._facts_path}: it names no end-of-document token; "
                'add "eod": one of its special_tokens, such as "<|endoftext|>"'
            )
        return self._special[name]

    def tokenize_batch(self, texts: Sequence[str]) -> List[List[int]]:
        return self._guarded(self._encoding.encode_ordinary, texts)

    def tokenize_flat(self, texts: Sequence[str]) -> Tuple[numpy.ndarray, numpy.ndarray]:
        def encode(text: str) -> numpy.ndarray:
            return self._encoding.encode_to_numpy(text, disallowed_special=())

        parts = self._guarded(encode, texts)
        lengths = numpy.fromiter(map(len, parts), dtype=numpy.int64, count=len(parts))
        return numpy.concatenate(parts).astype(numpy.int64) if parts else numpy.empty(0, numpy.int64), lengths

    def _guarded(self, encode, texts: Sequence[str]) -> List[Any]:
        """tiktoken's expressions give up on some texts, such as a million blanks with some patterns."""
        encoded: List[Any] = []
        try:
            for text in texts:
                encoded.append(encode(text))
        except ValueError as error:
            raise unencodable(self.path, texts[len(encoded)], error, len(encoded)) from error
        return encoded

    def detokenize(self, ids: Sequence[int]) -> str:
        return b"".join(self._bytes.get(int(token), b"") for token in ids).decode("utf-8", errors="replace")

    @property
    def control_tokens(self) -> Dict[str, int]:
        return dict(self._special)

    @property
    def template_variables(self) -> Dict[str, str]:
        return {} if self._facts.get("eod") is None else {"eos_token": self._facts["eod"]}

    def save_for_huggingface(self, folder) -> None:
        from megatron_fbt.data.tiktoken_export import save_tiktoken_for_huggingface

        save_tiktoken_for_huggingface(self, self._ranks, self._facts["pat_str"], folder)


def _read_ranks(path: Path, content: bytes) -> Dict[bytes, int]:
    """{token: rank} of lines of a token in base64 and its rank."""
    ranks: Dict[bytes, int] = {}
    number = 0
    try:
        for line in content.splitlines():
            number += 1
            if line:
                token, rank = line.split()
                piece = base64.b64decode(token, validate=True)
                if piece in ranks:
                    raise ValueError(f"the token has come before with rank {ranks[piece]}")
                ranks[piece] = int(rank)
    except (ValueError, binascii.Error) as error:
        raise DataError(f"tokenizer {path}, line {number}: not a token in base64 and its rank ({error})") from error
    if not ranks:
        raise DataError(f"tokenizer {path}: it is empty, not a file of ranks; give another file")
    if min(ranks.values()) < 0 or len(set(ranks.values())) != len(ranks):
        raise DataError(f"tokenizer {path}: ranks are negative or come twice")
    return ranks


def _each_key_once(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"it names {twice[0]!r} more than once")
    return dict(pairs)


def _read_facts(path: Path) -> Dict[str, Any]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_each_key_once)
        special, eod = facts["special_tokens"], facts.get("eod")
        good = isinstance(facts["pat_str"], str) and all(
            isinstance(name, str) and name and isinstance(token, int) and token >= 0 for name, token in special.items()
        )
    except FileNotFoundError as error:
        raise DataError(
            f"tokenizer {path}: no such file; beside the ranks it must say pat_str, special_tokens and eod"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"tokenizer {path}: cannot be read ({type(error).__name__}: {error})") from error
    if not good or not (eod is None or eod in special):
        raise DataError(
            f"tokenizer {path}: pat_str must be a text, special_tokens texts with ids, and eod one of special_tokens"
        )
    return facts
