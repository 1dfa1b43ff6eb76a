"""Megatron's indexed data sets (.bin, .idx): writing whole pairs only, and checking a pair before it is mapped."""

import os
import shutil
import struct
import warnings
from array import array
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Dict, Iterator, Optional, Tuple

import numpy

from megatron_fbt.core.manifest import FileEntry, HashingFile, sync_path
from megatron_fbt.data.encode import narrow_ids, token_dtype
from megatron_fbt.data.output_files import open_alone, partial_path
from megatron_fbt.errors import DataError, MissingDataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TOKEN_TYPES = {1: numpy.uint8, 2: numpy.int8, 3: numpy.int16, 4: numpy.int32, 5: numpy.int64, 8: numpy.uint16}
_PART = 1 << 20
"""Index entries looked at together, and tokens looked at by a check."""


@contextmanager
def quiet_megatron() -> Iterator[None]:
    """Use Megatron-Core without its warnings about absent GPU libraries and ranks, which data handling does not use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx under other names and gives them theirs at the very end.

    The files are those that Megatron-Core's builder would write, byte for byte. Memory holds four bytes a document.
    An older pair of this name stays until then.
    """

    def __init__(self, prefix: str, vocab_size: int):
        """Open the files.

        Raises:
            DataError: The folder cannot be written, or another process is writing this pair.
        """
        self.prefix, self.vocab_size = str(prefix), vocab_size
        self.documents = self.tokens = 0
        self.files: Dict[str, FileEntry] = {}
        """Size and hash of both files, by ending; known after ``finish``."""
        self._bin, self._idx = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        self._partial_bin, self._partial_idx = partial_path(self._bin), partial_path(self._idx)
        self._lengths = array("i")
        self._stream: Optional[HashingFile] = None
        self.dtype = token_dtype(vocab_size)
        try:
            self._bin.parent.mkdir(parents=True, exist_ok=True)
            self._stream = HashingFile(open_alone(self._partial_bin))
            self._partial_idx.unlink(missing_ok=True)
        except OSError as error:
            self.discard()
            raise self._write_error(error) from error

    def add(self, ids: numpy.ndarray, lengths: numpy.ndarray) -> None:
        """Append documents.

        Args:
            ids: [tokens] ids of all of them, one after the other.
            lengths: [documents] in tokens; none is 0.

        Raises:
            DataError: An id is outside the vocabulary, a document is too long for the format, or writing fails.
        """
        ids = narrow_ids(ids, self.vocab_size)
        lengths = numpy.asarray(lengths, dtype=numpy.int64)
        if lengths.size and not (0 < int(lengths.min()) and int(lengths.max()) < 2**31):
            bad = int(lengths.min()) if int(lengths.min()) <= 0 else int(lengths.max())
            raise DataError(f"output {self.prefix}: a document of {bad} tokens; 1 to {2**31 - 1} fit")
        if int(lengths.sum()) != ids.size:
            raise DataError(f"output {self.prefix}: {ids.size} ids for documents of {int(lengths.sum())} tokens")
        try:
            self._stream.write(numpy.ascontiguousarray(ids).data if ids.size else b"")
        except OSError as error:
            raise self._write_error(error) from error
        self._lengths.frombytes(lengths.astype(numpy.int32).tobytes())
        self.documents += len(lengths)
        self.tokens += ids.size

    def finish(self) -> None:
        """Write the index and bring both files safely to the disk, still under their temporary names."""
        try:
            os.fsync(self._stream.fileno())
            self.files[".bin"] = self._stream.entry
            with closing(HashingFile(open_alone(self._partial_idx))) as stream:
                self._write_index(stream)
                os.fsync(stream.fileno())
                self.files[".idx"] = stream.entry
        except OSError as error:
            raise self._write_error(error) from error

    def _write_index(self, stream: HashingFile) -> None:
        """Header, lengths, byte offsets and document bounds: every document is one sequence."""
        code = next(code for code, dtype in _TOKEN_TYPES.items() if dtype is self.dtype)
        lengths = numpy.frombuffer(self._lengths, dtype=numpy.int32)
        stream.write(_HEADER.pack(_MAGIC, 1, code, self.documents, self.documents + 1))
        stream.write(lengths.data if lengths.size else b"")
        for part in byte_offsets(lengths, numpy.dtype(self.dtype).itemsize):
            stream.write(part.data)
        for first in range(0, self.documents + 1, _PART):
            stream.write(numpy.arange(first, min(first + _PART, self.documents + 1), dtype=numpy.int64).data)

    def publish(self) -> None:
        """Give the files their names: first the data, then the index, without which the data are not looked at.

        An older index goes before, so that it never stands beside the new data.
        """
        try:
            self._idx.unlink(missing_ok=True)
            os.replace(self._partial_bin, self._bin)
            os.replace(self._partial_idx, self._idx)
            sync_path(self._bin.parent)
            self._stream.close()
        except OSError as error:
            raise self._write_error(error) from error

    def discard(self) -> None:
        """Remove what was written under temporary names; harmless after ``publish``."""
        if self._stream is None:
            return
        for path in (self._partial_bin, self._partial_idx):
            with suppress(OSError):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # a full disk; the file is gone anyway
            self._stream.close()
        self._stream = None

    def _write_error(self, error: OSError) -> DataError:
        folder = self._bin.parent
        free = f", {shutil.disk_usage(folder).free} bytes free in {folder}" if folder.exists() else ""
        size = self.tokens * numpy.dtype(self.dtype).itemsize
        return DataError(
            f"output {self._bin}: cannot be written: {error.strerror or error} "
            f"({size} bytes of tokens so far{free}); nothing is left of it"
        )


def byte_offsets(lengths: numpy.ndarray, item_size: int) -> Iterator[numpy.ndarray]:
    """Where each sequence begins in a .bin file, in parts of 2^20 sequences.

    Args:
        lengths: [sequences] in tokens.
        item_size: Bytes of a token.

    Yields:
        [part] int64 byte offsets.
    """
    begin = 0
    for first in range(0, len(lengths), _PART):
        part = lengths[first : first + _PART].astype(numpy.int64) * item_size
        ends = numpy.cumsum(part) + begin
        yield ends - part
        begin = int(ends[-1])


def check_indexed(prefix: str, vocab_size: Optional[int] = None, empty: bool = False) -> None:
    """Check that a pair of files is complete and belongs together, in time proportional to the index.

    Args:
        prefix: Path without .bin and .idx.
        vocab_size: If given, the ids of the first 2^20 tokens must be below it.
        empty: Whether it may be without tokens.

    Raises:
        DataError: Naming the file, the size found and the size expected.
    """
    bin_path, idx_path = f"{prefix}.bin", f"{prefix}.idx"
    for path in (idx_path, bin_path):
        if not os.path.isfile(path):
            raise MissingDataError(f"data set {path}: no such file; data.paths holds prefixes without .bin and .idx")
    dtype, sequences, documents = read_header(idx_path)
    found, expected = os.path.getsize(idx_path), _HEADER.size + 12 * sequences + 8 * documents
    if found != expected:
        raise DataError(
            f"data set {idx_path}: {found} bytes found, {expected} expected for {sequences} sequences; it is damaged "
            "or cut, preprocess again"
        )
    tokens = _check_tables(idx_path, numpy.dtype(dtype).itemsize, sequences, documents)
    found, expected = os.path.getsize(bin_path), tokens * numpy.dtype(dtype).itemsize
    if found != expected:
        raise DataError(
            f"data set {bin_path}: {found} bytes found, {expected} expected by {idx_path} ({tokens} tokens of "
            f"{numpy.dtype(dtype).itemsize} bytes); one of the two is cut or from another data set, preprocess again"
        )
    if tokens == 0 and not empty:
        raise DataError(f"data set {bin_path}: 0 bytes found, at least one token expected; it is empty")
    if vocab_size is not None:
        first = numpy.fromfile(bin_path, dtype=dtype, count=_PART)
        check_ids(first, vocab_size, bin_path)


def check_ids(ids: numpy.ndarray, vocab_size: int, source: str) -> None:
    """Refuse ids that the vocabulary does not have.

    Raises:
        DataError: Naming the source and the id.
    """
    largest, smallest = int(ids.max()), int(ids.min())
    if largest >= vocab_size or smallest < 0:
        bad = smallest if smallest < 0 else largest
        raise DataError(
            f"data set {source}: token id {bad} is outside the vocabulary of {vocab_size} ids; data.tokenizer is not "
            "the tokenizer that the data set was made with"
        )


def open_indexed(prefix: str, mmap: bool = True, vocab_size: Optional[int] = None):
    """Megatron-Core's IndexedDataset over a pair of files that was checked first.

    Args:
        prefix: Path without .bin and .idx.
        mmap: Memory-map the .bin file.
        vocab_size: See check_indexed.

    Raises:
        DataError: See check_indexed.
    """
    with quiet_megatron():
        from megatron.core.datasets.indexed_dataset import IndexedDataset

    check_indexed(prefix, vocab_size)
    with quiet_megatron():
        return IndexedDataset(str(prefix), multimodal=False, mmap=mmap)


def read_header(idx_path: str):
    """Token type, number of sequences and number of document bounds (documents + 1) of an index.

    Raises:
        DataError: It is none.
    """
    with open(idx_path, "rb") as stream:
        header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise DataError(f"data set {idx_path}: {len(header)} bytes found, at least {_HEADER.size} expected; it is cut")
    magic, version, code, sequences, documents = _HEADER.unpack(header)
    if magic != _MAGIC or version != 1:
        raise DataError(f"data set {idx_path}: it does not begin like the index of a Megatron data set")
    if code not in _TOKEN_TYPES:
        raise DataError(f"data set {idx_path}: token type {code} is not an integer type")
    return _TOKEN_TYPES[code], sequences, documents


def index_tables(idx_path: str, sequences: int) -> Tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """Lengths [sequences], byte offsets [sequences] and document bounds [documents + 1], mapped into memory."""
    tables = numpy.memmap(idx_path, mode="r", offset=0)
    begin = _HEADER.size
    lengths = tables[begin : begin + 4 * sequences].view(numpy.int32)
    pointers = tables[begin + 4 * sequences : begin + 12 * sequences].view(numpy.int64)
    return lengths, pointers, tables[begin + 12 * sequences :].view(numpy.int64)


def _check_tables(idx_path: str, item_size: int, sequences: int, documents: int) -> int:
    """Check lengths, byte offsets and document bounds against one another; the number of tokens."""
    lengths, pointers, bounds = index_tables(idx_path, sequences)
    tokens = 0
    for first in range(0, sequences, _PART):
        part = lengths[first : first + _PART].astype(numpy.int64)
        ends = numpy.cumsum(part) + tokens
        if (part < 0).any() or not numpy.array_equal(pointers[first : first + _PART], (ends - part) * item_size):
            raise DataError(f"data set {idx_path}: its byte offsets do not follow from its lengths; it is damaged")
        tokens = int(ends[-1])
    steps_back = any((numpy.diff(bounds[i : i + _PART + 1]) < 0).any() for i in range(0, documents, _PART))
    if documents < 1 or bounds[0] != 0 or bounds[-1] != sequences or steps_back:
        raise DataError(f"data set {idx_path}: its documents do not cover its {sequences} sequences; it is damaged")
    return tokens
