"""Scales and histories of Transformer Engine's delayed recipe: in checkpoints for those who go on with it alone."""

import pytest
import torch

from tests.distributed.engine_history_case import RESUMED, run
from tests.distributed.launch import run_distributed
from tests.distributed.model_case import Grid

LINEAR = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
MODULES = {f"decoder.layers.{layer}.{name}" for layer in (0, 1) for name in LINEAR}
SHAPES = {"scale_fwd": (3,), "amax_history_fwd": (16, 3), "scale_bwd": (2,), "amax_history_bwd": (16, 2)}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What one process saw."""
    (seen,) = run_distributed(run, 1, Grid(), tmp_path_factory.mktemp("history"), timeout=200)
    return seen


def equal(one, other):
    """Whether two memories are the same."""
    assert one.keys() == other.keys()
    return all(torch.equal(tensor, other[name][kind]) for name, held in one.items() for kind, tensor in held.items())


def test_they_are_made_before_a_first_forward_and_change_in_training(found):
    new, saved = found["new", "engine"], found["saved", "engine"]
    assert new.keys() == MODULES
    for name, held in new.items():
        assert {kind: tuple(tensor.shape) for kind, tensor in held.items()} == SHAPES
        for direction in ("fwd", "bwd"):
            assert (held[f"scale_{direction}"] == 1).all() and not held[f"amax_history_{direction}"].any()
            assert saved[name][f"scale_{direction}"][0] != 1 and saved[name][f"amax_history_{direction}"].any()


def test_a_resumed_run_equals_an_unbroken_one(found):
    assert equal(found["loaded", "engine", "engine"], found["saved", "engine"])
    assert found["resumed", "engine", "engine"] == found["unbroken", "engine"]


def test_they_matter(found):
    """A run whose checkpoint has none of them, the weights being others' or its own, rounds otherwise."""
    assert equal(found["loaded", "engine", "emulated"], found["new", "engine"])
    assert found["resumed", "engine", "emulated"] != found["unbroken", "engine"]
    assert found["unbroken", "engine"] != found["resumed", "tensorwise", "engine"]


def test_runs_of_other_recipes_ignore_them(found):
    assert found["loaded", "tensorwise", "engine"] == {}
    assert equal(found["loaded", "emulated", "engine"], found["new", "emulated"])
    for case, source in RESUMED:
        reports = found["resumed", case.name, source.name]
        assert len(reports) == 2 and not any(report.skipped for report in reports)


def test_histories_of_another_length_begin_anew(found):
    for name, held in found["loaded", "longer", "engine"].items():
        assert held["amax_history_fwd"].shape == (17, 3) and not held["amax_history_fwd"].any()
        assert torch.equal(held["scale_fwd"], found["saved", "engine"][name]["scale_fwd"])


def test_a_missing_weight_is_an_error(found):
    assert "decoder.layers.2" in found["deeper"] and "no such tensor" in found["deeper"]


def test_what_is_stored_and_what_is_exported(found):
    assert {name.removeprefix("optimizer._extra_state.") for name in found["stored"]} == {
        f"{module}.{kind}" for module in MODULES for kind in SHAPES
    }
    assert not any("_extra_state" in name or "amax" in name or "scale" in name for name in found["exported"])
