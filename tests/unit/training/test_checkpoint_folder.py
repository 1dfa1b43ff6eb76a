"""Publishing a checkpoint: order, retention, what an interrupted save leaves behind."""

import json

import pytest

from megatron_fbt.config.checkpoint import CheckpointConfig
from megatron_fbt.config.load import dump_yaml
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.core.manifest import check_content, check_sizes, hash_file
from megatron_fbt.errors import CheckpointError
from megatron_fbt.training.checkpoint_folder import CheckpointFolder
from megatron_fbt.training.resume import ResumePoint, latest_complete
from megatron_fbt.training.run_folder import TrainerState, step_folder


def publish(folder, step, content="weights"):
    temporary = folder.make_room(step)
    (temporary / "tensors").write_text(content)
    files = {"tensors": hash_file(temporary / "tensors")}
    return folder.publish(
        temporary, TrainerState(step=step), dump_yaml(PretrainConfig()), files, {"layout": {"data": 2}}
    )


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("keep_last, kept", [(None, [2, 4, 6, 8]), (3, [4, 6, 8]), (1, [8])])
def test_the_newest_checkpoints_are_kept(tmp_path, keep_last, kept):
    folder = CheckpointFolder(tmp_path / "checkpoints", CheckpointConfig(keep_last=keep_last))
    for step in (2, 4, 6, 8):
        final = publish(folder, step)
        assert latest_complete(folder.folder) == ResumePoint(final)
    assert names(folder.folder) == ["latest", *map(step_folder, kept)]
    assert json.loads((final / "trainer_state.json").read_text())["step"] == 8
    assert (final / "config.yaml").read_text() == dump_yaml(PretrainConfig())
    manifest = check_sizes(final)
    assert (
        set(manifest.files) == {"tensors", "config.yaml", "trainer_state.json"} == set(names(final)) - {"manifest.json"}
    )
    assert manifest.facts["step"] == 8 and manifest.facts["layout"] == {"data": 2}


def test_every_checkpoint_holds_the_tokenizer(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints", CheckpointConfig())
    folder.attached = tmp_path / "tokenizer"
    assert names(publish(folder, 1)) == ["config.yaml", "manifest.json", "tensors", "trainer_state.json"], "has none"
    folder.attached.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder.attached / name).write_text(name * 3)
    for final in (publish(folder, 2), publish(folder, 3)):
        assert {"tokenizer.json", "chat_template.jinja"} < set(check_sizes(final).files)
        assert (final / "tokenizer.json").read_text() == "tokenizer.json" * 3
        check_content(final, "chat_template.jinja", check_sizes(final))


def test_the_checkpoint_that_the_tracker_names_is_never_removed(tmp_path):
    folder = CheckpointFolder(tmp_path, CheckpointConfig(keep_last=1))
    publish(folder, 8)
    assert publish(folder, 4) == latest_complete(tmp_path).checkpoint


def test_a_step_saved_again_replaces_the_old_one(tmp_path):
    folder = CheckpointFolder(tmp_path, CheckpointConfig(keep_last=2))
    publish(folder, 4, "old")
    final = publish(folder, 4, "new")
    assert (final / "tensors").read_text() == "new" and names(tmp_path) == ["latest", "step_00000004"]


def test_what_an_interrupted_save_left_is_cleared_and_never_taken(tmp_path):
    folder = CheckpointFolder(tmp_path, CheckpointConfig(keep_last=1))
    good = publish(folder, 4)
    (folder.make_room(6) / "half").write_text("")
    assert latest_complete(tmp_path) == ResumePoint(good)
    publish(folder, 6)
    assert names(tmp_path) == ["latest", "step_00000006"] and not (tmp_path / "step_00000006" / "half").exists()
    assert folder.make_room(8) != (last := folder.make_room(8)), "a left-over process must not write into it"
    folder.give_up(last)
    assert names(tmp_path) == ["latest", "step_00000006"]


def test_a_folder_that_cannot_be_written_is_a_checkpoint_error(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="cannot write the checkpoint .*checkpoints"):
        publish(CheckpointFolder(tmp_path / "checkpoints", CheckpointConfig()), 1)
