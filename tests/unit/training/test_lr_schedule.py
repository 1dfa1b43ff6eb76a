"""Learning rate against its closed form, at every step, from any starting point."""

import math
from types import SimpleNamespace

import pytest

from megatron_fbt.config.optimizer import OptimizerConfig
from megatron_fbt.errors import ConfigError
from megatron_fbt.training.lr_schedule import LearningRate

SAMPLES = 200


def closed_form(style, consumed, warmup, fraction, peak, low):
    if warmup and consumed <= warmup:
        return peak * consumed / warmup
    if consumed > SAMPLES:
        return low
    if style == "cosine":
        return low + (peak - low) * (1 + math.cos(math.pi * (consumed - warmup) / (SAMPLES - warmup))) / 2
    decay = round(fraction * SAMPLES)
    if consumed <= SAMPLES - decay:
        return peak
    return low + (peak - low) * (SAMPLES - consumed) / decay


@pytest.mark.parametrize("style", ["WSD", "cosine"])
@pytest.mark.parametrize("warmup, fraction", [(0, 0.25), (24, 0.25), (0, 0.0), (0, 1.0), (150, 0.25), (1, 0.333)])
def test_every_step_equals_the_closed_form(style, warmup, fraction):
    config = OptimizerConfig(lr=3e-3, min_lr=1e-5, lr_decay_style=style, lr_decay_fraction=fraction)
    schedule = LearningRate(config, warmup, SAMPLES)
    for consumed in range(SAMPLES + 20):
        expected = closed_form(style, consumed, warmup, fraction, 3e-3, 1e-5)
        assert schedule.at(consumed) == pytest.approx(expected, rel=1e-12), consumed


def test_the_value_depends_on_the_count_alone():
    config = OptimizerConfig(lr_decay_style="WSD")
    schedule = LearningRate(config, 24, SAMPLES)
    forward = [schedule.at(consumed) for consumed in range(SAMPLES)]
    backward = [schedule.at(consumed) for consumed in reversed(range(SAMPLES))]
    resumed = LearningRate(config, 24, SAMPLES)
    assert forward == backward[::-1]
    assert forward[133:] == [resumed.at(consumed) for consumed in range(133, SAMPLES)]


def test_apply_sets_every_group_with_its_own_multipliers():
    optimizer = SimpleNamespace(param_groups=[{"wd_mult": 1.0}, {"wd_mult": 0.0}, {"max_lr": 0.5, "min_lr": 0.1}])
    schedule = LearningRate(OptimizerConfig(lr=1.0, weight_decay=0.1), 10, SAMPLES)
    assert schedule.apply(optimizer, 5) == 0.5
    assert schedule.apply(optimizer, 20) == 1.0
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 1.0, 0.5]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0, 0.1]
    schedule.apply(optimizer, SAMPLES)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0, 0.1]


@pytest.mark.parametrize(
    "style, warmup", [("WSD", 151), ("WSD", 200), ("WSD", 5000), ("cosine", 200), ("cosine", 5000)]
)
def test_a_warmup_that_leaves_no_room_is_refused_with_the_numbers(style, warmup):
    with pytest.raises(ConfigError, match=rf"lr_warmup_steps.*{warmup} samples.*200 samples"):
        LearningRate(OptimizerConfig(lr_decay_style=style), warmup, SAMPLES)


@pytest.mark.parametrize("low", [-1.0, 1.0])
def test_a_minimum_outside_of_zero_to_peak_is_refused(low):
    with pytest.raises(ConfigError, match="min_lr"):
        LearningRate(OptimizerConfig(lr=0.5, min_lr=low), 0, SAMPLES)
