"""What a step holds above its state: counted tensor by tensor, and as the memory report estimates it."""

import pytest
import torch

from benchmarks.tensor_bytes import TensorBytes
from tests.distributed import memory_peak_case as case
from tests.distributed.launch import run_distributed
from tests.distributed.model_case import Grid

TOLERANCE = 0.15
"""Of the estimate, which leaves out what is small: losses, masks of tokens, the last kernel's own results."""


@pytest.fixture(scope="module")
def measured():
    (found,) = run_distributed(case.measure, 1, Grid(), case.MODELS, timeout=240)
    return found


def within(found, model):
    chosen = {key: numbers for key, numbers in found.items() if key[0] == model}
    assert chosen
    for key, (peak, left, estimate) in chosen.items():
        assert estimate == pytest.approx(peak, rel=TOLERANCE), key
        assert left == 0, key


@pytest.mark.parametrize("model", case.MODELS)
def test_the_estimate_is_what_a_step_holds_and_nothing_outlives_it(measured, model):
    within(measured, model)


def test_the_estimate_of_each_stage_of_a_pipeline():
    for found in run_distributed(case.measure, 2, Grid(pipeline=2), case.PIPELINE, timeout=240):
        within(found, "fewer keys")


def test_an_early_pass_that_is_computed_again_keeps_its_input_keys_and_values_alone(measured):
    for model in ("as many keys as queries", "fewer keys"):
        one, two, three = (measured[model, "full", "early", passes][0] for passes in (1, 2, 3))
        assert two <= 1.25 * one and three <= 1.45 * one
        assert measured[model, "full", "all", 3][0] <= 0.75 * one


def test_weight_gradients_do_not_wait_for_the_passes_before():
    """One graph of all passes holds the gradients of the last pass's weights until those of the first come."""
    ((apart, together, weights),) = run_distributed(case.one_graph, 1)
    assert together - apart > 0.6 * weights


def test_bytes_are_counted_until_the_last_reference_goes():
    kept = torch.zeros(10)
    with TensorBytes(origins=True) as counted:
        a = torch.ones(1000)
        b = a.view(10, 100) + 1
        assert (counted.now, counted.peak) == (8000, 8000)
        del a
        counted.mark("half")
        kept.add_(1)
        c = b[0]
        del b
        assert counted.now == 4000
        del c
    assert (counted.now, counted.peak, counted.marks) == (0, 8000, [("half", 4000)])
    assert sum(size for _, size in counted.largest()) == 8000
