"""Which row of which source a sample is: a function of the configuration, the run's length and the sample's number.

The run is cut into the stages of data.stages. In each, every source has a number of rows that follows from its weight
(or budget), less than one from its exact share, and the sources take turns. A source's rows go on across stages where
they stopped. Needs neither torch nor the data.
"""

import bisect
from dataclasses import dataclass
from fractions import Fraction
from typing import List, Optional, Sequence, Tuple

from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.config.sources import SourceConfig, parse_split
from megatron_fbt.data.interleave import Interleaving, apportion
from megatron_fbt.errors import ConfigError
from megatron_fbt.training.batch_size import BatchSizeSchedule


@dataclass(frozen=True)
class Stage:
    """A stretch of samples with constant shares."""

    first_step: int
    """Steps are counted from 0."""
    first_sample: int
    end_sample: int
    order: Interleaving
    """Of the stage's rows; items are places in data.sources."""
    first_rows: Tuple[int, ...]
    """Rows of each source that earlier stages have taken."""


class Mixture:
    """The samples of a run.

    Args:
        names: of the sources.
        stages: in order, without gaps, from sample 0 on.

    Attributes:
        samples: of the run.
        rows: [sources] that the run takes from each.
    """

    def __init__(self, names: Sequence[str], stages: Sequence[Stage]):
        self.names, self.stages = list(names), list(stages)
        self.samples = self.stages[-1].end_sample
        self.rows = self.rows_before(self.samples)
        self._firsts = [stage.first_sample for stage in self.stages]

    def place(self, sample: int) -> Tuple[int, int]:
        """Place in data.sources of a sample's source, and the number of its row there.

        Args:
            sample: 0 to samples - 1.
        """
        if not 0 <= sample < self.samples:
            raise IndexError(f"sample {sample:,} is not one of {self.samples:,}")
        stage = self.stages[bisect.bisect_right(self._firsts, sample) - 1]
        source, number = stage.order.place(sample - stage.first_sample)
        return source, stage.first_rows[source] + number

    def rows_before(self, sample: int) -> List[int]:
        """Rows of each source among the first so many samples."""
        stage = [stage for stage in self.stages if stage.first_sample <= sample][-1]
        counts = stage.order.counts(min(sample, stage.end_sample) - stage.first_sample)
        return [first + count for first, count in zip(stage.first_rows, counts, strict=True)]


def make_mixture(config: PretrainConfig, train_samples: int, stage_samples: Sequence[int] = ()) -> Mixture:
    """The mixture of data.sources over a run.

    Args:
        config: sections data and training.
        train_samples: rows of the whole run.
        stage_samples: first samples of the stages that a resumed run has met, as it met them; those of the others
            follow from their first steps.

    Raises:
        ConfigError: budgets of tokens and the length of the run do not fit together.
    """
    bounds = _stage_bounds(config, train_samples, stage_samples)
    sources = config.data.sources
    quotas = _quotas(config, [(weights, end - first) for _, first, end, weights in bounds])
    taken = [0] * len(sources)
    stages = []
    for (first_step, first, end, _), quota in zip(bounds, quotas, strict=True):
        stages.append(Stage(first_step, first, end, Interleaving(quota), tuple(taken)))
        taken = [before + rows for before, rows in zip(taken, quota, strict=True)]
    return Mixture([source.name for source in sources], stages)


def first_samples(
    config: PretrainConfig, stage_samples: Sequence[int] = (), done: Tuple[int, int] = (0, 0)
) -> List[int]:
    """First sample of each stage of data.stages (or of the only one), whether the run reaches it or not.

    Args:
        config: sections data and training.
        stage_samples: of the first stages, where they are known otherwise.
        done: steps and samples of a run that goes on.
    """
    schedule = BatchSizeSchedule(config.training, data_parallel_size=1)
    steps = [stage.first_step for stage in config.data.stages] or [0]
    known = [0, *stage_samples[1:]]
    return [*known, *(schedule.samples_after(step, done) for step in steps[len(known) :])]


def mixture_problems(config: PretrainConfig, train_samples: int) -> List[str]:
    """What makes the mixture of a configuration impossible, without looking at the data."""
    if not config.data.sources:
        return []
    try:
        make_mixture(config, train_samples)
    except ConfigError as error:
        return [str(error)]
    return []


def trains(source: SourceConfig, split: str) -> bool:
    """Whether a source has a part for training."""
    return parse_split(source.split or split)[0] > 0


def _stage_bounds(config: PretrainConfig, train_samples: int, stage_samples: Sequence[int]):
    """(first step, first sample, end sample, weights by name or None) of the stages that the run reaches."""
    stages = [(stage.first_step, stage.weights) for stage in config.data.stages] or [(0, None)]
    firsts = first_samples(config, stage_samples)
    ends = [*firsts[1:], train_samples]
    return [
        (step, first, min(end, train_samples), weights)
        for (step, weights), first, end in zip(stages, firsts, ends, strict=True)
        if first < min(end, train_samples) or first == 0
    ]


def _quotas(config: PretrainConfig, stages: Sequence[Tuple[Optional[dict], int]]) -> List[List[int]]:
    """Rows of each source in each stage of so many samples."""
    own = sum(samples for weights, samples in stages if weights is None)
    budgets = any(source.tokens for source in config.data.sources)
    shares = _own_shares(config, own) if own or budgets else []
    names = [source.name for source in config.data.sources]
    return [
        apportion(samples, shares if weights is None else [weights.get(name, 0) for name in names])
        for weights, samples in stages
    ]


def _own_shares(config: PretrainConfig, samples: int) -> List[Fraction]:
    """Shares of the sources in the stages that have no weights of their own.

    Raises:
        ConfigError: the budgets come to more than these stages have, or to less and nothing fills the rest.
    """
    data, length = config.data, config.data.sequence_length
    budgets = [Fraction(source.tokens or 0) / length for source in data.sources]
    weights = [
        Fraction(source.weight) if source.weight is not None and trains(source, data.split) else Fraction(0)
        for source in data.sources
    ]
    budget, rest = sum(budgets), samples - sum(budgets)
    where = "stages without weights of their own have" if any(s.weights is not None for s in data.stages) else "run has"
    sums = f"budgets of {float(budget * length):,.0f} tokens in all, and the {where} {samples * length:,}"
    if rest < -config.training.global_batch_size:
        raise ConfigError(f"data.sources: {sums}; lower the budgets, or train longer")
    if not any(weights) and not budget:
        raise ConfigError("data.sources: no split leaves anything for training; give a first number above 0")
    if not any(weights):
        if rest > config.training.global_batch_size:
            raise ConfigError(
                f"data.sources: {sums}; raise the budgets, train for fewer tokens, or give a source a weight instead, "
                "which then fills the rest"
            )
        return budgets
    rest, whole = max(rest, Fraction(0)), sum(weights)
    return [tokens + rest * weight / whole for tokens, weight in zip(budgets, weights, strict=True)]
