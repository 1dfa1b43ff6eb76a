"""Extra passes that compute the fused suffix alone have the losses and gradients of whole ones, in any layout."""

import pytest

from tests.distributed.launch import run_distributed
from tests.distributed.model_case import Grid
from tests.distributed.prefix_reuse_case import CASES, measure

GRIDS = [
    Grid(),
    Grid(tensor=2, sequence_parallel=True),
    Grid(pipeline=2),
    pytest.param(Grid(tensor=2), marks=pytest.mark.slow),
    pytest.param(Grid(pipeline=4), marks=pytest.mark.slow),
    pytest.param(Grid(tensor=2, pipeline=2, sequence_parallel=True), marks=pytest.mark.slow),
]
ROWS = {
    "p = 1": (0.97, 1.0),
    "p = T/2": (0.6, 0.8),
    "p = T - 1": (0.3, 0.4),
    "p = T": (1 / 3, 1 / 3),
    # Rows of about one prefix are put together; as they come they compute .71, .91 and .90.
    "prompts": (0.55, 0.62),
    "packed documents": (0.8, 0.88),
    "early": (0.8, 0.86),
}
"""Bounds of the share of rows that the layers still compute, over all passes."""
CALLS = {"p = T": {3: 1}, "some empty": {2: 1.5, 3: 2}, "p = T - 1": {3: 3}}
"""Calls of the layers for each micro-batch, by the number of passes."""


@pytest.fixture(scope="module")
def measured():
    """Outcomes by grid, each computed once."""
    found = {}

    def of(grid: Grid) -> list:
        if grid not in found:
            found[grid] = run_distributed(measure, grid.world_size, grid, timeout=240)
        return found[grid]

    return of


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_whole_passes(measured, grid, name):
    for rank in measured(grid):
        assert len(rank[name]) == len(CASES[name][1])
        for step in rank[name]:
            assert step["sums"] <= 1e-6
            assert step["gradients"] and not step["zeros"]
            for key, difference in step["gradients"].items():
                assert difference <= 1e-5, (step["passes"], key)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_layers_compute_fewer_rows(measured, grid, name):
    low, high = ROWS.get(name, (0.0, 1.0))
    for rank in measured(grid):
        for step in rank[name]:
            assert low <= step["rows"] <= high if step["passes"] > 1 else step["rows"] == 1


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_pass_that_fuses_nothing_runs_no_layer(measured, grid, name):
    for rank in measured(grid):
        assert {step["passes"]: step["calls"] for step in rank[name]} == CALLS[name]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_step_waits_for_the_device_once(measured, grid):
    for rank in measured(grid):
        assert len(rank["host reads"]) == 4
        for name, reads in rank["host reads"].items():
            assert reads == ["tolist"], name


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_diagnostics_are_those_of_whole_passes(measured, grid):
    for rank in measured(grid):
        for step in rank["random"] + rank["some empty"]:
            off, on = step["diagnostics"]
            assert off.keys() == on.keys()
            assert "gate_high_share" in off or step["passes"] == 1
            for key in off:
                assert on[key] == pytest.approx(off[key], rel=1e-4, abs=1e-9), key
