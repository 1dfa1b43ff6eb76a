"""Going back to the last good checkpoint after bad steps, and leaving out the data that were read since.

<run.dir>/rewinds.jsonl has a row for each time. It is written before the run goes on, so that a run that is killed
before its next checkpoint leaves out the same samples.
"""

import json
import os
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from megatron_fbt.errors import CheckpointError, DamagedCheckpointError
from megatron_fbt.training.metrics import read_metrics, replace_file
from megatron_fbt.training.resume import check_complete, step_names
from megatron_fbt.training.run_folder import TRACKER, TrainerState, read_trainer_state

REWINDS = "rewinds.jsonl"
Windows = List[List[int]]
"""[first sample, the one after the last] of each stretch that is left out; in order, without overlap."""


def place_of(sample: int, left_out: Windows) -> int:
    """Where a run's sample lies among those of an undisturbed run.

    Args:
        sample: number among the samples that the run uses.
        left_out: stretches that it does not use, in the undisturbed run's numbers.
    """
    for begin, end in left_out:
        if sample >= begin:
            sample += end - begin
    return sample


def rows_of_samples(samples: Sequence[Sequence[int]], left_out: Windows, train_samples: int) -> List[List[int]]:
    """Rows of the data set for the samples of micro-batches.

    As many rows as were left out are missing at the end; those that were used from the beginning on take their place.
    """
    first_time = [[begin, min(end, train_samples)] for begin, end in left_out if begin < train_samples]
    used = max(1, train_samples - sum(end - begin for begin, end in first_time))

    def row_of(sample: int) -> int:
        place = place_of(sample, left_out)
        again = place_of((place - train_samples) % used, first_time)
        return place if place < train_samples else again % train_samples

    return [[row_of(sample) for sample in batch] for batch in samples]


def united(windows: Windows) -> Windows:
    """The same samples, in order and without overlap."""
    found: Windows = []
    for begin, end in sorted(windows):
        if found and begin <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([begin, end])
    return found


def last_good_checkpoint(folder: Path) -> Optional[Path]:
    """The newest complete checkpoint that was not written between bad steps.

    Args:
        folder: <run.dir>/checkpoints.
    """
    for name in reversed(step_names(folder)):
        checkpoint = folder / name
        try:
            check_complete(checkpoint)
            if read_trainer_state(checkpoint).bad_in_a_row == 0:
                return checkpoint
        except DamagedCheckpointError:
            continue
    return None


def go_back(run_dir: Path, checkpoint: Path, state: TrainerState, reason: str) -> None:
    """Make a checkpoint the one from which a run goes on, without the samples that it has read since.

    Args:
        run_dir: the run folder.
        checkpoint: in it.
        state: of the run now.
        reason: for a person.
    """
    replace_file(checkpoint.parent / TRACKER, checkpoint.name + "\n")
    for newer in step_names(checkpoint.parent):
        if newer > checkpoint.name:
            (checkpoint.parent / newer).rename(checkpoint.parent / f".{newer}.old.tmp")  # goes with the next save
    at = recalled(read_trainer_state(checkpoint), run_dir)
    row = {
        "from_step": state.step,
        "to_step": at.step,
        "first_sample": place_of(at.consumed_samples, at.left_out),
        "last_sample": place_of(state.consumed_samples - 1, state.left_out),
        "reason": reason,
    }
    with open(run_dir / REWINDS, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_rewinds(run_dir: Path) -> List[Dict[str, Any]]:
    """A row for each time that a run went back; a torn line is left out."""
    return read_metrics(run_dir / REWINDS)


def recalled(state: TrainerState, run_dir: Path) -> TrainerState:
    """A checkpoint's state with what was left out after it was written.

    Raises:
        CheckpointError: a row lacks its samples.
    """
    rows = read_rewinds(run_dir)
    try:
        windows = [[int(row["first_sample"]), int(row["last_sample"]) + 1] for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{run_dir / REWINDS}: a row has no whole first_sample and last_sample ({type(error).__name__}: {error}), "
            "so it is not clear which data to leave out; put the row back as it was written, or remove it"
        ) from error
    state.left_out = united([*state.left_out, *windows])
    state.rewinds = max(state.rewinds, len(rows))
    return state
