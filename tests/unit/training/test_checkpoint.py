"""Publishing a checkpoint: order, retention, what an interrupted save leaves behind."""

import json

import pytest

from megatron_fbt.errors import CheckpointError
from megatron_fbt.training.checkpoint import Checkpointer
from megatron_fbt.training.run_folder import TrainerState, latest_checkpoint, step_folder


def publish(checkpointer, step, content="weights"):
    final = checkpointer.folder / step_folder(step)
    temporary = checkpointer.folder / f".{final.name}.tmp"
    checkpointer._make_room(temporary)
    (temporary / "tensors").write_text(content)
    checkpointer._publish(temporary, final, TrainerState(step=step), "model: {}\n")
    return final


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("keep_last, kept", [(None, [2, 4, 6, 8]), (3, [4, 6, 8]), (1, [8])])
def test_the_newest_checkpoints_are_kept(tmp_path, keep_last, kept):
    checkpointer = Checkpointer(tmp_path / "checkpoints", keep_last, None)
    for step in (2, 4, 6, 8):
        final = publish(checkpointer, step)
        assert latest_checkpoint(checkpointer.folder) == final
    assert names(checkpointer.folder) == ["latest", *map(step_folder, kept)]
    assert json.loads((final / "trainer_state.json").read_text())["step"] == 8
    assert (final / "config.yaml").read_text() == "model: {}\n"


def test_the_checkpoint_that_the_tracker_names_is_never_removed(tmp_path):
    checkpointer = Checkpointer(tmp_path, 1, None)
    publish(checkpointer, 8)
    assert publish(checkpointer, 4) == latest_checkpoint(tmp_path)


def test_a_step_saved_again_replaces_the_old_one(tmp_path):
    checkpointer = Checkpointer(tmp_path, 2, None)
    publish(checkpointer, 4, "old")
    final = publish(checkpointer, 4, "new")
    assert (final / "tensors").read_text() == "new" and names(tmp_path) == ["latest", "step_00000004"]


def test_what_an_interrupted_save_left_is_cleared_and_never_taken(tmp_path):
    checkpointer = Checkpointer(tmp_path, 1, None)
    good = publish(checkpointer, 4)
    checkpointer._make_room(tmp_path / ".step_00000006.tmp")
    (tmp_path / ".step_00000006.tmp" / "half").write_text("")
    assert latest_checkpoint(tmp_path) == good
    publish(checkpointer, 6)
    assert names(tmp_path) == ["latest", "step_00000006"] and not (tmp_path / "step_00000006" / "half").exists()


def test_a_folder_that_cannot_be_written_is_a_checkpoint_error(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="cannot write the checkpoint .*checkpoints"):
        publish(Checkpointer(tmp_path / "checkpoints", None, None), 1)
