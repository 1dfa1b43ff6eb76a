"""Which samples a run reads that has left some out, and from where it goes on."""

import json
import shutil

import pytest

from megatron_fbt.core.manifest import MANIFEST
from megatron_fbt.errors import CheckpointError
from megatron_fbt.training.rewind import (
    REWINDS,
    go_back,
    last_good_checkpoint,
    place_of,
    recalled,
    rows_of_samples,
    united,
)
from megatron_fbt.training.run_folder import TrainerState, read_trainer_state
from tests.unit.training.checkpoints import publish


@pytest.mark.parametrize("left_out", [[], [[0, 2]], [[3, 5]], [[3, 5], [7, 8]], [[1, 4], [6, 10]]])
def test_samples_that_are_left_out_are_jumped_over_and_no_other(left_out):
    whole = [n for n in range(40) if not any(begin <= n < end for begin, end in left_out)]
    assert [place_of(sample, left_out) for sample in range(len(whole))] == whole
    batches = [[0, 1], [2, 3]]
    assert rows_of_samples(batches, left_out, 40) == [whole[:2], whole[2:4]]


def test_rows_that_are_missing_at_the_end_come_from_the_beginning_and_none_is_one_that_was_left_out():
    assert rows_of_samples([[6, 7, 8, 9, 10, 11, 12]], [[3, 5]], 10) == [[8, 9, 0, 1, 2, 5, 6]]
    assert rows_of_samples([[4, 5, 6]], [[3, 8], [10, 11]], 10) == [[9, 1, 2]], "the second time left out, too"
    assert rows_of_samples([[0, 1]], [[0, 10]], 10) == [[0, 0]], "nothing is left to read"


def test_stretches_are_united():
    assert united([[8, 9], [1, 3], [3, 5], [2, 4], [7, 8]]) == [[1, 5], [7, 9]]
    assert united([]) == []


def test_the_newest_complete_checkpoint_between_no_bad_steps(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    assert last_good_checkpoint(checkpoints) is None
    for step, bad in ((2, 0), (4, 0), (6, 1)):
        publish(tmp_path, step, bad_in_a_row=bad)
    assert last_good_checkpoint(checkpoints).name == "step_00000004"
    (checkpoints / "step_00000004" / MANIFEST).unlink()
    assert last_good_checkpoint(checkpoints).name == "step_00000002"


def test_going_back_names_the_checkpoint_and_tells_every_later_start_what_to_leave_out(tmp_path):
    for step, consumed in ((2, 8), (4, 16), (6, 24)):
        publish(tmp_path, step, consumed_samples=consumed)
    checkpoints = tmp_path / "checkpoints"
    go_back(tmp_path, checkpoints / "step_00000004", TrainerState(step=7, consumed_samples=28), "why")
    assert (checkpoints / "latest").read_text().strip() == "step_00000004"
    assert not (checkpoints / "step_00000006").exists()
    state = recalled(read_trainer_state(checkpoints / "step_00000004"), tmp_path)
    assert (state.step, state.left_out, state.rewinds) == (4, [[16, 28]], 1)
    state = recalled(state, tmp_path)
    assert (state.left_out, state.rewinds) == ([[16, 28]], 1), "twice is once"
    state.step, state.consumed_samples = 5, 20  # samples 28 to 31 were read instead of 16 to 19
    go_back(tmp_path, checkpoints / "step_00000004", state, "again")
    rows = [json.loads(line) for line in (tmp_path / REWINDS).read_text().splitlines()]
    assert [(row["from_step"], row["to_step"], row["first_sample"], row["last_sample"]) for row in rows] == [
        (7, 4, 16, 27),
        (5, 4, 28, 31),
    ]
    state = recalled(read_trainer_state(checkpoints / "step_00000004"), tmp_path)
    assert (state.left_out, state.rewinds) == ([[16, 32]], 2)


def test_going_back_leaves_copies_under_other_names_alone(tmp_path):
    for step in (4, 6):
        publish(tmp_path, step, consumed_samples=4 * step)
    checkpoints = tmp_path / "checkpoints"
    for name in ("step_00000006.bak", "step_best"):
        shutil.copytree(checkpoints / "step_00000006", checkpoints / name)
    (checkpoints / "step_00000006" / MANIFEST).unlink()
    assert last_good_checkpoint(checkpoints).name == "step_00000004"
    go_back(tmp_path, checkpoints / "step_00000004", TrainerState(step=7, consumed_samples=28), "why")
    assert {path.name for path in checkpoints.glob("step_*")} == {"step_00000004", "step_00000006.bak", "step_best"}


@pytest.mark.parametrize("row", [{"to_step": 3}, {"first_sample": None, "last_sample": 3}])
def test_a_row_without_its_samples_is_an_error_with_the_file(tmp_path, row):
    (tmp_path / REWINDS).write_text(json.dumps(row) + "\n")
    with pytest.raises(CheckpointError, match="rewinds.jsonl: a row has no whole first_sample and last_sample"):
        recalled(TrainerState(), tmp_path)
