"""Rows of one source, epoch after epoch: each epoch has all its tokens before the next begins.

The documents of epoch e come in an order of their own, one epoch after the other, and this stream of tokens is cut into
rows without a gap; only after the last epoch less than a row (and the row's last label) is left. The rows that lie in
an epoch are shuffled; the one that reaches into the next epoch is the last of its own. Orders follow from run.seed and
the epoch alone, so a longer run has the same rows first.
"""

import hashlib
import json
from typing import Tuple

import numpy

from megatron_fbt.data.index_cache import ROW_ARRAYS, IndexConfig, cached_arrays
from megatron_fbt.data.indexed import quiet_megatron

with quiet_megatron():
    from megatron.core.datasets import helpers
    from megatron.core.datasets.gpt_dataset import GPTDataset
    from megatron.core.datasets.utils import Split

FORMAT = 1
"""Changes when the orders do."""
_DOCUMENTS, _ROWS = 1, 2
"""Numbers of the two draws of an epoch."""


def epochs_for(rows: int, tokens: int, sequence_length: int) -> int:
    """Epochs that so many rows reach into, the label of the last one included; at least 1."""
    return max(1, -(-(rows * sequence_length + 1) // tokens))


def rows_of_epochs(epochs: int, tokens: int, sequence_length: int) -> int:
    """Whole rows in so many epochs of ``tokens`` tokens, each with a label for its last token."""
    return (epochs * tokens - 1) // sequence_length


class EpochRows(GPTDataset):
    """Megatron-Core's GPTDataset with another order.

    Args:
        dataset: The documents: an IndexedDataset or a JoinedDataset.
        documents: First document, and the one after the last.
        rows: How many are needed; there may be more.
        split: Only for names of files.
        config: Settings; path_to_cache is a folder named by the content of the documents.
        tokens: In these documents.
    """

    def __init__(self, dataset, documents: Tuple[int, int], rows: int, split: Split, config: IndexConfig, tokens: int):
        self.documents, self.tokens = documents, tokens
        self.epochs = epochs_for(rows, tokens, config.sequence_length)
        super().__init__(dataset, None, numpy.arange(0, dtype=numpy.int32), rows, split, config)

    def _build_document_sample_shuffle_indices(self):
        self.unique_description = json.dumps(
            {
                "format": FORMAT,
                "documents": self.documents,
                "epochs": self.epochs,
                "seed": self.config.random_seed,
                "sequence_length": self.config.sequence_length,
            },
            indent=1,
        )
        self.unique_description_hash = hashlib.sha256(self.unique_description.encode()).hexdigest()[:32]
        return cached_arrays(self, ROW_ARRAYS, self._build)

    def _build(self):
        first, end = self.documents
        length, seed, lengths = self.config.sequence_length, self.config.random_seed, self.dataset.sequence_lengths
        order = numpy.empty((self.epochs, end - first), dtype=numpy.int32)
        for epoch in range(self.epochs):
            order[epoch] = numpy.arange(first, end, dtype=numpy.int32)
            _draw(seed, epoch, _DOCUMENTS).shuffle(order[epoch])
        order = order.reshape(-1)
        begins = helpers.build_sample_idx(lengths, order, length, self.epochs, self.tokens)
        rows = len(begins) - 1
        shuffled = numpy.arange(rows, dtype=numpy.uint32 if rows < 2**32 else numpy.int64)
        for epoch in range(self.epochs):
            inside = slice(*rows_inside(epoch, self.tokens, length))
            _draw(seed, epoch, _ROWS).shuffle(shuffled[inside])
        return order, begins, shuffled


def rows_inside(epoch: int, tokens: int, sequence_length: int) -> Tuple[int, int]:
    """First row whose inputs and labels all lie in an epoch, and the row after the last such.

    Args:
        epoch: Counted from 0.
        tokens: Of an epoch.
        sequence_length: Inputs of a row.
    """
    first = -(-epoch * tokens // sequence_length)
    return first, max(first, rows_of_epochs(epoch + 1, tokens, sequence_length))


def _draw(seed: int, epoch: int, which: int) -> numpy.random.RandomState:
    """Random numbers whose sequence NumPy keeps in all versions."""
    return numpy.random.RandomState([seed % 2**32, epoch, which])
