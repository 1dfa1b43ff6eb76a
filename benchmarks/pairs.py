"""Paired timing: two things that alternate in one process, compared by the ratio of each pair.

Slow drifts of the machine (heat, other users) hit both halves of a pair alike, so the median of the pair ratios is
steady where means of separate runs are not. The ratio of a thing to itself, from the same run, shows what is noise.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Callable, Dict, List, Mapping, Sequence, Tuple


@dataclass(frozen=True)
class PairResult:
    """Ratios time(a) / time(b) of all pairs."""

    ratios: List[float]
    median: float
    quartiles: Tuple[float, float]
    """First and third quartile of the ratios."""
    seconds_a: float
    """Median duration of a."""
    seconds_b: float
    """Median duration of b."""

    @classmethod
    def from_durations(cls, a: Sequence[float], b: Sequence[float]) -> "PairResult":
        """Compare durations in seconds, a[i] with b[i].

        Raises:
            ValueError: fewer than two pairs, or unequal numbers.
        """
        if len(a) != len(b) or len(a) < 2:
            raise ValueError(f"{len(a)} and {len(b)} durations: at least two of each, and as many, are needed")
        ratios = [one / other for one, other in zip(a, b, strict=True)]
        first, _, third = statistics.quantiles(ratios, n=4, method="inclusive")
        return cls(ratios, statistics.median(ratios), (first, third), statistics.median(a), statistics.median(b))


def whole_number(text: str, low: int) -> int:
    """An option's value: a whole number of at least `low`.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    if not text.isascii() or not text.isdigit() or int(text) < low:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number of at least {low}")
    return int(text)


def number_of_pairs(text: str) -> int:
    """The same of at least two, which quartiles need."""
    return whole_number(text, low=2)


def measure(rounds: int, *things: Callable[[], object], warm_up: int = 1, own_clock: bool = False) -> List[List[float]]:
    """Run all things once in each round, in an order that rotates from round to round.

    Args:
        rounds: number of rounds that count.
        *things: what is timed.
        warm_up: rounds before them that do not count.
        own_clock: each thing returns the duration that counts, in seconds.

    Returns:
        Durations in seconds, one list for each thing.
    """
    durations: List[List[float]] = [[] for _ in things]
    for number in range(-warm_up, rounds):
        for place in range(len(things)):
            index = (place + number) % len(things)
            began = time.perf_counter()
            found = things[index]()
            elapsed = found if own_clock else time.perf_counter() - began
            if number >= 0:
                durations[index].append(elapsed)
    return durations


def alternate(a: Callable[[], object], b: Callable[[], object], pairs: int = 20, warm_up: int = 1) -> PairResult:
    """Time a against b in alternating order (ab, ba, ab, ...).

    Args:
        a: the numerator of the ratios.
        b: the denominator.
        pairs: number of pairs, at least 2.
        warm_up: pairs before them that do not count.
    """
    return PairResult.from_durations(*measure(pairs, a, b, warm_up=warm_up))


def alternate_with_noise(
    a: Callable[[], object], b: Callable[[], object], pairs: int = 20, warm_up: int = 1
) -> Tuple[PairResult, PairResult]:
    """Time a against b, and b against b in the same rounds.

    Returns:
        (a / b, b / b).
    """
    times_a, times_b, times_again = measure(pairs, a, b, b, warm_up=warm_up)
    return PairResult.from_durations(times_a, times_b), PairResult.from_durations(times_again, times_b)


def format_table(results: Mapping[str, PairResult]) -> str:
    """Table of named comparisons: median ratio, quartiles, median durations, number of pairs."""
    width = max(map(len, results), default=0)
    lines = [f"{'':<{width}}  {'ratio':>7}  {'quartiles':>15}  {'a [s]':>9}  {'b [s]':>9}  pairs"]
    for name, result in results.items():
        first, third = result.quartiles
        lines.append(
            f"{name:<{width}}  {result.median:7.3f}  {first:7.3f}-{third:7.3f}  "
            f"{result.seconds_a:9.4f}  {result.seconds_b:9.4f}  {len(result.ratios):5d}"
        )
    return "\n".join(lines)


def to_json(results: Mapping[str, PairResult]) -> str:
    """The same as one JSON object, with every ratio."""
    content: Dict[str, object] = {name: asdict(result) for name, result in results.items()}
    return json.dumps(content, indent=2)
