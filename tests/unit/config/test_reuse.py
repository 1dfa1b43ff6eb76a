"""Where prefix reuse is on, and what it is expected to spare."""

import pytest

from megatron_fbt.config.checks import validate_config
from megatron_fbt.config.feedback import PassPhase, PrefixConfig
from megatron_fbt.config.plan import make_plan
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.config.reuse import reuse_obstacle, reuses_prefix, saved_share, smallest_prefixes
from megatron_fbt.core.row_groups import cheapest_groups
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
    assert reuses_prefix(config) and saved_share(config, 2, 1) > 0


@pytest.mark.parametrize("passes", [2, 3])
@pytest.mark.parametrize(("rows", "micro_batches"), [(1, 1), (2, 1), (4, 1), (1, 4), (2, 4), (4, 2)])
@pytest.mark.parametrize(("exponent", "low", "high", "probability"), [(1.0, 0.0, 1.0, 1.0), (2.0, 0.2, 0.9, 0.8)])
def test_the_expected_saving_is_the_mean_over_drawn_prefixes(
    rows, micro_batches, passes, exponent, low, high, probability
):
    import torch

    prefix = {"exponent": exponent, "low": low, "high": high, "probability": probability}
    fields = {f"feedback.prefix.{name}": value for name, value in prefix.items()}
    config = config_of(**fields, **{"training.micro_batch_size": rows})
    steps, count = 1000, rows * micro_batches
    starts = torch.zeros(steps * count, 200, dtype=torch.bool)
    starts[:, 0] = True
    plain = []
    for number in range(2, passes + 1):
        fused = fused_positions(config.feedback.prefix, starts, torch.arange(steps * count), number, seed=1)
        plain.append((~fused).sum(1).view(steps, count))
    prefixes = torch.stack(plain, 1)
    groups = torch.tensor([cheapest_groups(of_step, micro_batches) for of_step in prefixes.tolist()])
    dealt = torch.stack([of_step[:, order] for of_step, order in zip(prefixes, groups)])
    found = dealt.amin(3).double().mean().item() / 200
    expected = saved_share(config, passes, micro_batches)
    if passes == 2 or rows == 1 or micro_batches == 1:
        assert expected == pytest.approx(found, abs=0.015)
    else:
        assert saved_share(config, passes, 1) + 0.01 < expected < found < saved_share(config, 2, micro_batches)


def test_no_saving_where_there_is_no_reuse_and_none_known_where_the_data_decide():
    assert saved_share(config_of(), 1, 4) == 0
    assert saved_share(config_of(**{"feedback.prefix_reuse": False}), 2, 4) == 0
    assert saved_share(config_of(**{"feedback.prefix.granularity": "document"}), 2, 4) is None
    assert make_plan(config_of(**{"feedback.prefix.granularity": "document"}), 1, 1000).reused_share is None
    assert make_plan(config_of(**{"feedback.schedule": "standard"}), 1, 1000).reused_share == 0


def test_the_plan_tells_the_saving_of_its_layout_and_schedule():
    plan = make_plan(config_of(), 1, 1000)
    assert plan.reused_share == pytest.approx(1 / 2)
    assert "spared in extra passes" in plan.describe() and "50.0% of the positions" in plan.describe()
    rows = {"training.micro_batch_size": 2, "training.global_batch_size": 16}
    two = config_of(**rows, **{"feedback.schedule": [PassPhase(0.0, {2: 1.0})]})
    # Of n uniform prefixes in order the j-th is j / (n + 1) long, and every second one counts.
    assert make_plan(two, 1, 1000).reused_share == pytest.approx(sum(range(1, 16, 2)) / 8 / 17)
    assert make_plan(two, 4, 1000).reused_share == pytest.approx((1 + 3) / 2 / 5)
    assert make_plan(two, 8, 1000).reused_share == pytest.approx(1 / 3)
    both = config_of(**rows, **{"feedback.schedule": [PassPhase(0.0, {1: 0.5, 2: 0.3, 3: 0.2})]})
    shares = [saved_share(both, passes, 8) for passes in (2, 3)]
    assert shares[0] > shares[1]
    assert make_plan(both, 1, 1000).reused_share == pytest.approx((0.3 * shares[0] + 0.4 * shares[1]) / 0.7)


def test_the_saving_of_many_rows_is_computed_in_no_time():
    prefix = PrefixConfig(probability=0.7, exponent=3.0)
    assert smallest_prefixes(prefix, 2048, 1) == pytest.approx(0, abs=1e-6)
    for rows, count in ((1, 10**6), (8, 10**5)):
        assert smallest_prefixes(prefix, rows, count) == pytest.approx(0.7 / 4, abs=0.01)


def test_chunks_of_the_loss_and_zero3_exclude_each_other():
    config = config_of(**{"memory.chunked_loss": True, "optimizer.sharding": "zero3"})
    with pytest.raises(
        ConfigError, match="memory.chunked_loss = true: not available with optimizer.sharding = 'zero3'"
    ):
        validate_config(config)
