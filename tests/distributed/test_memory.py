"""Recompute changes no gradient, packed sequences are masked rows, overlapped reduction is right for any K."""

import pytest

from tests.distributed import memory_case
from tests.distributed.launch import run_distributed


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


@pytest.fixture(scope="module")
def overlapped():
    return run_distributed(memory_case.overlap, 2, timeout=240)


@pytest.mark.parametrize("sharding", ["none", "megatron"])
def test_reduction_runs_during_the_last_backward_whatever_the_passes_before(overlapped, sharding):
    for rank in overlapped:
        assert [passes for passes, *_ in rank[sharding]] == [1, 2, 1, 3, 2]
        for passes, groups, started, error in rank[sharding]:
            assert groups > 4
            # With one pass the group that holds the fusion layer waits: it gets no gradient.
            assert started == (groups if passes > 1 else groups - 1)
            assert error <= 1e-6
