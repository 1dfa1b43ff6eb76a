"""From where a run goes on, and what is too unclear to go on from."""

import json
import os
import shutil

import pytest

from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.data.token_ids import run_tokenizer
from megatron_fbt.errors import CheckpointError, ConfigError, DamagedCheckpointError
from megatron_fbt.training.batch_size import run_length
from megatron_fbt.training.fingerprint import data_fingerprint, refuse_other_data
from megatron_fbt.training.resume import (
    checkpoint_before,
    find_resume_point,
    latest_complete,
    refuse_other_plan,
)
from tests.unit.training.checkpoints import publish


@pytest.fixture
def config(tmp_path):
    config = PretrainConfig()
    config.run.dir = str(tmp_path)
    return config


def find(config):
    return find_resume_point(config).checkpoint


def damage(checkpoint, name, how):
    path = checkpoint / name
    path.unlink() if how == "gone" else os.truncate(path, path.stat().st_size // 2 if how == "half" else 0)


def test_the_tracker_decides_not_the_highest_number(config, tmp_path):
    assert find(config) is None
    older, newer = publish(tmp_path, 3), publish(tmp_path, 20)
    assert find(config) == newer
    (tmp_path / "checkpoints" / "latest").write_text("step_00000003")
    assert find(config) == older


@pytest.mark.parametrize("how", ["gone", "half", "empty"])
@pytest.mark.parametrize("name", ["tensors", "manifest.json", "config.yaml", "trainer_state.json"])
def test_any_damaged_file_makes_the_run_go_back_to_the_complete_checkpoint_before(config, tmp_path, name, how):
    first, good, bad, newest = (publish(tmp_path, step) for step in (1, 3, 6, 9))
    damage(newest, name, how)
    damage(bad, "tensors", "gone")
    point = find_resume_point(config)
    assert point.checkpoint == good
    told = "\n".join(point.remarks)
    assert (
        f"{newest / name} " in told
        and f"{bad / 'tensors'} is missing" in told
        and "going back to step_00000003" in told
    )
    for checkpoint in (first, good):
        damage(checkpoint, "tensors", "gone")
    with pytest.raises(DamagedCheckpointError, match=f"{newest / name} "):
        find_resume_point(config)


def test_a_checkpoint_found_damaged_while_it_is_read_is_left_behind(tmp_path):
    older, newer = publish(tmp_path, 3), publish(tmp_path, 6)
    reason = DamagedCheckpointError("bits have flipped")
    point = checkpoint_before(newer, reason)
    assert point.checkpoint == older and "step_00000006 cannot be used: bits have flipped" in point.remarks[0]
    with pytest.raises(DamagedCheckpointError, match="bits have flipped"):
        checkpoint_before(older, reason)


@pytest.mark.parametrize("content", ["", "garbage\n\0", "step_00000099", "../elsewhere", "step_00000003/.."])
def test_a_tracker_that_names_no_checkpoint_is_an_error_with_the_remedy(config, tmp_path, content):
    publish(tmp_path, 3)
    (publish(tmp_path, 6) / "tensors").unlink()
    (tmp_path / "checkpoints" / "latest").write_text(content)
    with pytest.raises(CheckpointError, match="latest names .*Write one of these into it: step_00000003; or choose"):
        find(config)


def test_without_a_tracker_only_a_single_complete_checkpoint_is_clear(config, tmp_path):
    only = publish(tmp_path, 3)
    tracker = tmp_path / "checkpoints" / "latest"
    tracker.unlink()
    point = find_resume_point(config)
    assert point.checkpoint == only and "latest is missing; step_00000003 is complete" in point.remarks[0]
    publish(tmp_path, 6)
    tracker.unlink()
    with pytest.raises(
        CheckpointError, match="latest is missing, but .*such as step_00000003, step_00000006; to start"
    ):
        find(config)
    shutil.rmtree(only)
    damage(tmp_path / "checkpoints" / "step_00000006", "tensors", "half")
    with pytest.raises(CheckpointError, match="latest is missing, but .*there is none"):
        find(config)


def test_must_needs_a_checkpoint_and_goes_back_like_auto(config, tmp_path):
    config.checkpoint.resume = "must"
    with pytest.raises(CheckpointError, match="checkpoint.resume = 'must': there is no checkpoint in .*checkpoints"):
        find(config)
    older, newer = publish(tmp_path, 3), publish(tmp_path, 6)
    assert find(config) == newer
    damage(newer, "tensors", "gone")
    assert find(config) == older


def test_never_starts_only_in_a_folder_without_a_run(config, tmp_path):
    config.checkpoint.resume = "never"
    (tmp_path / "checkpoints").mkdir()
    for harmless in ("lease.json", "status.json", "notes.txt"):
        (tmp_path / harmless).write_text("")
    assert find(config) is None
    for left in ("config.yaml", "metrics.jsonl", "checkpoints/latest", "checkpoints/.step_00000003.aa.tmp"):
        (tmp_path / left).write_text("")
        with pytest.raises(CheckpointError, match=f"checkpoint.resume = 'never': run.dir = .* already holds .*{left}"):
            find(config)
        (tmp_path / left).unlink()
    assert find(config) is None


def test_a_plan_for_other_phases_is_refused(config, tmp_path):
    other, rows = PretrainConfig(), config.training.global_batch_size
    other.feedback.schedule = "two_phase_75_25"
    older, newer = (
        publish(tmp_path, 3, other, consumed_samples=3 * rows, phase_start_steps=[0, 9]),
        publish(tmp_path, 6, consumed_samples=6 * rows, phase_start_steps=[0, 5]),
    )
    config.training.train_steps = 20
    length = run_length(config.training, config.data.sequence_length)
    refuse_other_plan(
        config, newer, publish(tmp_path, 7, consumed_samples=7 * rows, phase_start_steps=[0, 5]), [0, 5], length
    )
    refuse_other_plan(config, None, older, [0], length)
    with pytest.raises(CheckpointError, match="the phases of feedback.schedule start elsewhere"):
        refuse_other_plan(config, newer, older, [0, 5], length)


def test_the_planned_checkpoint_may_be_gone_when_the_run_before_went_on(config, tmp_path):
    rows = config.training.global_batch_size
    planned = publish(tmp_path, 3, consumed_samples=3 * rows, phase_start_steps=[0, 5])
    newest = publish(tmp_path, 6, consumed_samples=6 * rows, phase_start_steps=[0, 5])
    shutil.rmtree(planned)
    config.training.train_steps = 20
    length = run_length(config.training, config.data.sequence_length)
    refuse_other_plan(config, planned, newest, [0, 5], length)
    with pytest.raises(CheckpointError, match="the phases of feedback.schedule start elsewhere"):
        refuse_other_plan(config, planned, newest, [0, 4], length)


def test_a_plan_for_another_number_of_rows_is_refused(config, tmp_path):
    config.training.train_steps, config.training.global_batch_size = 20, 8
    planned, newest = publish(tmp_path, 3, consumed_samples=12), publish(tmp_path, 6, consumed_samples=24)
    lengths = [run_length(config.training, config.data.sequence_length, done) for done in ((3, 12), (6, 24))]
    refuse_other_plan(config, planned, newest, [], lengths[1])
    with pytest.raises(CheckpointError, match=r"the run has .* rows instead of the planned .*latest and start again"):
        refuse_other_plan(config, planned, newest, [], lengths[0])


@pytest.fixture
def with_data(config):
    config.data.format, config.model.vocab_size = "labelled", 100
    config.data.paths = ["a.jsonl", "b.jsonl"]
    return config


@pytest.mark.parametrize(
    "field, value",
    [
        ("data.paths", ["b.jsonl", "a.jsonl"]),
        ("data.weights", [1.0, 2.0]),
        ("data.split", "90,10,0"),
        ("data.sequence_length", 2048),
        ("run.seed", 5),
        ("data.tokenizer", None),
    ],
)
def test_other_data_are_refused_unless_the_field_is_allowed_to_change(with_data, tmp_path, field, value):
    def fingerprint():
        return data_fingerprint(with_data, run_tokenizer(with_data))

    checkpoint = publish(tmp_path, 3, facts={"data": fingerprint()})
    with_data.data.paths = ["./a.jsonl", "b.jsonl"]  # the same
    refuse_other_data(with_data, checkpoint, fingerprint())
    if field == "data.tokenizer":
        with_data.model.vocab_size = 200
    else:
        section, name = field.split(".")
        setattr(getattr(with_data, section), name, value)
    with pytest.raises(CheckpointError, match=rf"{field} = .*: the run has .*checkpoint.allow_changes = \[{field}\]"):
        refuse_other_data(with_data, checkpoint, fingerprint())
    with_data.checkpoint.allow_changes = [field]
    refuse_other_data(with_data, checkpoint, fingerprint())
    assert with_data.checkpoint.problems() == []


def test_only_fields_of_the_data_can_be_allowed_to_change(config):
    config.checkpoint.allow_changes = ["data.path"]
    with pytest.raises(
        ConfigError, match=r"checkpoint.allow_changes = \['data.path'\]: holds other names; give some of"
    ):
        config.checkpoint.validate()


def test_a_folder_without_anything_is_a_new_run(tmp_path):
    assert latest_complete(tmp_path / "nowhere").checkpoint is None


def test_a_copy_beside_the_checkpoints_is_not_one_of_them(config, tmp_path):
    older, newest = publish(tmp_path, 3), publish(tmp_path, 6)
    shutil.copytree(older, tmp_path / "checkpoints" / "step_00000003.bak")
    damage(newest, "tensors", "gone")
    assert find(config) == older
    (tmp_path / "checkpoints" / "latest").write_text("step_00000003.bak")
    with pytest.raises(CheckpointError, match="names 'step_00000003.bak', which is .*: step_00000003; or choose"):
        find(config)


def test_a_checkpoint_under_the_name_of_another_step_is_not_taken_for_it(config, tmp_path):
    older, newest = publish(tmp_path, 3), publish(tmp_path, 6)
    newest.rename(newest.with_name("step_00000040"))
    (tmp_path / "checkpoints" / "latest").write_text("step_00000040")
    point = find_resume_point(config)
    assert point.checkpoint == older
    assert "step_00000040 holds step 6: give it its name back, step_00000006" in point.remarks[0]


def test_a_run_whose_checkpoints_are_lost_does_not_start_again(config, tmp_path):
    shutil.rmtree(publish(tmp_path, 3).parent)
    (tmp_path / "status.json").write_text(json.dumps({"last_checkpoint": None}))
    assert find(config) is None
    (tmp_path / "status.json").write_text(json.dumps({"last_checkpoint": "step_00000003"}))
    with pytest.raises(CheckpointError, match="holds no checkpoint, but .*status.json says .* 'step_00000003'. Put"):
        find(config)


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_checkpoints_that_are_no_folder_are_an_error_before_anything_starts(config, tmp_path, kind):
    folder = tmp_path / "checkpoints"
    folder.write_text("") if kind == "file" else folder.symlink_to(tmp_path / "not_mounted")
    with pytest.raises(CheckpointError, match="checkpoints is not a folder, or a symbolic link to one that is not"):
        find(config)
