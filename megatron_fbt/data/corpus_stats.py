"""Counts of a corpus in bounded memory: lengths, duplicates, tokens per byte of text, end tokens."""

import hashlib
from typing import Any, Dict, Iterable, Optional, Set

import numpy

from megatron_fbt.data.tokenizer import Tokenizer

MOST_HASHES = 1 << 21
"""Documents whose hashes are held at the same time; beyond, an ever smaller part of all hashes counts."""
DECODED = 1000
"""Documents that are turned into text, to count its bytes."""


class DuplicateShare:
    """The share of documents that are copies of an earlier one, exactly or from a part of all hashes.

    A document counts if its hash lies below a limit that sinks when too many are held; copies have the same hash, so
    a part of all hashes holds whole groups of copies.
    """

    def __init__(self, most: int = MOST_HASHES):
        self._most, self._limit = most, 1 << 64
        self._seen: Set[int] = set()
        self._counts: Dict[int, int] = {}

    def add(self, ids: numpy.ndarray) -> None:
        """Count one document."""
        content = numpy.ascontiguousarray(ids).tobytes()
        key = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
        if key >= self._limit:
            return
        if key in self._seen:
            self._counts[key] = self._counts.get(key, 0) + 1
            return
        self._seen.add(key)
        while len(self._seen) > self._most:
            self._limit //= 2
            self._seen = {key for key in self._seen if key < self._limit}
            self._counts = {key: count for key, count in self._counts.items() if key < self._limit}

    @property
    def share(self) -> float:
        """Copies among the documents that count; 0 if there are none."""
        copies = sum(self._counts.values())
        return copies / max(1, copies + len(self._seen))

    @property
    def part_of_hashes(self) -> float:
        """1 = every document counts."""
        return self._limit / (1 << 64)


def corpus_stats(
    documents, tokenizer: Optional[Tokenizer], sample: Optional[int], seed: int, text_bytes: Optional[int] = None
) -> Dict[str, Any]:
    """Statistics of documents.

    Args:
        documents: See megatron_fbt.data.inspection: ``len``, ``lengths`` [documents] and ``ids(number)``.
        tokenizer: That made them; None = nothing is said of text and end tokens.
        sample: Look into so many documents drawn by ``seed`` without repetition; None = into all.
        seed: Of the draw.
        text_bytes: UTF-8 bytes of all texts, if that is known.

    Returns:
        documents, tokens and length (exact, from the index); looked_into, how many were read for what follows:
        duplicates_share, duplicates_hash_part, without_end_token, with_inner_end_token, tokens_per_byte and the
        documents that this was measured on.
    """
    lengths = documents.lengths
    count = len(lengths)
    numbers: Iterable[int] = range(count)
    if sample is not None and sample < count:
        numbers = sorted(draw(count, sample, seed))
    copies, unended, inner, read = DuplicateShare(), 0, 0, 0
    eod = None if tokenizer is None else tokenizer.eod
    for number in numbers:
        ids = documents.ids(number)
        copies.add(ids)
        read += 1
        if eod is not None and len(ids):
            unended += int(ids[-1]) != eod
            inner += bool((ids[:-1] == eod).any())
    found: Dict[str, Any] = {
        "documents": count,
        "tokens": int(lengths.sum(dtype=numpy.int64)),
        "length": _lengths(lengths),
        "looked_into": read,
        "duplicates_share": copies.share,
        "duplicates_hash_part": copies.part_of_hashes,
    }
    if eod is not None and eod >= 0:
        found.update(without_end_token=unended, with_inner_end_token=inner)
        found.update(_text(documents, tokenizer, seed, found["tokens"], text_bytes))
    return found


def draw(count: int, wanted: int, seed: int) -> Set[int]:
    """Different numbers below count, the same for the same seed, in memory for the wanted ones alone."""
    generator = numpy.random.default_rng(seed)
    found: Set[int] = set()
    while len(found) < min(wanted, count):
        found.add(int(generator.integers(count)))
        if 2 * len(found) > count:
            return set(generator.permutation(count)[: min(wanted, count)].tolist())
    return found


def _lengths(lengths: numpy.ndarray) -> Dict[str, Any]:
    """Smallest, largest, mean, median, and how many documents lie in [2^k, 2^(k+1)) tokens."""
    powers = numpy.bincount(numpy.frexp(lengths.astype(numpy.float64))[1])
    histogram = [
        {"from": (1 << power) >> 1, "below": 1 << power, "documents": int(documents)}
        for power, documents in enumerate(powers)
        if documents
    ]
    return {
        "smallest": int(lengths.min()),
        "median": float(numpy.median(lengths)),
        "mean": float(lengths.mean(dtype=numpy.float64)),
        "largest": int(lengths.max()),
        "histogram": histogram,
    }


def _text(documents, tokenizer: Tokenizer, seed: int, tokens: int, text_bytes: Optional[int]) -> Dict[str, Any]:
    if text_bytes:
        return {"tokens_per_byte": tokens / text_bytes, "tokens_per_byte_of": len(documents.lengths)}
    size = read = 0
    numbers = draw(len(documents.lengths), DECODED, seed)
    for number in numbers:
        ids = documents.ids(number)
        read += len(ids)
        size += len(tokenizer.detokenize(ids.tolist()).encode("utf-8", "surrogatepass"))
    return {"tokens_per_byte": read / size if size else None, "tokens_per_byte_of": len(numbers)}
