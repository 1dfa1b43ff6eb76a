"""One stream of documents from any number of .bin/.idx pairs: named, checked, opened as one data set."""

import functools
import hashlib
import os
from dataclasses import dataclass
from typing import List, Optional, Sequence, Tuple

import numpy

from megatron_fbt.data.indexed import check_indexed, quiet_megatron
from megatron_fbt.data.splits import document_ranges
from megatron_fbt.errors import DataError

with quiet_megatron():
    from megatron.core.datasets.indexed_dataset import IndexedDataset

MOST_DOCUMENTS = 2**31 - 1
"""Megatron-Core numbers the documents of one data set with 32 bits."""
_BLOCK = 1 << 20
TRAIN, VALID = 0, 1
"""Places in a split."""


class JoinedDataset:
    """Several of Megatron-Core's IndexedDatasets as one: the documents of the first, then those of the next.

    Args:
        parts: At least one.
    """

    def __init__(self, parts: Sequence[IndexedDataset]):
        self._parts = list(parts)
        self._ends = numpy.cumsum([len(part) for part in parts], dtype=numpy.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def sequence_lengths(self) -> numpy.ndarray:
        """[documents] int32, in tokens; put together anew each time, so that no process keeps it."""
        return numpy.concatenate([part.sequence_lengths for part in self._parts])

    def get(self, idx: int, offset: int = 0, length: Optional[int] = None) -> numpy.ndarray:
        """``length`` tokens of a document from ``offset`` on; None = all that follow."""
        number = int(numpy.searchsorted(self._ends, idx, side="right"))
        first = int(self._ends[number - 1]) if number else 0
        return self._parts[number].get(int(idx) - first, offset=offset, length=length)


@dataclass(frozen=True, eq=False)
class Stream:
    """A stream of documents and its splits.

    Attributes:
        name: For messages: the name of a source, or the entry of data.paths.
        prefixes: Of its pairs, in order.
        parts: The opened pairs.
        split: Relative sizes of training, validation and test.
        cache: Folder for its indices, named by its content.
        weight: As configured; None = in proportion to the tokens.
    """

    name: str
    prefixes: Tuple[str, ...]
    parts: Tuple[IndexedDataset, ...]
    split: Tuple[float, float, float]
    cache: str
    weight: Optional[float] = None

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    @functools.cached_property
    def dataset(self):
        """All parts as one."""
        return self.parts[0] if len(self.parts) == 1 else JoinedDataset(self.parts)

    def range(self, place: int) -> Tuple[int, int]:
        """First document of a split, and the one after its last."""
        return document_ranges(self.split, len(self))[place]

    def documents(self, place: int) -> int:
        """Documents of a split."""
        first, end = self.range(place)
        return end - first

    def tokens(self, place: int) -> int:
        """Tokens of a split."""
        return self._tokens[place]

    @functools.cached_property
    def _tokens(self) -> List[int]:
        return [self._count(first, end) for first, end in document_ranges(self.split, len(self))]

    def _count(self, first: int, end: int) -> int:
        total, begin = 0, 0
        for part in self.parts:
            lengths = part.sequence_lengths[max(0, first - begin) : max(0, end - begin)]
            total += int(lengths.sum(dtype=numpy.int64))
            begin += len(part)
        return total


def open_stream(
    name: str,
    prefixes: Sequence[str],
    split: Tuple[float, float, float],
    cache: str,
    mmap: bool,
    vocab_size: Optional[int],
    weight: Optional[float] = None,
    check: bool = True,
) -> Stream:
    """Open the pairs of one stream.

    Args:
        name: See Stream.
        prefixes: Of its pairs.
        split: Relative sizes of training, validation and test.
        cache: Folder of the index cache.
        mmap: Memory-map the .bin files.
        vocab_size: Ids must be below it; None = not known.
        weight: See Stream.
        check: Check the files first.

    Raises:
        DataError: A pair is missing, damaged or of another tokenizer, or there are too many documents.
    """
    parts = []
    for prefix in prefixes:
        if check:
            check_indexed(prefix, vocab_size)
        try:
            parts.append(IndexedDataset(prefix, multimodal=False, mmap=mmap))
        except (OSError, AssertionError) as error:
            raise DataError(f"data set {prefix}: cannot be opened: {error}") from error
    check_document_count(name, sum(len(part) for part in parts))
    folder = os.path.join(cache, fingerprint(prefixes))
    return Stream(name, tuple(prefixes), tuple(parts), split, folder, weight)


def check_document_count(name: str, documents: int) -> None:
    """Refuse more documents in one stream than 32 bits can number.

    Raises:
        DataError: Naming the stream and what to do.
    """
    if documents > MOST_DOCUMENTS:
        raise DataError(
            f"data set {name}: {documents:,} documents, and one source can have {MOST_DOCUMENTS:,}; divide its pairs "
            "among several sources of data.sources, with weights in proportion to their tokens"
        )


def fingerprint(prefixes: Sequence[str]) -> str:
    """A name for the content of a stream: sizes of the files and up to 64 MiB of each index, spread over it.

    Indices cached for older data of the same paths are so never used.
    """
    digests = [_pair_fingerprint(prefix) for prefix in prefixes]
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16]


def _pair_fingerprint(prefix: str) -> str:
    sizes = [os.path.getsize(f"{prefix}{ending}") for ending in (".bin", ".idx")]
    digest = hashlib.sha256(repr(sizes).encode())
    blocks = -(-sizes[1] // _BLOCK)
    with open(f"{prefix}.idx", "rb") as stream:
        for block in sorted({i * (blocks - 1) // 63 for i in range(64)}):
            stream.seek(block * _BLOCK)
            digest.update(stream.read(_BLOCK))
    return digest.hexdigest()[:16]
