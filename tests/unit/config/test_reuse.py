"""Where prefix reuse is on, and what it is expected to spare."""

import pytest

from megatron_fbt.config.checks import validate_config
from megatron_fbt.config.plan import make_plan
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.config.reuse import reuse_obstacle, reuses_prefix, saved_share
from megatron_fbt.errors import ConfigError
from megatron_fbt.feedback.prefix import fused_positions

OBSTACLES = {
    "model.attention_dropout = 0.1": {"model.attention_dropout": 0.1},
    "model.hidden_dropout = 0.2": {"model.hidden_dropout": 0.2},
    "data.reset_attention_mask = true": {
        "data.reset_attention_mask": True,
        "model.transformer_impl": "transformer_engine",
    },
    "precision.fp8 = 'e4m3'": {"precision.fp8": "e4m3", "precision.fp8_emulated": True},
    "optimizer.sharding = 'zero1'": {"optimizer.sharding": "zero1"},
}


def config_of(**fields) -> PretrainConfig:
    """A valid configuration with dotted fields set."""
    config = PretrainConfig()
    config.training.train_steps = 10
    for name, value in fields.items():
        *sections, attribute = name.split(".")
        target = config
        for section in sections:
            target = getattr(target, section)
        assert hasattr(target, attribute), name
        setattr(target, attribute, value)
    return config


def test_on_where_nothing_speaks_against_it():
    assert reuses_prefix(config_of())
    assert reuses_prefix(config_of(**{"feedback.prefix_reuse": True, "optimizer.sharding": "megatron"}))
    prompts = {"feedback.prefix.granularity": "prompt", "data.format": "labelled"}
    assert reuses_prefix(config_of(**prompts, **{"parallel.pipeline_model_parallel_size": 2}))
    assert not reuses_prefix(config_of(**{"feedback.prefix_reuse": False}))


@pytest.mark.parametrize("named", OBSTACLES)
def test_off_with_a_note_or_refused_where_something_does(named):
    config = config_of(**OBSTACLES[named])
    assert reuse_obstacle(config).startswith(named) and not reuses_prefix(config)
    notes = make_plan(config, config.parallel.model_parallel_size, 1000).notes
    assert [note for note in notes if note.startswith("feedback.prefix_reuse is off") and named in note]
    config.feedback.prefix_reuse = True
    with pytest.raises(ConfigError, match="feedback.prefix_reuse = true: ") as refused:
        validate_config(config)
    assert named in str(refused.value)


def test_with_transformer_engine_on_request_alone():
    config = config_of(**{"model.transformer_impl": "transformer_engine"})
    assert not reuses_prefix(config)
    (note,) = [note for note in make_plan(config, 1, 1000).notes if note.startswith("feedback.prefix_reuse is off")]
    assert "on request" in note and "set it to true" in note
    config.feedback.prefix_reuse = True
    validate_config(config)
    assert reuses_prefix(config) and saved_share(config) > 0


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize(("exponent", "low", "high", "probability"), [(1.0, 0.0, 1.0, 1.0), (2.0, 0.2, 0.9, 0.8)])
def test_the_expected_saving_is_the_mean_over_drawn_prefixes(rows, exponent, low, high, probability):
    import torch

    prefix = {"exponent": exponent, "low": low, "high": high, "probability": probability}
    fields = {f"feedback.prefix.{name}": value for name, value in prefix.items()}
    config = config_of(**fields, **{"training.micro_batch_size": rows})
    starts = torch.zeros(4000 * rows, 200, dtype=torch.bool)
    starts[:, 0] = True
    fused = fused_positions(config.feedback.prefix, starts, torch.arange(4000 * rows), 2, seed=1)
    plain = (~fused).sum(1).view(-1, rows).amin(1).float() / 200
    assert saved_share(config) == pytest.approx(plain.mean().item(), abs=0.015)


def test_no_saving_where_there_is_no_reuse_and_none_known_where_the_data_decide():
    assert saved_share(config_of(**{"feedback.schedule": "standard"})) == 0
    assert saved_share(config_of(**{"feedback.prefix_reuse": False})) == 0
    assert saved_share(config_of(**{"feedback.prefix.granularity": "document"})) is None
    plan = make_plan(config_of(), 1, 1000)
    assert plan.reused_share == pytest.approx(1 / (1 + config_of().training.micro_batch_size))
    assert "spared in extra passes" in plan.describe()


def test_chunks_of_the_loss_and_zero3_exclude_each_other():
    config = config_of(**{"memory.chunked_loss": True, "optimizer.sharding": "zero3"})
    with pytest.raises(
        ConfigError, match="memory.chunked_loss = true: not available with optimizer.sharding = 'zero3'"
    ):
        validate_config(config)
