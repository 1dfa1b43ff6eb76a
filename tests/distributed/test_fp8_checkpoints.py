"""Checkpoints load with and without the delayed recipe's memory; a weight that is missing is an error."""

import pytest

from tests.distributed.fp8_checkpoint_case import resume, save
from tests.distributed.launch import run_distributed
from tests.distributed.model_case import Grid


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What the run that was saved did later, and what one that was resumed did."""
    folder = tmp_path_factory.mktemp("fp8")
    (saved,) = run_distributed(save, 1, Grid(), folder, timeout=200)
    (resumed,) = run_distributed(resume, 1, Grid(), folder, timeout=200)
    return saved, resumed


def test_a_resumed_run_equals_an_unbroken_one(runs):
    (delayed, plain), _ = runs[0]
    assert runs[1]["delayed", "delayed"] == (False, delayed)
    assert runs[1]["tensorwise", "tensorwise"] == (True, plain)


def test_memory_is_ignored_by_other_recipes_and_begins_anew_without_it(runs):
    fresh, reports = runs[1]["delayed", "tensorwise"]
    assert fresh and len(reports) == 2 and not any(report.skipped for report in reports)
    fresh, reports = runs[1]["tensorwise", "delayed"]
    assert fresh and not any(report.skipped for report in reports)
    assert runs[1]["shorter"]


def test_a_missing_weight_is_an_error(runs):
    assert "decoder.layers.2" in runs[1]["deeper"] and "no such tensor" in runs[1]["deeper"]


def test_exports_see_neither_memory_nor_quantised_bytes(runs):
    stored = runs[1]["stored"]
    assert len(stored) == 2 * 2 * 4 and "optimizer._extra_state.decoder.layers.1.mlp.linear_fc2.scales" in stored
    assert not any("_extra_state" in name or "amax" in name for name in runs[1]["exported"])
    assert runs[1]["types"] == {"torch.float32"}
