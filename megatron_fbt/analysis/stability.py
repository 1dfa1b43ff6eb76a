"""What the iterated map says about a model: contraction, alarm, and the price of coming to rest."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Dict, List, Optional, Sequence

from megatron_fbt.analysis.fixed_point import PassSeries

GROWTH = 1.25
"""Alarm when an update norm is this much larger than an earlier one."""
OPEN_SHARE = 0.1
"""Update norms count for contraction and alarm while at least this share of the scored positions is not final."""
STALLED = 0.97
"""A map whose update norm falls more slowly than by this factor a pass does not contract to speak of: 300 such passes
leave a ten-thousandth of a change, and the growing share of final positions alone gives a slow fall."""
TABLE_PASSES = (1, 2, 3, 5, 10, 30, 100, 300)


@dataclass
class Contraction:
    """How the update norms fall: a straight line through their logarithms, pass by pass.

    Attributes:
        state: "at rest" (they reached the number format's noise), "falling" (they did not yet), "stalled" (they hardly
            fall), "growing", or "unknown" (too few of them).
        rate: Factor from one pass to the next by the fitted line; None with fewer than three points.
        first_pass, last_pass: Passes that the line was fitted to: from the largest norm until the noise.
        r_squared: Of the fit.
        noise: Norms up to here are rounding errors.
        rest_pass: First pass whose norm is not above `noise`.
    """

    state: str
    rate: Optional[float]
    first_pass: Optional[int]
    last_pass: Optional[int]
    r_squared: Optional[float]
    noise: float
    rest_pass: Optional[int]


@dataclass
class Growth:
    """An update norm that is larger than an earlier one."""

    from_pass: int
    from_norm: float
    to_pass: int
    to_norm: float


def judged_norms(series: PassSeries) -> Dict[int, float]:
    """{pass: update norm} of the passes in which enough positions are open to speak of the map as a whole."""
    largest = max(series.open_shares)
    triples = enumerate(zip(series.update_norms, series.open_shares, strict=True), start=1)
    return {k: norm for k, (norm, share) in triples if norm is not None and share >= OPEN_SHARE * largest}


def noise_level(norms: Sequence[float], epsilon: float) -> float:
    """Update norms up to this one are rounding errors of a number format.

    Four times its spacing; or three times the smallest norm, where that is so small that it is itself rounding.
    """
    finite = [norm for norm in norms if math.isfinite(norm)]
    smallest = min(finite, default=0.0)
    return max(4 * epsilon, 3 * smallest if smallest < 16 * epsilon else 0.0)


def find_growth(norms: Dict[int, float], noise: float) -> Optional[Growth]:
    """The first update norm above the noise that exceeds GROWTH times the smallest one before it."""
    lowest: Optional[int] = None
    for k, norm in norms.items():
        if lowest is not None and norm > noise and not norm <= GROWTH * norms[lowest]:
            return Growth(lowest, norms[lowest], k, norm)
        if not math.isfinite(norm):
            return Growth(k, norm, k, norm)
        if lowest is None or norm < norms[lowest]:
            lowest = k
    return None


def fit_contraction(norms: Dict[int, float], epsilon: float) -> Contraction:
    """Least squares of log(norm) over the pass number, where norms fall and are above the noise.

    Args:
        norms: {pass: norm} of consecutive passes.
        epsilon: Relative spacing of the states' number format.
    """
    noise = noise_level(list(norms.values()), epsilon)
    rest = next((k for k, norm in norms.items() if norm <= noise), None)
    usable = [k for k, norm in norms.items() if math.isfinite(norm) and (rest is None or k < rest)]
    start = max(usable, key=lambda k: norms[k], default=0)
    points = [(k, math.log(norms[k])) for k in usable if k >= start]
    state = "unknown" if rest is None else "at rest"
    if find_growth(norms, noise) is not None:
        state = "growing"
    if len(points) < 3:
        return Contraction(state, None, None, None, None, noise, rest)
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points))
    xx = sum((x - mean_x) ** 2 for x, _ in points)
    xy = sum((x - mean_x) * (y - mean_y) for x, y in points)
    yy = sum((y - mean_y) ** 2 for _, y in points)
    r_squared = xy**2 / (xx * yy) if yy > 0 else 1.0
    rate = math.exp(xy / xx)
    if state == "unknown":
        state = "falling" if rate < STALLED else "stalled"
    return Contraction(state, rate, points[0][0], points[-1][0], r_squared, noise, rest)


def assess(series: PassSeries, trained_passes: int, margin: float) -> Dict[str, Any]:
    """The report: series, contraction, gap and verdict.

    Args:
        series: Of `trained_passes` passes or more.
        trained_passes: The depth that training and its validation look at.
        margin: The gap, in nats, up to which the fixed point is as good as the trained passes.
    """
    norms = judged_norms(series)
    contraction = fit_contraction(norms, series.epsilon)
    growth = find_growth(norms, contraction.noise)
    trained, last = series.losses[trained_passes - 1], series.losses[-1]
    report = {
        "passes": len(series.losses),
        "trained_passes": trained_passes,
        "positions": series.length,
        "scored_positions": series.scored,
        "loss": series.losses,
        "update_norm": series.update_norms,
        "state_rms": series.state_rms,
        "open_share": series.open_shares,
        "contraction": asdict(contraction),
        "loss_trained": trained,
        "loss_fixed_point": last,
        "best_pass": min(range(len(series.losses)), key=lambda k: _or_infinity(series.losses[k])) + 1,
        "gap": last - trained,
        "margin": margin,
        "alarm": _alarm(series, growth),
    }
    return {**report, "verdict": _verdict(report), "notes": _notes(report)}


def _or_infinity(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def _alarm(series: PassSeries, growth: Optional[Growth]) -> Optional[str]:
    bad = next((k for k, loss in enumerate(series.losses, start=1) if not math.isfinite(loss)), None)
    if bad is not None:
        return f"the loss of pass {bad} is not finite: the iteration diverges"
    if growth is not None:
        return (
            f"the update norm grows, from {growth.from_norm:.3g} in pass {growth.from_pass} to {growth.to_norm:.3g} in "
            f"pass {growth.to_pass}: the feedback map is no contraction; more batches with three passes or more help"
        )
    return None


def _verdict(report: Dict[str, Any]) -> str:
    gap, margin, trained = report["gap"], report["margin"], report["trained_passes"]
    if not math.isfinite(gap):
        return "BAD: there is no fixed point to speak of"
    where = (
        f"loss {report['loss_fixed_point']:.4f} after {report['passes']} passes, {report['loss_trained']:.4f} at the "
        f"trained depth of {trained}: gap {gap:+.4f} nats"
    )
    if gap > margin:
        return (
            f"BAD: {where}, above the margin of {margin:g}. The recurrence that decoding follows is worse than the "
            "losses of training say; train more batches with three passes or more"
        )
    state = report["contraction"]["state"]
    if state in ("growing", "stalled"):
        why = "grows" if state == "growing" else "hardly falls: the states change from pass to pass without end"
        return f"DOUBTFUL: {where}, within the margin of {margin:g}, but the update norm {why}"
    return f"GOOD: {where}, within the margin of {margin:g}. The recurrence keeps what the trained passes reach"


def _notes(report: Dict[str, Any]) -> List[str]:
    passes, positions, contraction = report["passes"], report["positions"], report["contraction"]
    found = []
    if passes >= positions:
        found.append(
            f"rows of {positions} positions are final after {positions} passes: from there on the loss is exactly that "
            "of the recurrence, and the update norm has nothing left to measure"
        )
    elif contraction["rest_pass"] is None:
        found.append(f"the map has not come to rest after {passes} passes: its loss may still change")
    if report["loss_fixed_point"] > report["loss"][0]:
        found.append(
            f"the plain pass ({report['loss'][0]:.4f}) is better than the last one: feedback costs quality so far"
        )
    if report["trained_passes"] == 1:
        found.append("the trained depth is one pass: a fusion layer that was never trained leads nowhere")
    found.append(
        "every position but the first of a row or document is fused, as in the regime recurrent; for soft's plain "
        "prompt see validation_loss_soft of the training run"
    )
    return found


def describe(report: Dict[str, Any]) -> str:
    """Table, contraction and verdict for a person."""
    lines = [f"{'pass':>6}  {'loss':>9}  {'update norm':>11}  {'state RMS':>9}  {'not final':>9}"]
    last = report["passes"]
    for k in sorted({*(k for k in TABLE_PASSES if k <= last), report["trained_passes"], last}):
        norm = report["update_norm"][k - 1]
        lines.append(
            f"{k:>6}  {report['loss'][k - 1]:>9.4f}  {'-' if norm is None else f'{norm:.2e}':>11}  "
            f"{report['state_rms'][k - 1]:>9.4f}  {report['open_share'][k - 1]:>9.0%}"
        )
    return "\n".join(
        [
            *lines,
            describe_contraction(report["contraction"]),
            *(f"note: {note}" for note in report["notes"]),
            report["verdict"],
        ]
    )


def describe_contraction(contraction: Dict[str, Any]) -> str:
    """One sentence about the fit."""
    if contraction["rate"] is None:
        return f"contraction: {contraction['state']}; too few update norms for a fit"
    rest = contraction["rest_pass"]
    reached = "the noise is not reached" if rest is None else f"noise ({contraction['noise']:.1e}) from pass {rest} on"
    return (
        f"contraction: {contraction['state']}; the update norm changes by a factor of {contraction['rate']:.3f} a pass "
        f"(log-linear fit over passes {contraction['first_pass']} to {contraction['last_pass']}, "
        f"R2 {contraction['r_squared']:.3f}; {reached})"
    )
