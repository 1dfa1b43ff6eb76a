"""Conversations packed whole into rows, each once in an epoch.

Which conversations share a row is settled once for the run; each epoch reads the rows in an order of its own. Both are
functions of run.seed alone, so the row of every sample number is known without reading those before it.
"""

import logging
from typing import Dict, List, Optional, Tuple

import numpy
import torch

from megatron_fbt.config.data import DataConfig, parse_split
from megatron_fbt.data.conversations import Conversations
from megatron_fbt.data.first_rank import is_first_rank
from megatron_fbt.data.splits import document_ranges
from megatron_fbt.errors import DataError
from megatron_fbt.feedback.counter import DATA_ORDER, counter_hash

logger = logging.getLogger(__name__)

OPEN_ROWS = 64
"""Rows that are filled at the same time."""


def pack(lengths: numpy.ndarray, capacity: int, open_rows: int = OPEN_ROWS) -> Tuple[numpy.ndarray, numpy.ndarray]:
    """Put items into rows: each into the fullest open row that has room; if none has, the fullest is done.

    Args:
        lengths: [n], each from 1 to capacity.
        capacity: room of a row.
        open_rows: rows open at the same time.

    Returns:
        members [n] int64: the items, row by row; ends [rows] int64: where each row ends in members.
    """
    rooms = numpy.zeros(open_rows, dtype=numpy.int64)
    rows: List[List[int]] = [[] for _ in range(open_rows)]
    done: List[List[int]] = []
    for item, length in enumerate(lengths.tolist()):
        place = int(numpy.argmin(numpy.where(rooms < length, capacity + 1, rooms)))
        if rooms[place] < length:
            place = int(numpy.argmin(rooms))  # a row that was never opened has no room either
            if rows[place]:
                done.append(rows[place])
            rows[place], rooms[place] = [], capacity
        rows[place].append(item)
        rooms[place] -= length
    done += [row for row in rows if row]
    members = numpy.array([item for row in done for item in row], dtype=numpy.int64)
    return members, numpy.cumsum([len(row) for row in done], dtype=numpy.int64)


def shuffled(count: int, seed: int, part: int, round_: int) -> numpy.ndarray:
    """A permutation [count] int64 that depends on its arguments alone.

    Args:
        count: numbers to permute.
        seed: run.seed.
        part: 0 for training, 1 for validation.
        round_: 0 for the packing, 1 + epoch for the rows.
    """
    keys = counter_hash(seed, DATA_ORDER, part, round_, torch.arange(count))
    return torch.argsort(keys, stable=True).numpy()


class PackedRows(torch.utils.data.Dataset):
    """Rows of whole conversations; a row's tail that no conversation fits into is padding, a document of its own.

    A row is sequence_length + 1 tokens of text: the last one is only ever a label.

    Args:
        conversations: the tokens.
        numbers: [n] the conversations to pack; each has a generated token among its first sequence_length + 1.
        samples: rows that can be asked for; the epochs follow one another.
        sequence_length: tokens in a row (s).
        pad: id for the padding.
        seed: run.seed.
        part: see shuffled.
        once: offer no more than one epoch.

    Attributes:
        marked: these rows say where documents start and what is fed back.
        rows_in_epoch: rows that hold each conversation once.
        tokens_in_epoch: tokens in them that are not padding.
    """

    marked = True

    def __init__(
        self,
        conversations: Conversations,
        numbers: numpy.ndarray,
        samples: int,
        sequence_length: int,
        pad: int,
        seed: int,
        part: int,
        once: bool = False,
    ):
        self.sequence_length, self._pad, self._seed, self._part = sequence_length, pad, seed, part
        self._conversations = conversations
        order = numbers[shuffled(len(numbers), seed, part, 0)]
        lengths = numpy.minimum(conversations.lengths[order], sequence_length + 1)
        members, self._ends = pack(lengths, sequence_length + 1)
        self._members = order[members]
        self.rows_in_epoch, self.tokens_in_epoch = len(self._ends), int(lengths.sum())
        self._samples = min(samples, self.rows_in_epoch) if once else samples
        self._epoch: Tuple[int, numpy.ndarray] = (-1, numpy.zeros(0, dtype=numpy.int64))

    def __len__(self) -> int:
        return self._samples

    def members(self, index: int) -> numpy.ndarray:
        """Numbers of the conversations in row ``index``, in their order."""
        epoch, place = divmod(index, self.rows_in_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, shuffled(self.rows_in_epoch, self._seed, self._part, 1 + epoch))
        row = int(self._epoch[1][place])
        return self._members[self._ends[row - 1] if row else 0 : self._ends[row]]

    def __getitem__(self, index: int) -> Dict[str, torch.Tensor]:
        """Row ``index``.

        Returns:
            tokens and labels [s] int64 (a label is the next token of the row), loss_mask [s] float32 (1 where the label
            is generated by the assistant of the same conversation), document_starts [s] bool, feedback_region [s] bool
            (the token is generated by the assistant).
        """
        size = self.sequence_length + 1
        text = numpy.full(size, self._pad, dtype=numpy.int64)
        generated, starts = numpy.zeros(size, dtype=bool), numpy.zeros(size, dtype=bool)
        begin = 0
        for number in self.members(index).tolist():
            ids, assistant = self._conversations.conversation(number)
            end = min(begin + len(ids), size)
            text[begin:end], generated[begin:end] = ids[: end - begin], assistant[: end - begin]
            starts[begin], begin = True, end
        starts[begin : begin + 1] = True
        return {
            "tokens": torch.from_numpy(text[:-1].copy()),
            "labels": torch.from_numpy(text[1:].copy()),
            "loss_mask": torch.from_numpy((generated[1:] & ~starts[1:]).astype(numpy.float32)),
            "document_starts": torch.from_numpy(starts[:-1].copy()),
            "feedback_region": torch.from_numpy(generated[:-1].copy()),
        }


def conversation_rows(
    config: DataConfig, conversations: Conversations, train_samples: int, valid_samples: int, pad: int, seed: int
) -> Tuple[PackedRows, Optional[PackedRows]]:
    """Rows for training and validation; the conversations are split in the order of the files.

    Args:
        config: section data.
        conversations: all of them.
        train_samples: rows of the whole run.
        valid_samples: rows of one evaluation, at most one epoch; 0 = no validation.
        pad: id for the padding.
        seed: run.seed.

    Raises:
        DataError: There is nothing to train on.
    """
    longest, parts = config.sequence_length + 1, parse_split(config.split)
    usable = conversations.first_labels < longest
    if is_first_rank():
        _report(config, conversations, usable)
    (train, valid, _) = (
        numpy.arange(first, end)[usable[first:end]] for first, end in document_ranges(parts, len(conversations))
    )
    if not len(train):
        raise DataError(
            f"data.paths {', '.join(config.paths)}: data.split {config.split} and data.sequence_length "
            f"{config.sequence_length} leave none of {len(conversations)} conversations to train on"
        )
    rows = PackedRows(conversations, train, train_samples, config.sequence_length, pad, seed, part=0)
    if is_first_rank():
        epoch, filled = rows.rows_in_epoch, rows.tokens_in_epoch / (rows.rows_in_epoch * longest)
        epochs = train_samples / epoch
        logger.info("an epoch has %d rows, filled to %.1f %%; the run reads %.2f epochs", epoch, 100 * filled, epochs)
    if not len(valid) and valid_samples and is_first_rank():
        logger.warning("validation is off: data.split %s leaves no conversation for it", config.split)
    if not len(valid) or not valid_samples:
        return rows, None
    return rows, PackedRows(conversations, valid, valid_samples, config.sequence_length, pad, seed, part=1, once=True)


def _report(config: DataConfig, conversations: Conversations, usable: numpy.ndarray) -> None:
    """Tell what becomes of the conversations."""
    report, length = conversations.report, config.sequence_length
    logger.info(
        "%d conversations with %d tokens, %d of them the assistant's; left out because there is no turn of the "
        "assistant: %d",
        *(report[name] for name in ("conversations", "tokens", "assistant_tokens")),
        sum(report["skipped"].values()),
    )
    cut = int(((conversations.lengths > length + 1) & usable).sum())
    if cut:
        logger.warning("%d conversations are longer than data.sequence_length %d + 1 and were cut there", cut, length)
    if not usable.all():
        logger.warning(
            "%d conversations were left out: the assistant's first turn begins beyond data.sequence_length %d",
            int((~usable).sum()),
            length,
        )
    unended = report["conversations"] - report["ended_by_eod"]
    if unended:
        logger.warning(
            "the assistant's last turn does not end with the tokenizer's end token in %d of %d conversations: a model "
            "trained on them does not stop by itself there; make eos_token the token that the chat template ends a "
            "turn with",
            unended,
            report["conversations"],
        )
    if not config.reset_attention_mask:
        logger.warning("data.reset_attention_mask is false: conversations in one row see one another")
