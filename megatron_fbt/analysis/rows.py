"""Rows of tokens for an exported model, out of a text file or an indexed data set."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Optional, Tuple

import numpy
import torch
from torch import Tensor

from megatron_fbt.config.data import parse_split
from megatron_fbt.data.indexed import check_ids, open_indexed
from megatron_fbt.data.splits import document_ranges
from megatron_fbt.errors import ConfigError, DataError


@dataclass
class TokenRows:
    """Rows that do not overlap.

    Attributes:
        input_ids: [N, T].
        document_starts: [N, T] bool; None where the source is one document.
        available: Rows that the source holds.
    """

    input_ids: Tensor
    document_starts: Optional[Tensor]
    available: int


def read_text(path: str) -> str:
    """A UTF-8 file that holds more than blanks.

    Raises:
        DataError: It does not, or cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"text {path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"text {path}: not UTF-8 ({error})") from error
    if not text.strip():
        raise DataError(f"text {path}: it is empty; give text that the model was not trained on")
    return text


def text_rows(tokenizer: Any, vocab_size: int, path: str, rows: int, length: int, seed: int) -> TokenRows:
    """Rows of a text file, which counts as one document.

    Args:
        tokenizer: The export's.
        vocab_size: The model's.
        path: UTF-8 text.
        rows: Most rows N to take; fewer where the text is shorter.
        length: Tokens T of a row.
        seed: Which of the rows are taken, if there are more.

    Raises:
        DataError: The file cannot be read, is empty, or is shorter than one row.
    """
    ids = numpy.array(tokenizer(read_text(path), add_special_tokens=False, verbose=False).input_ids, dtype=numpy.int64)
    taken, available = _choose(len(ids), f"text {path}", rows, length, seed)
    ids = ids[: available * length].reshape(available, length)[taken]
    check_ids(ids, vocab_size, f"of {path}")
    return TokenRows(torch.from_numpy(ids), None, available)


def indexed_rows(
    prefix: str, vocab_size: int, split: Optional[str], end: Optional[int], rows: int, length: int, seed: int
) -> TokenRows:
    """Rows of the validation documents of a data set from tools/preprocess_data.py, one document after the other.

    Args:
        prefix: Path without .bin and .idx.
        vocab_size: The model's.
        split: As data.split of the training run: its second part is taken; None = all documents.
        end: Id that ends a document: the token after it starts one. None = documents as the data set has them.
        rows, length, seed: See text_rows.

    Raises:
        ConfigError: The split cannot be read.
        DataError: The data set is missing, damaged, of another tokenizer, or too short.
    """
    dataset = open_indexed(prefix, vocab_size=vocab_size)
    first, last = 0, len(dataset)
    if split is not None:
        first, last = document_ranges(parse_split(split), len(dataset))[1]
    lengths = dataset.sequence_lengths[first:last].astype(numpy.int64)
    if not len(lengths):
        raise DataError(f"data set {prefix}: split {split} leaves none of its {len(dataset)} documents")
    ends = numpy.cumsum(lengths)
    taken, available = _choose(int(ends[-1]), f"data set {prefix}", rows, length, seed)
    ids, starts = numpy.zeros((len(taken), length), dtype=numpy.int64), numpy.zeros((len(taken), length), dtype=bool)
    for place, row in enumerate(taken):
        document, position = int(numpy.searchsorted(ends, row * length, side="right")), row * length
        while position < (row + 1) * length:
            begin = int(ends[document] - lengths[document])
            part = dataset.get(first + document, position - begin)[: (row + 1) * length - position]
            at = position - row * length
            ids[place, at : at + len(part)] = part
            starts[place, at] |= position == begin and len(part) > 0
            position, document = position + len(part), document + 1
    if end is not None:
        starts[:, 1:] |= ids[:, :-1] == end
    check_ids(ids, vocab_size, f"of {prefix}")
    return TokenRows(torch.from_numpy(ids), torch.from_numpy(starts), available)


def _choose(tokens: int, source: str, rows: int, length: int, seed: int) -> Tuple[List[int], int]:
    """Numbers of the rows to take, in order, and how many there are."""
    if rows < 1 or length < 2:
        raise ConfigError(f"rows={rows}, length={length}: at least 1 row of at least 2 tokens is needed")
    available = tokens // length
    if available == 0:
        raise DataError(f"{source}: {tokens} tokens, one row needs {length}; give more text or a smaller length")
    if available <= rows:
        return list(range(available)), available
    picked = numpy.random.default_rng(seed).choice(available, rows, replace=False)
    return sorted(picked.tolist()), available
