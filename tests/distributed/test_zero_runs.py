"""A whole run that goes from one sharding to another, with validation, equals a plain one."""

import pytest

from tests.distributed.launch import run_distributed
from tests.distributed.run_case import STEPS, checkpoint_of, rows_of, run, run_config, stop_before, write_corpus

STOP = 8
MORE = {"training__eval_interval": 6, "training__eval_iters": 2, "training__rampup_batch_size": None}


def one_run(rank, world_size, folder, corpus, sharding, stop=None):
    """A run, or a part of it, in processes of its own: DeepSpeed keeps process groups for a process's life."""
    config = run_config(folder, corpus, optimizer__sharding=sharding, **MORE)
    return run(config, None if stop is None else stop_before(stop))


def test_a_run_moves_between_shardings(tmp_path):
    corpus = write_corpus(tmp_path)
    assert (
        run_distributed(one_run, 2, tmp_path / "plain", corpus, "none", timeout=200, init_group=False)
        == ["finished"] * 2
    )
    moving = tmp_path / "moving"
    stopped = run_distributed(one_run, 2, moving, corpus, "zero3", STOP, timeout=200, init_group=False)
    assert stopped == ["StoppedBySignal"] * 2
    assert run_distributed(one_run, 2, moving, corpus, "zero1", timeout=200, init_group=False) == ["finished"] * 2
    expected, found = rows_of(tmp_path / "plain"), rows_of(moving)
    assert len(found) == STEPS and any("validation_loss_pass_3" in row for row in found)
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        for name, value in b.items():
            assert a[name] == pytest.approx(value, rel=1e-3, abs=1e-6), (b["step"], name)
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    weights = checkpoint_of(moving, STEPS)
    for name, value in checkpoint_of(tmp_path / "plain", STEPS).items():
        assert (weights[name] - value).norm() <= 1e-3 * value.norm(), name
