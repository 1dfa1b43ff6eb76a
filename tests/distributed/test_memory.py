"""Recompute changes no gradient, packed sequences are masked rows, overlapped reduction is right for any K."""

import pytest

from tests.distributed import memory_case
from tests.distributed.launch import run_distributed
from tests.distributed.model_case import Grid


@pytest.fixture(scope="module")
def measured():
    (found,) = run_distributed(memory_case.measure, 1, timeout=240)
    return found


@pytest.mark.parametrize("mode", memory_case.MODES, ids="-".join)
def test_recompute_gives_the_gradients_of_keeping_with_dropout_on(measured, mode):
    same, calls_per_layer = measured["recompute"][mode]
    assert same
    recomputed_passes = {"none": 0}.get(mode[0], {"all": 3, "early": 2}[mode[1]])
    assert calls_per_layer == 3 + recomputed_passes


def test_packed_sequences_have_the_losses_of_masked_rows(measured):
    masked, packed = measured["packed"]["masked"], measured["packed"]["packed"]
    assert packed == pytest.approx(masked, rel=1e-5)


STAGES = pytest.param(Grid(pipeline=2, data=2), marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[Grid(data=2), STAGES], ids=str)
def overlapped(request):
    grid = request.param
    return [grid, *run_distributed(memory_case.overlap, grid.world_size, grid, timeout=240)]


@pytest.mark.parametrize("sharding", ["none", "megatron"])
@pytest.mark.parametrize("model", memory_case.OVERLAPPED)
def test_reduction_runs_during_the_last_backward_whatever_the_passes_before(overlapped, model, sharding):
    grid, *ranks = overlapped
    for number, rank in enumerate(ranks):
        assert [passes for passes, *_ in rank[model, sharding]] == [1, 2, 1, 3, 2]
        for passes, groups, started, error in rank[model, sharding]:
            first_stage = number < grid.world_size // grid.pipeline
            # Later stages have one bucket in Megatron-Core, with sharded states another for a tied head.
            assert groups > (4 if grid.pipeline == 1 else 2) if first_stage else groups in (1, 2)
            # With one pass the group that holds the fusion layer waits: it gets no gradient.
            assert started == groups - int(passes == 1 and first_stage)
            assert error <= 1e-6
