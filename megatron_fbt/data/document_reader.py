"""Reading a pair of files once from front to back, hashed on the way, with constant memory."""

from typing import Iterator, Tuple

import numpy

from megatron_fbt.core.manifest import FileEntry, HashingReader
from megatron_fbt.data.indexed import index_tables, read_header

TOKENS = 1 << 21
"""Tokens in a piece, unless one document has more."""
_DOCUMENTS = 1 << 20
"""Document bounds looked at together."""


class DocumentReader:
    """The documents of a pair of files that check_indexed has found good.

    Attributes:
        dtype: Of the ids.
        documents: Their number.
        tokens: Of all of them.
    """

    def __init__(self, prefix: str):
        dtype, sequences, bounds = read_header(f"{prefix}.idx")
        self.prefix, self.dtype, self.documents = prefix, numpy.dtype(dtype), bounds - 1
        self._lengths, self._pointers, self._bounds = index_tables(f"{prefix}.idx", sequences)
        self.tokens = self._begin_of(sequences)
        self._file = open(f"{prefix}.bin", "rb", buffering=0)  # noqa: SIM115
        self._reader = HashingReader(self._file)

    def _begin_of(self, sequence: int) -> int:
        """Number of tokens before a sequence."""
        if sequence == 0:
            return 0
        return int(self._pointers[sequence - 1]) // self.dtype.itemsize + int(self._lengths[sequence - 1])

    def _ends(self, first: int, last: int) -> numpy.ndarray:
        """[last - first] number of tokens up to the end of each document."""
        before = numpy.asarray(self._bounds[first + 1 : last + 1]) - 1
        known = before >= 0  # leading documents without sequences end at 0
        at = before[known]
        ends = numpy.zeros(len(before), dtype=numpy.int64)
        ends[known] = self._pointers[at] // self.dtype.itemsize + self._lengths[at]
        return ends

    def pieces(self) -> Iterator[Tuple[int, numpy.ndarray, numpy.ndarray]]:
        """All tokens in order, in pieces of whole documents.

        Yields:
            Number of tokens before the piece, its ids [tokens] (valid until the next piece), and the number of tokens
            up to the end of each of its documents, int64 [documents].
        """
        done = 0
        buffer = numpy.empty(min(TOKENS, self.tokens), dtype=self.dtype)
        for first in range(0, self.documents, _DOCUMENTS):
            ends = self._ends(first, min(first + _DOCUMENTS, self.documents))
            begin = 0
            while begin < len(ends):
                end = max(int(numpy.searchsorted(ends, done + TOKENS, side="right")), begin + 1)
                count = int(ends[end - 1]) - done
                if count > len(buffer):
                    buffer = numpy.empty(count, dtype=self.dtype)
                ids = buffer[:count]
                self._reader.read_into(done * self.dtype.itemsize, memoryview(ids).cast("B"))
                yield done, ids, ends[begin:end]
                done, begin = done + count, end

    def finish(self) -> FileEntry:
        """Read what is left of the .bin file; its size and hash."""
        with self._file:
            return self._reader.finish()
