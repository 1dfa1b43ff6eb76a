"""Chunks of raw records into token ids: what the worker processes of preprocessing do."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy

from megatron_fbt.config.data import TokenizerConfig
from megatron_fbt.data.chunks import Chunk
from megatron_fbt.data.inputs import BadRecord, parse_line, read_text_file
from megatron_fbt.data.tokenizer import TextEncoder, Tokenizer, build_tokenizer
from megatron_fbt.data.unencodable import UnencodableText
from megatron_fbt.errors import DataError


@dataclass(frozen=True)
class EncodeSettings:
    """What a worker needs to know.

    Attributes:
        tokenizer_type: As in the configuration section data.tokenizer.
        tokenizer_path: Likewise.
        json_keys: Keys of the texts; one output for each. Not used for whole files.
        input_format: ``jsonl`` or ``files``.
        skip_bad_lines: Leave out and count bad lines instead of stopping at the first. Bad files always are.
    """

    tokenizer_type: str
    tokenizer_path: str
    json_keys: Tuple[str, ...] = ("text",)
    input_format: str = "jsonl"
    skip_bad_lines: bool = False

    @property
    def keys(self) -> Tuple[str, ...]:
        """One for each output; empty for that of whole files."""
        return self.json_keys if self.input_format == "jsonl" else ("",)

    def build_tokenizer(self) -> Tokenizer:
        return build_tokenizer(TokenizerConfig(type=self.tokenizer_type, path=self.tokenizer_path))


@dataclass
class Encoded:
    """Documents of one chunk.

    Attributes:
        ids: For each key all token ids [tokens], end-of-document tokens included, in the type of the output.
        lengths: For each key the lengths [documents] in tokens.
        text_bytes: For each key the UTF-8 bytes of the encoded texts.
        blank: For each key the number of empty and blank texts.
        skipped: Bad records left out, by kind.
        failure: File, line and reason of the first bad line, where bad lines are errors.
    """

    ids: List[numpy.ndarray] = field(default_factory=list)
    lengths: List[numpy.ndarray] = field(default_factory=list)
    text_bytes: List[int] = field(default_factory=list)
    blank: List[int] = field(default_factory=list)
    skipped: Dict[str, int] = field(default_factory=dict)
    failure: Optional[str] = None


class Encoder:
    """Encodes chunks with one tokenizer; can be sent to another process."""

    def __init__(self, settings: EncodeSettings, tokenizer: TextEncoder):
        self.settings = settings
        self.tokenizer = tokenizer

    def __call__(self, chunk: Chunk) -> Encoded:
        """Token ids of a chunk's documents, each ended by exactly one end-of-document token.

        Raises:
            DataError: A file cannot be read, or the tokenizer gives ids outside its own vocabulary.
        """
        result, skipped = Encoded(), Counter()
        keys = self.settings.keys
        texts: List[List[str]] = [[] for _ in keys]
        numbers: List[List[int]] = [[] for _ in keys]
        blank = [0] * len(keys)
        read, records = _reader(chunk, keys)
        for number, record in enumerate(records):
            try:
                found = read(record)
            except BadRecord as error:
                if not chunk.files and not self.settings.skip_bad_lines:
                    result.failure = (
                        f"{chunk.place(number)}: {error} ({error.kind}); --skip_bad_lines leaves such {chunk.unit}s out"
                    )
                    return result
                skipped[error.kind] += 1
                continue
            for i, text in enumerate(found):
                if text is None:
                    blank[i] += 1
                else:
                    texts[i].append(text)
                    numbers[i].append(number)
        result.skipped = dict(skipped)
        for kept, places, empty in zip(texts, numbers, blank, strict=True):
            try:
                ids, lengths = self._encode(kept)
            except UnencodableText as error:
                raise DataError(f"input {chunk.place(places[error.position])}: {error}") from error
            result.ids.append(ids)
            result.lengths.append(lengths)
            result.blank.append(empty + len(kept) - len(lengths))
            result.text_bytes.append(sum(map(_utf8_bytes, kept)))
        return result

    def _encode(self, texts: List[str]) -> Tuple[numpy.ndarray, numpy.ndarray]:
        """Ids [tokens] with end tokens, and lengths [documents]; texts without any id are left out."""
        eod = self.tokenizer.eod
        ids, lengths = self.tokenizer.tokenize_flat(texts)
        ends = numpy.cumsum(lengths)
        inside = numpy.flatnonzero(ids == eod)
        if inside.size:
            position = int(numpy.searchsorted(ends, inside[0], side="right"))
            raise UnencodableText(
                f"the tokenizer turns a part of the text {texts[position][:60]!r} into its end-of-document token "
                f"{eod}; use a tokenizer whose end token cannot come from text",
                position,
            )
        kept = lengths > 0
        ids = narrow_ids(ids, self.tokenizer.vocab_size)
        return numpy.insert(ids, ends[kept], eod), lengths[kept] + 1


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8"))


def _reader(chunk: Chunk, keys: Sequence[str]) -> Tuple[Callable[[Any], List[Optional[str]]], Iterator[Any]]:
    """What turns a record of a chunk into one text for each key, and the records."""
    if chunk.files:
        return (lambda path: [read_text_file(path)]), iter(chunk.files)
    if chunk.rows is not None:
        from megatron_fbt.data.parquet import parse_cell, rows_of

        read = lambda cells: [parse_cell(cell, key) for cell, key in zip(cells, keys, strict=True)]  # noqa: E731
        return read, rows_of(chunk.rows, keys, chunk.count)
    return (lambda line: parse_line(line, keys)), chunk.split_lines()


def token_dtype(vocab_size: int):
    """Type of the ids in a .bin file, Megatron-Core's rule: two bytes for vocabularies below 65,500, else four."""
    return numpy.uint16 if vocab_size < 65500 else numpy.int32


def narrow_ids(ids: numpy.ndarray, vocab_size: int) -> numpy.ndarray:
    """The ids [n] in the type for their vocabulary.

    Raises:
        DataError: An id is negative or not below ``vocab_size``; narrowing would change it.
    """
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise DataError(f"token id {bad} is outside the vocabulary of {vocab_size} ids (0 to {vocab_size - 1})")
    return ids.astype(token_dtype(vocab_size), copy=False)
