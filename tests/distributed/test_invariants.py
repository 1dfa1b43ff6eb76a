"""The exact tests that the method gives for free (method section 6); number 4 is test_layouts.py."""

import pytest
import torch

from tests.distributed.invariants_case import MODELS, T, measure
from tests.distributed.launch import run_distributed


@pytest.fixture(scope="module")
def measured():
    (found,) = run_distributed(measure, 1, timeout=240)
    return found


@pytest.fixture(params=MODELS)
def model(request, measured):
    return measured[request.param]


@pytest.fixture(params=["tied", "untied"])
def gated(request, measured):
    return measured[request.param]


@pytest.mark.parametrize("prompt", ["prompt 1", "prompt 5"])
def test_parallel_passes_are_the_recurrence_position_by_position(model, prompt):
    error = model[prompt]
    assert error["all positions after T passes"] <= 1e-5
    assert error["final positions"] <= 1e-5
    assert error["not final after one pass"] > 1e-3, "the feedback changes nothing: the comparison shows nothing"
    assert T > 10


@pytest.mark.parametrize("case", ["rms", "none", "options"])
def test_one_pass_is_megatron_cores_gpt_model(gated, case):
    found = gated[case]
    assert found["loss"] <= 1e-6
    assert found["gradient"] <= 1e-5
    assert found["compared"] == found["parameters"] - 2, "all but the two fusion matrices"


def test_an_untied_model_has_a_head_of_its_own(measured):
    assert not measured["tied"]["rms"]["own head"]
    assert measured["untied"]["rms"]["own head"]


def test_without_a_feedback_region_every_pass_is_pass_one(model):
    first, second, third = model["empty"]
    assert torch.equal(first, second) and torch.equal(first, third)


def test_the_loss_of_a_later_pass_reaches_the_states_of_an_earlier_one(model):
    gradient = model["state gradient"]
    assert gradient["norm"] > 1e-3
    assert gradient["slope"] == pytest.approx(gradient["norm"], rel=0.02)


def test_nothing_flows_backwards_in_time(model):
    assert model["causality"]["earlier"] == [0.0, 0.0, 0.0]
    assert min(model["causality"]["later"]) > 1e-3


def test_masked_documents_know_nothing_of_each_other_in_any_pass(model):
    masked, plain = model["documents"], model["documents seen"]
    assert masked["second"] == [0.0, 0.0, 0.0] and min(masked["first"]) > 1e-3
    assert min(plain["second"]) > 1e-4, "without the mask the second document must see the first"


def test_a_step_waits_for_the_device_for_its_report_alone(gated):
    # The other list is of the host's own numbers, see test_prefix_reuse.py: where the suffixes of extra passes begin.
    assert gated["host"] == {"reads": 0, "lists": 2}
