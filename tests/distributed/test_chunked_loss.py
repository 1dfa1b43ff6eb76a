"""The loss over chunks of tokens is the loss over whole logits: values, gradients, weight tying, any layout."""

import pytest

from tests.distributed.chunked_loss_case import MODELS, TOKENS_IN_CHUNK, measure, zero
from tests.distributed.launch import run_distributed
from tests.distributed.model_case import Grid

GRIDS = [
    Grid(),
    pytest.param(Grid(tensor=2), marks=pytest.mark.slow),
    Grid(tensor=2, sequence_parallel=True),
    Grid(pipeline=2),
    pytest.param(Grid(tensor=2, pipeline=2, data=2, sequence_parallel=True), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def measured():
    """Outcomes by grid, each computed once: one launch runs all models of a layout."""
    found = {}

    def of(grid: Grid) -> list:
        if grid not in found:
            found[grid] = run_distributed(measure, grid.world_size, grid, list(MODELS), timeout=240)
        return found[grid]

    return of


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_the_loss_and_its_gradients_are_megatron_cores_for_any_chunk(measured, grid, model):
    ranks = [rank[model]["head"] for rank in measured(grid) if rank[model]["head"]]
    assert len(ranks) == grid.world_size // grid.pipeline
    bounds = (1e-6, 1e-6, 2e-6, 2e-6) if model != "bf16" else (1e-6, 1e-6, 1e-2, 1e-2)
    for rank in ranks:
        assert len(rank) == 2 * 2 * len(TOKENS_IN_CHUNK)
        for way, differences in rank.items():
            assert all(found <= bound for found, bound in zip(differences, bounds, strict=True)), (way, differences)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_whole_steps_are_equal(measured, grid, model):
    for rank in measured(grid):
        assert rank[model]["losses"] <= (1e-6 if model != "bf16" else 1e-4)
        assert len(rank[model]["gradients"]) > 10
        for name, difference in rank[model]["gradients"].items():
            assert difference <= (1e-5 if model != "bf16" else 2e-2), name


def test_a_pass_keeps_nothing_of_the_size_of_the_vocabulary(measured):
    found = measured(Grid())[0]["kept"]
    states = 32 * 2 * 64
    assert found["once"] == found["twice"] == states
    assert found["whole"] == 32 * 2 * 1004


@pytest.mark.slow
def test_deepspeeds_optimizers_step_alike_with_logits_that_are_computed_twice():
    for rank in run_distributed(zero, 2, timeout=240):
        for sharding in ("zero1", "zero2"):
            whole, chunked = rank[sharding]
            assert len(whole) == 2
            for found, expected in zip(chunked, whole, strict=True):
                assert found == pytest.approx(expected, rel=1e-5)
