"""Tokenizers: SentencePiece models and Hugging Face folders behind one interface.

Both treat text as text: nothing that a document contains can become the end-of-document token.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from pathlib import Path
from typing import Dict, List, Optional, Protocol, Sequence, Tuple

import numpy

from megatron_fbt.config.data import TokenizerConfig
from megatron_fbt.data.huggingface_files import TOKENIZER_FILES, encode_batch, load_fast_tokenizer, make_portable
from megatron_fbt.errors import ConfigError, DataError

SPACE_SYMBOL = "\u2581"
"""What SentencePiece writes for a space inside its pieces."""
SENTENCEPIECE_FILE = "tokenizer.model"
"""Name of a copy of a SentencePiece model."""


class TextEncoder(Protocol):
    """The part of a tokenizer that encodes documents; it can be sent to another process and is soon ready there.

    Attributes:
        vocab_size: Number of token ids.
        eod: Id of the end-of-document token.
    """

    vocab_size: int
    eod: int

    def tokenize_flat(self, texts: Sequence[str]) -> Tuple[numpy.ndarray, numpy.ndarray]:
        """Ids [tokens] of all texts, one after the other, without any special token; numbers of ids [texts]."""


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes:
        vocab_size: Number of token ids (not padded); every id is below it.
        unique_identifiers: What names this tokenizer in the key of a data set's index cache.
        pad: -1, an id that no document contains: Megatron-Core's data sets mask nothing.
        saved_chat_template: Chat template that save_for_huggingface stores. The stored tokenizer then takes names of
            control tokens in its input for these tokens, as a rendered chat needs it; with None they are text.
    """

    vocab_size: int
    unique_identifiers: "OrderedDict[str, str]"
    pad: int = -1
    saved_chat_template: Optional[str] = None

    @property
    @abstractmethod
    def eod(self) -> int:
        """Id of the end-of-document token.

        Raises:
            DataError: The tokenizer has none.
        """

    @abstractmethod
    def tokenize_batch(self, texts: Sequence[str]) -> List[List[int]]:
        """Token ids of each text, without any special token."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of the ids; special tokens such as the end of a document give nothing."""

    @property
    @abstractmethod
    def control_tokens(self) -> Dict[str, int]:
        """Ids of the tokens that chat templates may write by name, such as the end of a turn."""

    @property
    def chat_template(self) -> Optional[str]:
        """The tokenizer's own chat template (Jinja); None if it has none."""
        return None

    @property
    @abstractmethod
    def template_variables(self) -> Dict[str, str]:
        """What chat templates find under names such as ``eos_token``."""

    def encode_rendered(self, text: str) -> List[int]:
        """Token ids of what a chat template has rendered: names of control tokens become these tokens."""
        control = self.control_tokens
        if not control:
            return self.tokenize(text)
        names = "|".join(re.escape(name) for name in sorted(control, key=len, reverse=True))
        ids: List[int] = []
        for position, part in enumerate(re.split(f"({names})", text)):
            if part:
                ids += [control[part]] if position % 2 else self.tokenize(part)
        return ids

    @abstractmethod
    def save_for_huggingface(self, folder) -> None:
        """Write files from which ``transformers.AutoTokenizer`` loads an equal tokenizer offline.

        Raises:
            DataError: This tokenizer has no equal among Hugging Face's fast tokenizers.
        """

    def text_encoder(self) -> TextEncoder:
        """What worker processes need of it.

        Raises:
            DataError: The tokenizer has no end-of-document token.
        """
        self.eod  # noqa: B018
        return self

    def tokenize_flat(self, texts: Sequence[str]) -> Tuple[numpy.ndarray, numpy.ndarray]:
        """See TextEncoder."""
        return flatten_ids(self.tokenize_batch(texts) if texts else [])

    def files(self) -> Dict[str, Path]:
        """The files that it was read from, by the names that copies of them must have; empty if there are none."""
        return {}

    def tokenize(self, text: str) -> List[int]:
        """Token ids of one text, without any special token."""
        return self.tokenize_batch([text])[0]


def flatten_ids(batch: Sequence[List[int]]) -> Tuple[numpy.ndarray, numpy.ndarray]:
    """Lists of ids as one array int32 [tokens], and their lengths int64 [lists]."""
    flat = array("i")
    for ids in batch:
        flat.fromlist(ids)
    lengths = numpy.fromiter(map(len, batch), dtype=numpy.int64, count=len(batch))
    return numpy.frombuffer(flat, dtype=numpy.int32) if flat else numpy.empty(0, numpy.int32), lengths


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that the configuration names.

    Raises:
        ConfigError: ``data.tokenizer.path`` is not set.
        DataError: The files are missing or are not a tokenizer of this type.
    """
    if not config.path:
        raise ConfigError(
            "data.tokenizer.path is not set: name a SentencePiece .model file, a Hugging Face folder or NAME.tiktoken"
        )
    if config.type == "sentencepiece":
        return SentencePieceTokenizer(config.path)
    if config.type == "huggingface":
        return HuggingFaceTokenizer(config.path)
    if config.type == "tiktoken":
        from megatron_fbt.data.tiktoken_tokenizer import TiktokenTokenizer

        return TiktokenTokenizer(config.path)
    raise ConfigError(f"data.tokenizer.type is '{config.type}': use 'sentencepiece', 'huggingface' or 'tiktoken'")


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece ``.model`` file.

    A model as tools/train_tokenizer.py makes it (byte fallback, no normalization, no added prefix) is lossless: each
    text decodes back to itself. In such a model U+2581, SentencePiece's own space symbol, is written as its three
    bytes; SentencePiece itself would turn it into a space. Other models encode and decode as SentencePiece does.
    """

    def __init__(self, path):
        import sentencepiece

        path = Path(path)
        if not path.is_file():
            raise DataError(f"tokenizer {path}: no such file; it must be a SentencePiece .model file")
        content = path.read_bytes()
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
        except Exception as error:
            raise DataError(f"tokenizer {path}: not a SentencePiece model ({error})") from error
        if not content or not self._model.get_piece_size():
            raise DataError(f"tokenizer {path}: it is empty, not a SentencePiece model; give another file")
        self.path = path
        self.vocab_size = self._model.get_piece_size()
        digest = hashlib.sha256(content).hexdigest()
        self.unique_identifiers = OrderedDict([("class", type(self).__name__), ("sha256", digest)])
        byte_ids = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        has_bytes = all(self._model.is_byte(i) for i in byte_ids)
        self.is_lossless = has_bytes and self._keeps_spaces()
        self._space_symbol_ids = [byte_ids[byte] for byte in SPACE_SYMBOL.encode()] if self.is_lossless else []
        self._bytes = {token: byte for byte, token in enumerate(byte_ids)} if self.is_lossless else {}
        self._pieces: Optional[List[str]] = None

    def files(self) -> Dict[str, Path]:
        return {SENTENCEPIECE_FILE: self.path}

    def _keeps_spaces(self) -> bool:
        """Whether the model neither normalizes nor strips nor adds anything."""
        probe = "  a \t\n  \ufb01 \u00a0\u3000A\u030a  \uff21\r\n "
        pieces = "".join(self._model.encode("a", out_type=str, num_threads=1))
        return pieces == "a" and self._model.decode(self._model.encode(probe, num_threads=1)) == probe

    @property
    def eod(self) -> int:
        eod = self._model.eos_id()
        if eod < 0:
            raise DataError(
                f"tokenizer {self.path}: it has no end-of-sentence token (</s>), which marks the end of a document; "
                "train one that has it (tools/train_tokenizer.py does)"
            )
        return eod

    def tokenize_batch(self, texts: Sequence[str]) -> List[List[int]]:
        ids = self._model.encode(list(texts), num_threads=1)
        for position, text in enumerate(texts):
            if self.is_lossless and SPACE_SYMBOL in text:
                ids[position] = self._tokenize_around_space_symbols(text)
        return ids

    def _tokenize_around_space_symbols(self, text: str) -> List[int]:
        parts = self._model.encode(text.split(SPACE_SYMBOL), num_threads=1)
        ids = list(parts[0])
        for part in parts[1:]:
            ids += self._space_symbol_ids
            ids += part
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        if not self.is_lossless:
            return self._model.decode([int(token) for token in ids])
        if self._pieces is None:
            self._pieces = self.surface_pieces()
        parts, run = [], bytearray()
        for token in ids:
            byte = self._bytes.get(int(token))
            if byte is not None:
                run.append(byte)
                continue
            if run:
                parts.append(_decode_bytes(run))
                run = bytearray()
            parts.append(self._pieces[int(token)])
        parts.append(_decode_bytes(run))
        return "".join(parts)

    def surface_pieces(self) -> List[str]:
        """[vocab_size] text of each piece, spaces as spaces; empty for control, unknown, unused and byte pieces."""
        model = self._model
        return [
            ""
            if model.is_control(i) or model.is_unknown(i) or model.is_unused(i) or model.is_byte(i)
            else model.id_to_piece(i).replace(SPACE_SYMBOL, " ")
            for i in range(self.vocab_size)
        ]

    @property
    def control_tokens(self) -> Dict[str, int]:
        model = self._model
        return {model.id_to_piece(i): i for i in range(self.vocab_size) if model.is_control(i)}

    @property
    def template_variables(self) -> Dict[str, str]:
        model = self._model
        ids = {"bos_token": model.bos_id(), "eos_token": model.eos_id(), "pad_token": model.pad_id()}
        return {name: model.id_to_piece(token) for name, token in ids.items() if token >= 0}

    def save_for_huggingface(self, folder) -> None:
        from megatron_fbt.data.sentencepiece_export import save_sentencepiece_for_huggingface

        save_sentencepiece_for_huggingface(self, self._model, folder)


def _decode_bytes(run: bytearray) -> str:
    """Text of a run of byte tokens; if it is not UTF-8, one replacement character for each byte."""
    try:
        return run.decode("utf-8")
    except UnicodeDecodeError:
        return "\ufffd" * len(run)


class HuggingFaceTokenizer(Tokenizer):
    """A folder with a Hugging Face fast tokenizer, loaded without any network access.

    Special tokens that a document spells out are encoded as ordinary text.
    """

    def __init__(self, path):
        self.path = Path(path)
        self._tokenizer = load_fast_tokenizer(self.path)
        backend = self._tokenizer.backend_tokenizer
        backend.encode_special_tokens = True
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._chat_backend = None
        vocabulary = self._tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1
        digest = hashlib.sha256(f"{backend.to_str()}\0{self._tokenizer.eos_token}".encode()).hexdigest()
        self.unique_identifiers = OrderedDict([("class", type(self).__name__), ("sha256", digest)])

    def files(self) -> Dict[str, Path]:
        names = dict.fromkeys([*TOKENIZER_FILES, *self._tokenizer.vocab_files_names.values()])
        return {name: self.path / name for name in names if (self.path / name).is_file()}

    @property
    def eod(self) -> int:
        eod = self._tokenizer.eos_token_id if self._tokenizer.eos_token is not None else None
        if eod is None:
            raise DataError(
                f"tokenizer {self.path}: it has no eos_token, which marks the end of a document; "
                "set eos_token in its tokenizer_config.json"
            )
        return eod

    def tokenize_batch(self, texts: Sequence[str]) -> List[List[int]]:
        return [encoding.ids for encoding in encode_batch(self._backend, texts, self.path)]

    def text_encoder(self) -> TextEncoder:
        return FastEncoder(self._backend.to_str(), self.vocab_size, self.eod, self.path)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._backend.decode([int(token) for token in ids], skip_special_tokens=True)

    @property
    def control_tokens(self) -> Dict[str, int]:
        added = self._tokenizer.added_tokens_decoder
        return {token.content: i for i, token in added.items() if token.special}

    @property
    def chat_template(self) -> Optional[str]:
        if not self._tokenizer.chat_template:
            return None
        try:
            return self._tokenizer.get_chat_template()
        except ValueError as error:
            raise DataError(f"tokenizer {self.path}: {error}; or name a file in data.chat_template") from error

    @property
    def template_variables(self) -> Dict[str, str]:
        named = self._tokenizer.special_tokens_map
        return {name: str(token) for name, token in named.items() if not isinstance(token, (list, dict))}

    def encode_rendered(self, text: str) -> List[int]:
        if self._chat_backend is None:
            from tokenizers import Tokenizer as Backend

            self._chat_backend = Backend.from_str(self._backend.to_str())
            self._chat_backend.encode_special_tokens = False
        return encode_batch(self._chat_backend, [text], self.path)[0].ids

    def save_for_huggingface(self, folder) -> None:
        split = self.saved_chat_template is None
        self._tokenizer.split_special_tokens = split
        self._tokenizer.init_kwargs.update(split_special_tokens=split, clean_up_tokenization_spaces=False)
        if self.saved_chat_template is not None:
            self._tokenizer.chat_template = self.saved_chat_template
        self._tokenizer.save_pretrained(str(folder))
        make_portable(Path(folder))


class FastEncoder:
    """A Hugging Face fast tokenizer without transformers, whose import takes longer than many a chunk."""

    def __init__(self, content: str, vocab_size: int, eod: int, path: Path):
        self.vocab_size, self.eod, self._path = vocab_size, eod, path
        self._content, self._backend = content, None

    def __getstate__(self):
        return {**self.__dict__, "_backend": None}

    def tokenize_flat(self, texts: Sequence[str]) -> Tuple[numpy.ndarray, numpy.ndarray]:
        """See TextEncoder."""
        if self._backend is None:
            from tokenizers import Tokenizer as Backend

            self._backend = Backend.from_str(self._content)
            self._backend.encode_special_tokens = True
        return flatten_ids([encoding.ids for encoding in encode_batch(self._backend, texts, self._path)])
