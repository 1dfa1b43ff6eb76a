"""Prefix reuse with Transformer Engine's attention, whose masks are aligned to the last key: equal to whole passes."""

import pytest
from megatron.core.transformer.enums import AttnMaskType

from tests.distributed.launch import run_distributed
from tests.distributed.model_case import Grid
from tests.distributed.te_reuse_case import CASES, measure

GRIDS = [
    Grid(),
    pytest.param(Grid(tensor=2, sequence_parallel=True), marks=pytest.mark.slow),
    pytest.param(Grid(pipeline=2), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def measured():
    found = {}

    def of(grid):
        if grid not in found:
            found[grid] = run_distributed(measure, grid.world_size, grid, timeout=300)
        return found[grid]

    return of


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("passes", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_whole_passes(measured, grid, name, passes):
    for rank in measured(grid):
        found = rank[name, passes]
        assert max(found["sums"]) <= 1e-6 and max(found["gradients"]) <= 1e-5
        assert found["rows"] < 1


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_fewer_queries_than_keys_are_masked_from_the_last_key(measured, grid):
    for rank in measured(grid):
        shapes = [shape for found in rank.values() for shape in found["shapes"]]
        assert {mask for queries, keys, mask in shapes if queries < keys} == {AttnMaskType.causal_bottom_right}
        assert {mask for queries, keys, mask in shapes if queries == keys} == {AttnMaskType.causal}
