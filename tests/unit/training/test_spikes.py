"""Which steps stand out."""

import math

import pytest

from megatron_fbt.config.training import SpikeConfig
from megatron_fbt.errors import ConfigError
from megatron_fbt.training.spikes import SpikeWatch


def watch(**options):
    return SpikeWatch(SpikeConfig(window=3, **options), [], [])


def test_a_spike_is_judged_by_the_medians_of_the_last_good_steps():
    spikes = watch(loss_factor=2.0, grad_norm_factor=10.0)
    for loss, norm in ((4.0, 1.0), (9.0, 30.0), (3.0, 1.0)):
        assert spikes.judge(loss, norm) is None, "the window is not full"
    assert spikes.judge(8.0, 10.0) is None, "exactly at the limit"  # medians 4 and 1
    assert (spikes.losses, spikes.norms) == ([9.0, 3.0, 8.0], [30.0, 1.0, 10.0])
    assert "loss of pass 1 16.1 is more than 2 times 8, its median over 3 steps" in spikes.judge(16.1, 1.0)
    assert "gradient norm 100.5 is more than 10 times 10" in spikes.judge(1.0, 100.5)
    assert spikes.judge(17.0, 101.0).count("more than") == 2
    assert (spikes.losses, spikes.norms) == ([9.0, 3.0, 8.0], [30.0, 1.0, 10.0]), "a spike does not join the window"


def test_what_is_not_compared_is_no_spike():
    spikes = watch(loss_factor=2.0)
    assert [spikes.judge(1.0, norm) for norm in (1.0, 1.0, 1.0, 1e9)] == [None] * 4
    assert spikes.judge(math.nan, 1.0) is None and spikes.judge(1.0, math.inf) is None
    assert spikes.losses == [1.0] * 3, "numbers that are not finite are skipped elsewhere"


def test_a_resumed_run_judges_as_an_unbroken_one():
    values = [(3.0 + number % 4, 1.0) for number in range(12)]
    whole = watch(loss_factor=1.4)
    expected = [whole.judge(*value) for value in values]
    first = watch(loss_factor=1.4)
    found = [first.judge(*value) for value in values[:6]]
    second = SpikeWatch(first.config, list(first.losses), list(first.norms))
    assert found + [second.judge(*value) for value in values[6:]] == expected and any(expected[6:])


@pytest.mark.parametrize("options", [{"window": 0}, {"loss_factor": 1.0}, {"grad_norm_factor": math.inf}])
def test_impossible_settings_are_refused(options):
    with pytest.raises(ConfigError, match=f"training.spikes.{next(iter(options))}"):
        SpikeConfig(**options).validate()
