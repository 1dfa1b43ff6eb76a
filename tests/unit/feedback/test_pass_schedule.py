"""Pass counts: exact draws, shares, phases, and nothing but (seed, step) as their source."""

import random

import numpy
import pytest
import torch

from megatron_fbt.config.feedback import FeedbackConfig, PassPhase, preset_phases
from megatron_fbt.feedback.pass_schedule import draw_passes, passes_at, phase_at

MIX = {1: 0.75, 2: 0.22, 3: 0.03}


def draws(steps, seed=1234, starts=(0,), schedule=None):
    schedule = schedule or [PassPhase(0.0, MIX)]
    return [passes_at(step, seed, starts, schedule) for step in steps]


def test_golden_draws():
    found = draws(range(70, 110), starts=[0, 75], schedule=preset_phases("progressive"))
    assert found == [1] * 5 + [2, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3, 2, 2, 2, 2, 3, 2, 2, 3] + [2] * 12 + [3, 2, 2]


def test_shares_of_the_papers_mix():
    count = 4_000
    found = draws(range(count))
    for passes, share in MIX.items():
        deviation = (share * (1 - share) / count) ** 0.5
        assert found.count(passes) / count == pytest.approx(share, abs=4 * deviation)


def test_shares_of_the_default_schedule_over_a_run():
    count = 3_000
    feedback = FeedbackConfig()
    starts = feedback.phase_start_steps(count)
    found = draws(range(count), seed=5, starts=starts, schedule=feedback.phases)
    assert set(found[: starts[1]]) == {1} and set(found[starts[1] :]) == {2, 3}
    for passes, share in MIX.items():
        assert found.count(passes) / count == pytest.approx(share, abs=0.013)


def test_a_phase_begins_with_its_first_step():
    assert [phase_at(step, [0, 3, 3, 5]) for step in range(7)] == [0, 0, 0, 2, 2, 3, 3]
    schedule = [PassPhase(0.0, {1: 1.0}), PassPhase(0.3, {4: 1.0}), PassPhase(0.5, {2: 1.0})]
    assert draws(range(6), starts=[0, 2, 4], schedule=schedule) == [1, 1, 4, 4, 2, 2]


def test_steps_and_seeds_draw_independently():
    found = torch.tensor([draws(range(300), seed=seed) for seed in (0, 1, 2, 2**32 - 1)])
    for i in range(4):
        for j in range(i):
            agreement = (found[i] == found[j]).double().mean().item()
            assert agreement == pytest.approx(0.75**2 + 0.22**2 + 0.03**2, abs=0.12)
    assert draws([2**31, 2**32 + 1, 10**12]) == draws([2**31, 2**32 + 1, 10**12])


def test_global_generators_play_no_part():
    expected = draws(range(200))
    for seed in (1, 2):
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        random.random(), numpy.random.rand(seed), torch.rand(seed)
        before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
        assert draws(range(200)) == expected
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1] == random.getstate() and (before[2] == numpy.random.get_state()[1]).all()


def test_the_order_in_which_steps_are_asked_plays_no_part():
    assert draws(reversed(range(200))) == draws(range(200))[::-1]


def test_the_order_of_a_distribution_plays_no_part():
    turned = dict(reversed(MIX.items()))
    assert [draw_passes(step, 3, turned) for step in range(300)] == [draw_passes(step, 3, MIX) for step in range(300)]


def test_probabilities_that_add_up_to_one_but_for_rounding_always_give_a_listed_count():
    third = {1: 1 / 3, 2: 1 / 3, 5: 1 / 3 - 1e-7}
    assert {draw_passes(step, 3, third) for step in range(500)} == {1, 2, 5}
