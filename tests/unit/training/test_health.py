"""Warnings about feedback: when they come, when they do not, and what they say."""

import math

import pytest

from megatron_fbt.config.feedback import FeedbackConfig, SequentialEvalConfig
from megatron_fbt.training.health import gains, warnings

CONFIG = FeedbackConfig(schedule="standard", sequential_eval=SequentialEvalConfig(margin=0.25))


def test_gains_are_over_pass_1():
    assert gains([2.0, 1.5, 2.25]) == {"gain_pass_2": 0.5, "gain_pass_3": -0.25}
    assert gains([2.0]) == {}


@pytest.mark.parametrize("kind", ["", "validation_"])
@pytest.mark.parametrize(
    "norms, growing", [([0.5, 0.25, 0.125], []), ([0.5, 0.5], []), ([0.5, 0.25, 0.75], [4]), ([0.5, math.nan], [3])]
)
def test_a_growing_update_norm_is_an_alarm(kind, norms, growing):
    row = {f"{kind}update_norm_pass_{k}": norm for k, norm in enumerate(norms, start=2)}
    found = warnings(row, CONFIG)
    assert [int(warning.split()[1]) for warning in found] == growing
    for warning in found:
        assert "the feedback map is no contraction" in warning and f"({kind}update_norm " in warning


def test_null_and_absent_norms_are_no_alarm():
    assert warnings({}, CONFIG) == []
    assert warnings({"update_norm_pass_2": 0.5, "update_norm_pass_3": None}, CONFIG) == []


@pytest.mark.parametrize("soft, warned", [(2.0, False), (2.25, False), (2.5, True), (math.nan, True), (None, False)])
def test_sequential_validation_that_falls_behind_the_trained_passes_is_warned_of(soft, warned):
    found = warnings({"validation_loss_soft": soft, "validation_loss_soft_trained": 2.0}, CONFIG)
    assert len(found) == warned
    if warned:
        assert found[0].startswith("decoding in SOFT will be worse than the trained passes")
        assert f"{soft:.4f} under the recurrence, 2.0000 after 1 passes" in found[0]


@pytest.mark.parametrize("fused, warned", [(1.5, False), (2.25, False), (2.5, True), (math.inf, True)])
def test_prompts_that_fused_passes_spoil_are_warned_of(fused, warned):
    row = {"validation_loss_soft": 2.0, "validation_loss_soft_trained": 2.0, "validation_loss_fused_3": fused}
    found = warnings(row, CONFIG)
    assert [warning.startswith("prompts are better left plain") for warning in found] == [True] * warned
