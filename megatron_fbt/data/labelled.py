"""Rows that bring their own labels, in JSON Lines: token ids, what each position is scored against, what is fed back.

    {"input_ids": [4, 1, 0], "labels": [-100, 7, 8], "feedback": [0, 0, 1]}

labels[t] is scored at position t itself: nothing is shifted; -100 is no loss. Positions with feedback 1 are the
feedback region; without this key, all are.

    <data.cache_dir>/labelled-<fingerprint>/rows.bin       int32 [rows, 3, s]: input ids, labels, feedback
                                            report.json    counts; written last
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

import numpy
import torch

from megatron_fbt.config.data import DataConfig, parse_split
from megatron_fbt.data.cache_folder import cached_folder, read_array, read_report, unreadable, write_report
from megatron_fbt.data.first_rank import is_first_rank
from megatron_fbt.data.input_files import InputFile, run_inputs
from megatron_fbt.data.inputs import BadRecord, parse_lines, parse_object
from megatron_fbt.data.packing import shuffled
from megatron_fbt.data.progress import Progress
from megatron_fbt.data.splits import document_ranges
from megatron_fbt.errors import DataError

logger = logging.getLogger(__name__)

FORMAT = 1
"""Changes when the files of the cache, or what is put into them, change."""
NO_LOSS = -100
"""Label of a position that is not scored."""


def parse_row(line: bytes, sequence_length: int, vocab_size: int) -> numpy.ndarray:
    """One line as int32 [3, s]: input ids, labels (-100 = no loss), feedback (0 or 1).

    Raises:
        BadRecord: It is not one JSON object with lists of sequence_length numbers that lie in their ranges.
    """
    record = parse_object(line)
    ids = _integers(record, "input_ids", sequence_length)
    labels = _integers(record, "labels", sequence_length)
    feedback = _integers(record, "feedback", sequence_length) if "feedback" in record else [1] * sequence_length
    for t, (token, label, fed_back) in enumerate(zip(ids, labels, feedback)):
        if not 0 <= token < vocab_size:
            raise BadRecord("bad_id", f"input_ids[{t}] = {token} is outside of the vocabulary of {vocab_size}")
        if not (0 <= label < vocab_size or label == NO_LOSS):
            raise BadRecord(
                "bad_label",
                f"labels[{t}] = {label} is neither {NO_LOSS} (no loss) nor inside of the vocabulary of {vocab_size}",
            )
        if fed_back not in (0, 1):
            raise BadRecord("bad_feedback", f"feedback[{t}] = {fed_back} is neither 0 nor 1")
    return numpy.array([ids, labels, feedback], dtype=numpy.int32)


def _integers(record: Dict[str, Any], key: str, length: int) -> List[int]:
    if key not in record:
        raise BadRecord("key_missing", f'no key \'{key}\'; a line holds {{"input_ids": [...], "labels": [...]}}')
    values = record[key]
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise BadRecord("not_integers", f"'{key}' is {json.dumps(values)[:40]}, not a list of integers")
    if len(values) != length:
        raise BadRecord("wrong_length", f"'{key}' has {len(values)} entries, data.sequence_length is {length}")
    return values


def prepare_labelled(config: DataConfig, cache: str, vocab_size: int) -> Iterator[str]:
    """Read the rows of data.paths into flat files, unless the cache has them.

    Args:
        config: section data.
        cache: folder for the cache.
        vocab_size: of the model.

    Yields:
        "" after each piece of work, and at last the folder that holds the rows.

    Raises:
        DataError: A file cannot be read, or a line is no row: naming file and line.
    """
    files = run_inputs(config.paths)

    def write(folder: Path) -> Iterator[None]:
        return _write(files, config.sequence_length, vocab_size, folder)

    yield from cached_folder(cache, "labelled", (FORMAT, config.sequence_length, vocab_size), files, write)


def _write(files: List[InputFile], length: int, vocab_size: int, folder: Path) -> Iterator[None]:
    rows, scored = 0, 0
    with open(folder / "rows.bin", "wb") as output, Progress(sum(file.size for file in files)) as progress:
        for done, row in parse_lines(files, lambda line: parse_row(line, length, vocab_size)):
            output.write(row.tobytes())
            rows, scored = rows + 1, scored + int((row[1] != NO_LOSS).sum())
            progress.update(done, rows, rows * length)
            yield
    if not scored:
        raise DataError(
            f"data.paths {', '.join(file.path for file in files)}: {rows} rows and not one label that counts, so there "
            "is nothing to train on"
        )
    write_report(folder, {"rows": rows, "sequence_length": length, "loss_tokens": scored})


@dataclass(frozen=True, eq=False)
class LabelledFile:
    """All rows in the order of the files.

    Attributes:
        values: int32 [rows, 3, s], see parse_row.
        report: {"rows", "sequence_length", "loss_tokens", ...}.
    """

    values: numpy.ndarray
    report: Dict[str, Any]

    def __len__(self) -> int:
        return len(self.values)


def open_labelled(folder: str, mmap: bool) -> LabelledFile:
    """Open what prepare_labelled has named.

    Raises:
        DataError: This process does not find it.
    """
    path = Path(folder)
    try:
        report = read_report(path)
        values = read_array(path / "rows.bin", "int32", mmap)
        return LabelledFile(values.reshape(report["rows"], 3, report["sequence_length"]), report)
    except (OSError, ValueError, KeyError) as error:
        raise unreadable(folder, error) from error


class LabelledRows(torch.utils.data.Dataset):
    """Rows of one split, each once in an epoch, each epoch in an order of its own.

    The row of a sample number is a function of run.seed alone.

    Args:
        source: all rows.
        numbers: [n] those of this split.
        samples: rows that can be asked for; the epochs follow one another.
        seed: run.seed.
        part: see packing.shuffled.

    Attributes:
        marked: these rows say where documents start (at position 0) and what is fed back.
        sequence_length: tokens in a row (s).
    """

    marked = True

    def __init__(self, source: LabelledFile, numbers: numpy.ndarray, samples: int, seed: int, part: int):
        self._source, self._numbers, self._samples = source, numbers, samples
        self._seed, self._part = seed, part
        self.sequence_length = source.values.shape[2]
        self._epoch: Tuple[int, numpy.ndarray] = (-1, numbers)

    def __len__(self) -> int:
        return self._samples

    def number(self, index: int) -> int:
        """Place in the files of row ``index``."""
        epoch, place = divmod(index, len(self._numbers))
        if self._epoch[0] != epoch:
            order = shuffled(len(self._numbers), self._seed, self._part, 1 + epoch)
            self._epoch = (epoch, self._numbers[order])
        return int(self._epoch[1][place])

    def __getitem__(self, index: int) -> Dict[str, torch.Tensor]:
        """Row ``index``.

        Returns:
            tokens [s] int64, labels [s] int64 (of the position itself; 0 where there is none), loss_mask [s] float32,
            document_starts [s] bool (position 0), feedback_region [s] bool.
        """
        tokens, labels, feedback = torch.from_numpy(self._source.values[self.number(index)].astype(numpy.int64))
        starts = torch.zeros(len(tokens), dtype=torch.bool)
        starts[0] = True
        scored = labels != NO_LOSS
        return {
            "tokens": tokens,
            "labels": labels * scored,
            "loss_mask": scored.float(),
            "document_starts": starts,
            "feedback_region": feedback.bool(),
        }


def labelled_rows(
    config: DataConfig, source: LabelledFile, train_samples: int, valid_samples: int, seed: int
) -> Tuple[LabelledRows, Optional[LabelledRows]]:
    """Rows for training and validation; they are split in the order of the files.

    Args:
        config: section data.
        source: all rows.
        train_samples: rows of the whole run.
        valid_samples: rows of one evaluation, at most one epoch; 0 = no validation.
        seed: run.seed.

    Raises:
        DataError: There is nothing to train on.
    """
    ranges = document_ranges(parse_split(config.split), len(source))
    train, valid, _ = (numpy.arange(first, end) for first, end in ranges)
    if not len(train):
        raise DataError(
            f"data.paths {', '.join(config.paths)}: data.split {config.split} leaves none of {len(source)} rows to "
            "train on"
        )
    if is_first_rank():
        logger.info("%d rows, %d positions with a label", len(source), source.report["loss_tokens"])
        if valid_samples and not len(valid):
            logger.warning("validation is off: data.split %s leaves no row for it", config.split)
    rows = LabelledRows(source, train, train_samples, seed, part=0)
    if not valid_samples or not len(valid):
        return rows, None
    return rows, LabelledRows(source, valid, min(valid_samples, len(valid)), seed, part=1)
