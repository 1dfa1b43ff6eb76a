"""Contraction, alarm and verdict of series whose answers are known."""

import math

import pytest

from megatron_fbt.analysis.fixed_point import PassSeries
from megatron_fbt.analysis.stability import assess, describe, find_growth, fit_contraction, judged_norms

EPSILON = 2.0**-23


def series(norms, losses=None, length=1000, open_shares=None):
    passes = len(norms) + 1
    losses = [2.0] * passes if losses is None else losses
    shares = [1.0] * passes if open_shares is None else open_shares
    return PassSeries(losses, [None, *norms], [1.0] * passes, shares, length, 100, EPSILON)


def test_a_geometric_fall_has_its_own_rate():
    norms = {k: 0.8 * 0.5 ** (k - 2) for k in range(2, 12)}
    found = fit_contraction(norms, EPSILON)
    assert found.rate == pytest.approx(0.5, rel=1e-12) and found.r_squared == pytest.approx(1)
    assert (found.state, found.first_pass, found.last_pass, found.rest_pass) == ("falling", 2, 11, None)


def test_the_fit_is_least_squares_of_the_logarithms():
    found = fit_contraction({2: math.exp(-1), 3: math.exp(-2), 4: math.exp(-4)}, EPSILON)
    assert found.rate == pytest.approx(math.exp(-1.5))
    assert found.r_squared == pytest.approx(3.0**2 / (2 * 14 / 3))


def test_rounding_errors_and_a_rise_at_the_start_are_no_part_of_the_fit():
    falling = [0.4, 0.5] + [0.5 * 0.1**n for n in range(1, 6)]
    found = fit_contraction(dict(enumerate([*falling, 2.5e-7, 3e-7, 2.4e-7], start=2)), EPSILON)
    assert found.noise == pytest.approx(3 * 2.4e-7)
    assert (found.state, found.first_pass, found.last_pass, found.rest_pass) == ("at rest", 3, 8, 9)
    assert found.rate == pytest.approx(0.1)


@pytest.mark.parametrize("rate, state", [(0.9, "falling"), (0.96, "falling"), (0.98, "stalled"), (1.0, "stalled")])
def test_a_slow_fall_is_no_contraction(rate, state):
    made = series([1.3 * rate**n for n in range(60)])
    report = assess(made, 3, 0.1)
    assert report["contraction"]["state"] == state and report["alarm"] is None
    assert report["verdict"].startswith("GOOD" if state == "falling" else "DOUBTFUL")
    assert any("not come to rest" in note for note in report["notes"])


def test_too_few_norms_have_no_rate():
    assert fit_contraction({2: 0.5, 3: 0.2}, EPSILON).rate is None
    assert fit_contraction({}, EPSILON).state == "unknown"


@pytest.mark.parametrize(
    "norms, expected",
    [
        ([0.5, 0.2, 0.24, 0.1], None),
        ([0.5, 0.2, 0.26, 0.1], (3, 4)),
        ([0.5, 0.2, 0.1, 0.12, 0.15], (4, 6)),
        ([0.5, 1e-7, 4e-7], None),
        ([0.5, 0.4, math.inf], (3, 4)),
        ([0.5, math.nan], (3, 3)),
    ],
)
def test_growth_is_found_above_the_noise(norms, expected):
    found = find_growth(dict(enumerate(norms, start=2)), 5e-7)
    assert (found and (found.from_pass, found.to_pass)) == expected


def test_norms_of_a_few_last_positions_are_not_judged():
    shares = [1.0, 0.9, 0.5, 0.1, 0.09, 0.0]
    assert list(judged_norms(series([0.5, 0.4, 0.3, 9.0, None], open_shares=shares))) == [2, 3, 4]


@pytest.mark.parametrize(
    "losses, trained, margin, word, gap",
    [
        ([2.0, 1.5, 1.5, 1.55], 2, 0.1, "GOOD", 0.05),
        ([2.0, 1.5, 1.5, 1.65], 2, 0.1, "BAD", 0.15),
        ([2.0, 1.5, 1.5, 1.65], 2, 0.2, "GOOD", 0.15),
        ([2.0, 1.5, 1.6, 1.65], 3, 0.1, "GOOD", 0.05),
        ([2.0, 1.5, 1.5, 1.4], 2, 0.0, "GOOD", -0.1),
    ],
)
def test_the_gap_decides(losses, trained, margin, word, gap):
    report = assess(series([0.5, 0.1, 0.01], losses), trained, margin)
    assert report["verdict"].startswith(word) and report["gap"] == pytest.approx(gap)
    assert f"gap {gap:+.4f}" in report["verdict"] and report["alarm"] is None


def test_a_contraction_alone_is_not_good():
    report = assess(series([0.5, 0.1, 0.01, 1e-3, 1e-4], [2.0, 1.5, 1.8, 2.4, 2.5, 2.5]), 2, 0.1)
    assert report["contraction"]["rate"] < 0.2 and report["verdict"].startswith("BAD")
    assert any("plain pass" in note for note in report["notes"]) and report["best_pass"] == 2


def test_a_growing_norm_is_an_alarm_and_never_good():
    report = assess(series([0.5, 0.2, 0.3]), 2, 0.1)
    assert "grows, from 0.2 in pass 3 to 0.3 in pass 4" in report["alarm"]
    assert report["contraction"]["state"] == "growing" and report["verdict"].startswith("DOUBTFUL")


def test_a_loss_that_is_not_finite_is_an_alarm():
    report = assess(series([0.5, math.nan], [2.0, 1.9, math.nan]), 2, 0.1)
    assert "pass 3 is not finite" in report["alarm"] and report["verdict"].startswith("BAD")


def test_table_has_the_passes_of_interest_and_the_trained_depth():
    text = describe(assess(series([0.5 * 0.9**n for n in range(39)]), 4, 0.1))
    assert [line.split()[0] for line in text.splitlines()[1:9]] == ["1", "2", "3", "4", "5", "10", "30", "40"]
    assert "factor of 0.900 a pass (log-linear fit over passes 2 to 40" in text and "not come to rest" in text


def test_as_many_passes_as_positions_are_said_to_be_final():
    text = describe(assess(series([0.5, 0.1, 0.01], length=4), 2, 0.1))
    assert "final after 4 passes" in text and "not come to rest" not in text
