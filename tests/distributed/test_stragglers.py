"""The slowest rank is named on every rank, and warned of when it is far behind."""

import pytest

from megatron_fbt.config.logging import LoggingConfig
from megatron_fbt.errors import ConfigError
from megatron_fbt.training.stragglers import StragglerWatch, slowest_of
from tests.distributed.launch import run_distributed


def look(rank, world_size):
    import types

    import torch

    layout = types.SimpleNamespace(device=torch.device("cpu"), cpu_group=None)
    watch, said = StragglerWatch(LoggingConfig(straggler_interval=5), layout), []
    real = watch.look(5, said.append)
    assert real.factor >= 1.0 and len(said) == 1
    watch.measure = lambda device, size, repeats: 0.5 if rank == 2 else 1.0
    found = watch.look(10, said.append)
    return watch.look(11, said.append), found.rank, found.factor, said[1:]


def test_the_slow_rank_is_named():
    results = run_distributed(look, 3)
    assert [result[:3] for result in results] == [(None, 2, 2.0)] * 3
    (line,) = results[0][3]
    assert line.startswith("warning: slowest rank: 2 on ") and line.endswith("2.00 times the median")


def test_of_equal_ranks_none_is_warned_of():
    found = slowest_of([("a", 1.0), ("a", 1.1), ("b", 0.9)])
    assert (found.rank, found.node) == (2, "b") and found.factor == pytest.approx(1.0 / 0.9)


def test_wrong_limits_are_refused():
    with pytest.raises(ConfigError, match="straggler_factor"):
        LoggingConfig(straggler_factor=0.5).validate()
    with pytest.raises(ConfigError, match="straggler_interval"):
        LoggingConfig(straggler_interval=0).validate()
