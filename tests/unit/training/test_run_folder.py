"""What is read from a run folder before anything is started."""

import dataclasses
import json

import pytest

from megatron_fbt.config.feedback import PassPhase, preset_phases
from megatron_fbt.config.load import dump_yaml
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.errors import CheckpointError, ConfigError
from megatron_fbt.training.run_folder import (
    TrainerState,
    changed_fields,
    find_step_folder,
    initial_checkpoint,
    prepare_run_folder,
    read_trainer_state,
    refuse_another_model,
    step_folder,
    stored_phase_starts,
)


def write_checkpoint(folder, step, config=None):
    checkpoint = folder / "checkpoints" / step_folder(step)
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text(json.dumps(dataclasses.asdict(TrainerState(step=step))))
    (checkpoint / "config.yaml").write_text(dump_yaml(config or PretrainConfig()))
    (folder / "checkpoints" / "latest").write_text(checkpoint.name + "\n")
    return checkpoint


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"step": 3, "unheard_of": 1}', '{"step"', '{"step": -3}', '{"left_out": [["a"]]}', "[" * 100_000],
)
def test_damaged_counters_are_named(tmp_path, content):
    checkpoint = write_checkpoint(tmp_path, 3)
    (checkpoint / "trainer_state.json").write_text(content)
    with pytest.raises(CheckpointError, match="step_00000003/trainer_state.json cannot be read"):
        read_trainer_state(checkpoint)


def test_changes_since_a_checkpoint_are_told_except_those_without_influence(tmp_path):
    old, new = PretrainConfig(), PretrainConfig()
    old.training.train_steps, new.training.train_steps = 10, 20
    new.feedback.jitter.scale, new.run.dir, new.logging.log_interval = 0.5, "elsewhere", 7
    checkpoint = write_checkpoint(tmp_path, 3, old)
    assert changed_fields(old, checkpoint) == []
    assert changed_fields(new, checkpoint) == ["feedback.jitter.scale: 0.02 -> 0.5", "training.train_steps: 10 -> 20"]


@pytest.mark.parametrize("content", ["", "model: [", "model: {}\n", "- 1\n"])
def test_a_checkpoint_without_its_configuration_is_damaged(tmp_path, content):
    checkpoint = write_checkpoint(tmp_path, 3)
    (checkpoint / "config.yaml").write_text(content)
    with pytest.raises(CheckpointError, match="step_00000003/config.yaml"):
        changed_fields(PretrainConfig(), checkpoint)


def test_the_run_folder_is_made_and_must_be_a_folder(tmp_path):
    prepare_run_folder(str(tmp_path / "a" / "b"))
    prepare_run_folder(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="run.dir = .*file'.*not a folder"):
        prepare_run_folder(str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="run.dir = .*cannot be made"):
        prepare_run_folder(str(tmp_path / "file" / "below"))


@pytest.mark.parametrize(
    "field, value",
    [
        ("model.num_layers", 2),
        ("model.num_attention_heads", 8),
        ("model.kv_channels", 16),
        ("model.vocab_size", 512),
        ("model.input_norm", "none"),
        ("model.share_embeddings_and_output_weights", False),
        ("model.attention_output_gate", True),
        ("model.add_qkv_bias", True),
        ("model.residual_multiplier", 0.5),
        ("feedback.fusion", "add"),
        ("feedback.input_scale", 0.5),
        ("optimizer.type", "muon"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_field(tmp_path, field, value):
    config = PretrainConfig()
    config.model.vocab_size = 256
    checkpoint = write_checkpoint(tmp_path, 3, config)
    refuse_another_model(config, checkpoint)
    section, name = field.split(".")
    setattr(getattr(config, section), name, value)
    with pytest.raises(CheckpointError, match=rf"{field} = {value}: the checkpoint has .* choose another run.dir"):
        refuse_another_model(config, checkpoint)


def test_what_may_change_on_the_way_is_accepted(tmp_path):
    config = PretrainConfig()
    config.model.vocab_size = 256
    checkpoint = write_checkpoint(tmp_path, 3, config)
    config.model.rotary_base, config.model.attention_dropout, config.data.sequence_length = 5e5, 0.1, 4096
    config.model.num_query_groups = config.model.num_attention_heads  # what null meant
    config.model.vocab_size = None  # before the tokenizer is read
    refuse_another_model(config, checkpoint)


def test_phase_starts_are_kept_while_the_phases_are_the_same(tmp_path):
    old = PretrainConfig()
    checkpoint = write_checkpoint(tmp_path, 3, old)
    assert stored_phase_starts(old, checkpoint) is None, "a checkpoint without them"
    state = TrainerState(step=3, phase_start_steps=[0, 75])
    (checkpoint / "trainer_state.json").write_text(json.dumps(dataclasses.asdict(state)))
    new = PretrainConfig()
    new.training.train_steps, new.feedback.jitter.scale = 500, 0.1
    assert stored_phase_starts(new, checkpoint) == [0, 75]
    new.feedback.schedule = preset_phases("progressive")  # the same phases, written out
    assert stored_phase_starts(new, checkpoint) == [0, 75]
    for schedule in ("two_phase_75_25", [PassPhase(0.0, {1: 1.0}), PassPhase(0.75, {2: 0.8, 3: 0.2})]):
        new.feedback.schedule = schedule
        assert stored_phase_starts(new, checkpoint) is None


def test_pass_counts_of_a_run():
    state = TrainerState(token_equivalents=1234)
    assert state.pass_shares == {} and not state.fusion_active
    for passes in (1, 1, 4, 2):
        state.count_passes(passes)
    assert state.pass_counts == [2, 1, 0, 1] and state.pass_shares == {1: 0.5, 2: 0.25, 3: 0.0, 4: 0.25}
    told = "1: 2 (50.00%), 2: 1 (25.00%), 4: 1 (25.00%); mean passes 2.0000, token-equivalents 1,234"
    assert state.describe_passes() == f"steps by passes so far: {told}"


@pytest.mark.parametrize("named", ["", "checkpoints", "checkpoints/step_00000003"])
def test_a_new_run_may_start_from_a_run_its_checkpoints_or_one_of_them(tmp_path, named):
    source = PretrainConfig()
    source.model.vocab_size = 256
    checkpoint = write_checkpoint(tmp_path, 3, source)
    config = PretrainConfig()
    assert initial_checkpoint(config) is None
    config.checkpoint.init_from = str(tmp_path / named)
    config.model.vocab_size, config.model.rotary_base, config.data.sequence_length = 256, 5e5, 8192
    config.optimizer.type, config.feedback.schedule, config.precision.dtype = "muon", "full", "fp32"
    assert initial_checkpoint(config) == checkpoint
    config.model.num_layers, config.model.hidden_size = 2, 64
    expected = r"num_layers = 2: the checkpoint has 4; model.hidden_size = 64: .* or name another checkpoint.init_from"
    with pytest.raises(CheckpointError, match=expected):
        initial_checkpoint(config)


def test_a_start_from_nowhere_is_refused(tmp_path):
    config = PretrainConfig()
    for folder in (tmp_path / "nowhere", tmp_path, tmp_path / ("x" * 5000)):
        config.checkpoint.init_from = str(folder)
        with pytest.raises(CheckpointError, match=f"checkpoint {folder}: "):
            initial_checkpoint(config)


def test_a_run_that_has_no_checkpoint_yet_is_told_as_that(tmp_path):
    (tmp_path / "config.yaml").write_text(dump_yaml(PretrainConfig()))
    (tmp_path / "status.json").write_text("{}")
    with pytest.raises(CheckpointError, match="the run there has no checkpoint yet"):
        find_step_folder(tmp_path)
