"""The training recipe of the feedback path (method of arXiv:2608.08888)."""

import itertools
import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Dict, List, Literal, Optional

from megatron_fbt.config.rules import Rules, Section

MAX_PASSES = 16


@dataclass
class PassPhase(Section):
    """From `from_fraction` of the run on, each global batch draws its pass count K with these probabilities."""

    from_fraction: float
    """Start of the phase as a fraction of the run's steps, 0 <= from_fraction < 1; the first phase starts at 0."""
    passes: Dict[int, float]
    """{K: probability}, 1 <= K <= 16; the probabilities add up to 1."""

    def problems(self, name: str = "feedback.schedule[]") -> List[str]:
        """See Section; `name` says which phase of the schedule this is."""
        rules = Rules(name, self)
        rules.numbers("from_fraction", high=1.0, below=True)
        if rules.usable("passes"):
            self._passes_rules(rules)
        return rules.problems

    def _passes_rules(self, rules: Rules) -> None:
        """A distribution over pass counts."""
        remedy = "give {K: probability} with probabilities that add up to 1, such as {1: 0.75, 2: 0.25}"
        if not self.passes:
            rules.add("passes", "empty", remedy)
            return
        total = sum(self.passes.values())
        if not all(1 <= count <= MAX_PASSES for count in self.passes):
            rules.add("passes", "a pass count is out of range", f"give pass counts from 1 to {MAX_PASSES}")
        elif not all(math.isfinite(share) and share > 0 for share in self.passes.values()):
            rules.add("passes", "a probability is not a number above 0", "leave out a pass count that is not wanted")
        elif abs(total - 1) > 1e-6:
            rules.add("passes", f"the probabilities add up to {total:.6g}", remedy)


@dataclass
class LossWeightsConfig(Section):
    """loss = first_pass * NLL_1 + extra_passes * sum_k p_k NLL_k / sum_k p_k over k = 2..K."""

    first_pass: float = 1.0
    """Weight of the plain pass."""
    extra_passes: float = 1.0
    """The method's lambda: total weight of passes 2..K."""
    per_pass: Optional[List[float]] = None
    """Relative weights p_2, p_3, ... of the extra passes, up to the schedule's maximum; null = equal."""

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("feedback.loss_weights", self)
        rules.numbers("first_pass", "extra_passes")
        if rules.usable("first_pass", "extra_passes"):
            some = self.first_pass > 0 or self.extra_passes > 0
            remedy = "set feedback.loss_weights.extra_passes or this to a number above 0"
            rules.require(some, "first_pass", "no pass has a weight in the loss", remedy)
        if self.per_pass is not None and rules.usable("per_pass"):
            good = all(math.isfinite(weight) and weight >= 0 for weight in self.per_pass)
            remedy = "give finite numbers of at least 0"
            rules.require(good, "per_pass", "a weight is negative or not a finite number", remedy)
        return rules.problems


@dataclass
class PrefixConfig(Section):
    """Prefix mix-in: in each extra pass the first 1 + floor(U L) positions stay plain, U uniform in [0, 1)."""

    enabled: bool = True
    granularity: Literal["row", "document"] = "row"
    """row: one cut for each row and pass; document: one for each packed document and pass."""

    def problems(self) -> List[str]:
        """See Section."""
        return Rules("feedback.prefix", self).problems


@dataclass
class JitterConfig(Section):
    """Uniform noise on the carried state, in training only."""

    scale: float = 0.02
    """Half-width of the uniform distribution, per element; 0 = off."""

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("feedback.jitter", self)
        rules.numbers("scale")
        return rules.problems


def default_schedule() -> List[PassPhase]:
    """One pass until 75 % of the steps, then 88 % two-pass and 12 % three-pass batches: 75/22/3 over the run."""
    return [PassPhase(0.0, {1: 1.0}), PassPhase(0.75, {2: 0.88, 3: 0.12})]


@dataclass
class FeedbackConfig(Section):
    """K-pass training and the fusion layer."""

    schedule: List[PassPhase] = field(default_factory=default_schedule)
    """Phases of the run with the distribution of the pass count in each."""
    loss_weights: LossWeightsConfig = field(default_factory=LossWeightsConfig)
    prefix: PrefixConfig = field(default_factory=PrefixConfig)
    jitter: JitterConfig = field(default_factory=JitterConfig)
    fusion: Literal["gate"] = "gate"
    """gate: u = N((W_U h) * sigmoid(W_G N(e))) * input_scale."""
    input_scale: float = 1.0
    """Scale s of a fused input: the RMS of a plain one (1 with input_norm rms)."""
    eval_passes: Optional[int] = None
    """Passes in validation; null = the schedule's maximum."""

    @property
    def max_passes(self) -> int:
        """Largest pass count that the schedule can draw."""
        return max(max(phase.passes) for phase in self.schedule)

    @property
    def validation_passes(self) -> int:
        """Pass count of a validation run."""
        return self.eval_passes or self.max_passes

    def phase_start_steps(self, train_steps: int) -> List[int]:
        """First step of each phase: ceil(from_fraction * train_steps), exact for the fraction as it is written."""
        return [math.ceil(Fraction(repr(float(phase.from_fraction))) * train_steps) for phase in self.schedule]

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("feedback", self)
        rules.numbers("input_scale", above=True)
        rules.integers("eval_passes", high=MAX_PASSES)
        nested = [self.loss_weights, self.prefix, self.jitter]
        found = [problem for section in nested for problem in section.problems()]
        if rules.usable("schedule"):
            phases = [phase.problems(f"feedback.schedule[{i}]") for i, phase in enumerate(self.schedule)]
            found += [problem for phase in phases for problem in phase]
            if not any(phases):
                self._schedule_rules(rules)
        if rules.usable("schedule", "loss_weights") and not found:
            found += self._weight_problems()
        return rules.problems + found

    def _schedule_rules(self, rules: Rules) -> None:
        """The phases cover the run from its first step on, each once."""
        starts = [phase.from_fraction for phase in self.schedule]
        if not starts:
            rules.add("schedule", "empty", "give at least [{from_fraction: 0, passes: {1: 1.0}}]")
        elif starts[0] != 0:
            rules.add("schedule", f"the first phase starts at {starts[0]}", "let it start with from_fraction: 0")
        elif any(a >= b for a, b in itertools.pairwise(starts)):
            rules.add("schedule", f"the phases start at {starts}", "sort them by from_fraction, each value once")

    def _weight_problems(self) -> List[str]:
        """Relative weights exist for every extra pass that can be drawn, and do not vanish together."""
        weights = self.loss_weights.per_pass
        rules = Rules("feedback.loss_weights", self.loss_weights)
        if self.loss_weights.first_pass == 0 and any(1 in phase.passes for phase in self.schedule):
            why = "the schedule has one-pass batches, which would train nothing"
            rules.add("first_pass", why, "give it a value above 0, or leave pass count 1 out of feedback.schedule")
        if weights is None:
            return rules.problems
        if len(weights) < self.max_passes - 1:
            why = f"{len(weights)} weights, but the schedule draws up to {self.max_passes} passes"
            rules.add("per_pass", why, f"give {self.max_passes - 1} weights, for passes 2 to {self.max_passes}")
            return rules.problems
        counts = sorted({count for phase in self.schedule for count in phase.passes if count > 1})
        empty = [count for count in counts if sum(weights[: count - 1]) == 0]
        if empty:
            why = f"the weights of passes 2 to {empty[0]} are all zero"
            rules.add("per_pass", why, f"give one of the first {empty[0] - 1} a value above 0")
        return rules.problems
