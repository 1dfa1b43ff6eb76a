"""Chunks of raw records into token ids: what the worker processes of preprocessing do."""

import os
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

import numpy

from megatron_fbt.config.data import TokenizerConfig
from megatron_fbt.data.inputs import (
    EMPTY_TEXT,
    BadRecord,
    InputFile,
    parse_line,
    read_lines,
    read_text_file,
)
from megatron_fbt.data.tokenizer import Tokenizer, build_tokenizer
from megatron_fbt.errors import DataError

CHUNK_BYTES = 1 << 18
CHUNK_RECORDS = 512


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

    def build_tokenizer(self) -> Tokenizer:
        return build_tokenizer(TokenizerConfig(type=self.tokenizer_type, path=self.tokenizer_path))


@dataclass(frozen=True)
class Chunk:
    """Records that one call of a worker encodes.

    Attributes:
        path: The file of the lines; empty for whole files.
        first_line: Line number of the first one, from 1.
        lines: Raw lines; None for whole files.
        files: Paths of whole files.
        progress: Bytes on disk that all chunks up to this one have used.
    """

    path: str = ""
    first_line: int = 0
    lines: Optional[List[bytes]] = None
    files: Tuple[str, ...] = ()
    progress: int = 0


@dataclass
class Encoded:
    """Documents of one chunk.

    Attributes:
        ids: For each key all token ids [tokens], end-of-document tokens included, in the type of the output.
        lengths: For each key the lengths [documents] in tokens.
        text_bytes: UTF-8 bytes of the encoded texts.
        skipped: Records left out, by kind.
        failure: File, line and reason of the first bad line, where bad lines are errors.
    """

    ids: List[numpy.ndarray] = field(default_factory=list)
    lengths: List[numpy.ndarray] = field(default_factory=list)
    text_bytes: int = 0
    skipped: Dict[str, int] = field(default_factory=dict)
    failure: Optional[str] = None


def make_chunks(files: Sequence[InputFile], settings: EncodeSettings) -> Iterator[Chunk]:
    """Cut the input into chunks, in order; the cuts depend on the input alone."""
    done = 0
    if settings.input_format == "files":
        yield from _chunks_of_files(files)
        return
    for file in files:
        lines, size, first_line, position = [], 0, 1, 0
        for line, position in read_lines(file):
            lines.append(line)
            size += len(line)
            if size >= CHUNK_BYTES or len(lines) >= CHUNK_RECORDS:
                yield Chunk(file.path, first_line, lines, progress=done + position)
                first_line += len(lines)
                lines, size = [], 0
        done += file.size
        if lines:
            yield Chunk(file.path, first_line, lines, progress=done)


def _chunks_of_files(files: Sequence[InputFile]) -> Iterator[Chunk]:
    paths, size, done = [], 0, 0
    for file in files:
        paths.append(file.path)
        size += file.size
        done += file.size
        if size >= CHUNK_BYTES or len(paths) >= CHUNK_RECORDS:
            yield Chunk(files=tuple(paths), progress=done)
            paths, size = [], 0
    if paths:
        yield Chunk(files=tuple(paths), progress=done)


def encode_chunk(settings: EncodeSettings, chunk: Chunk) -> Encoded:
    """Token ids of a chunk's documents, each ended by exactly one end-of-document token.

    Raises:
        DataError: A file cannot be read, or the tokenizer gives ids outside its own vocabulary.
    """
    return _encoder(settings, os.getpid())(chunk)


@lru_cache(maxsize=1)
def _encoder(settings: EncodeSettings, process: int) -> "Encoder":
    return Encoder(settings, settings.build_tokenizer())


class Encoder:
    """Encodes chunks with one tokenizer."""

    def __init__(self, settings: EncodeSettings, tokenizer: Tokenizer):
        self.settings = settings
        self.tokenizer = tokenizer
        self.dtype = token_dtype(tokenizer.vocab_size)

    def __call__(self, chunk: Chunk) -> Encoded:
        result = Encoded()
        skipped = Counter()
        keys = self.settings.json_keys if chunk.lines is not None else ("",)
        texts: List[List[str]] = [[] for _ in keys]
        for name, parse in self._records(chunk, keys):
            try:
                for kept, text in zip(texts, parse(), strict=True):
                    if text is None:
                        skipped[EMPTY_TEXT] += 1
                    else:
                        kept.append(text)
            except BadRecord as error:
                if chunk.lines is not None and not self.settings.skip_bad_lines:
                    result.failure = f"{name}: {error} ({error.kind}); --skip_bad_lines leaves such lines out"
                    return result
                skipped[error.kind] += 1
        for kept in texts:
            self._encode(kept, result, skipped)
        result.skipped = dict(skipped)
        return result

    def _records(self, chunk: Chunk, keys: Sequence[str]):
        if chunk.lines is None:
            for path in chunk.files:
                yield path, lambda path=path: [read_text_file(path)]
            return
        for number, line in enumerate(chunk.lines, chunk.first_line):
            yield f"{chunk.path}, line {number}", lambda line=line: parse_line(line, keys)

    def _encode(self, texts: List[str], result: Encoded, skipped: Counter) -> None:
        eod = self.tokenizer.eod
        documents = []
        for text, ids in zip(texts, self.tokenizer.tokenize_batch(texts) if texts else [], strict=True):
            if not ids:
                skipped[EMPTY_TEXT] += 1
            elif eod in ids:
                raise DataError(
                    f"the tokenizer turns a part of the text {text[:60]!r} into its end-of-document token {eod}; "
                    "use a tokenizer whose end token cannot come from text"
                )
            else:
                documents.append(ids)
                result.text_bytes += len(text.encode("utf-8"))
        lengths = numpy.array([len(ids) + 1 for ids in documents], dtype=numpy.int64)
        flat = numpy.empty(int(lengths.sum()), dtype=numpy.int64)
        end = 0
        for ids in documents:
            flat[end : end + len(ids)] = ids
            end += len(ids) + 1
            flat[end - 1] = eod
        result.ids.append(narrow_ids(flat, self.tokenizer.vocab_size))
        result.lengths.append(lengths)


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
