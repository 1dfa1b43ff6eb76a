"""The training recipe of the feedback path (method of arXiv:2608.08888)."""

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Dict, List, Literal, Optional, Union

from megatron_fbt.config.rules import Rules, Section, step_at_fraction

if TYPE_CHECKING:
    from megatron_fbt.config.pretrain import PretrainConfig

MAX_PASSES = 16

SchedulePreset = Literal["standard", "progressive", "two_phase_75_25", "full"]


@dataclass
class PassPhase(Section):
    """From `from_fraction` of the run on, each global batch draws its pass count K with these probabilities."""

    from_fraction: float
    """Start of the phase as a fraction of the run's steps, 0 <= from_fraction < 1; the first phase starts at 0. It
    becomes a step when a run first starts; resumes keep that step, whatever their length, until the phases change."""
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
    warmup_steps: int = 0
    """Steps, from the run's first multi-pass step on, over which extra_passes rises linearly; 0 = at once."""

    def extra_factor(self, step: int, switch_on_step: Optional[int]) -> float:
        """Factor of extra_passes in a step.

        Args:
            step: counted from 0.
            switch_on_step: the run's first step with several passes; None = it has not come.
        """
        if switch_on_step is None or self.warmup_steps == 0:
            return 1.0
        return min(1.0, (step - switch_on_step + 1) / self.warmup_steps)

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("feedback.loss_weights", self)
        rules.numbers("first_pass", "extra_passes")
        rules.integers("warmup_steps", low=0)
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
    """Prefix mix-in: in each extra pass the first 1 + floor((low + (high - low) U^exponent) T) positions stay plain.

    T is the length of the row (or document), U uniform in [0, 1).
    """

    probability: float = 1.0
    """Chance that a row (or document) has a mix-in in a pass; 0 = off: all but document starts are fused."""
    low: float = 0.0
    """Smallest plain share of the length."""
    high: float = 1.0
    """Largest plain share of the length."""
    exponent: float = 1.0
    """Shape of the distribution: 1 = uniform between low and high; larger ones make short plain prefixes likelier."""
    granularity: Literal["row", "document", "prompt"] = "row"
    """row: one cut for each row and pass; document: one for each packed document and pass; prompt: no draw, what the
    data mark is fused (the answers of conversations), so that the boundary is the end of the prompt."""

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("feedback.prefix", self)
        rules.numbers("probability", "low", "high", high=1.0)
        rules.numbers("exponent", above=True, high=1e6)
        if rules.usable("low", "high"):
            why = f"above feedback.prefix.high = {self.high:g}"
            rules.require(self.low <= self.high, "low", why, "give a share between 0 and feedback.prefix.high")
        return rules.problems


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


@dataclass
class SequentialEvalConfig(Section):
    """Validation under the recurrence that decoding follows, beside the parallel passes.

    The first half of each row (with conversations, all but the assistant's turns) is the prompt. SOFT: a plain prompt;
    FUSED(n): a prompt of n fused passes. The rest is iterated until it no longer changes: that is the recurrence.
    """

    passes: Optional[int] = None
    """Passes that stand for the recurrence; null = twice the schedule's maximum; 0 = off."""
    fused_passes: int = 1
    """n of FUSED(n); 0 = SOFT alone."""
    margin: float = 0.1
    """Warn when SOFT's loss is more than this above that of the trained number of passes, in nats."""

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("feedback.sequential_eval", self)
        rules.integers("passes", "fused_passes", low=0)
        rules.numbers("margin")
        return rules.problems


def preset_phases(name: SchedulePreset) -> List[PassPhase]:
    """Phases of a named schedule.

    Args:
        name: standard: one pass throughout. progressive: one pass until 75 % of the steps, then 88 % two-pass and 12 %
            three-pass batches (75/22/3 over the run). two_phase_75_25: one pass until 75 %, then three. full: three
            passes throughout.
    """
    one_pass = PassPhase(0.0, {1: 1.0})
    return {
        "standard": [one_pass],
        "progressive": [one_pass, PassPhase(0.75, {2: 0.88, 3: 0.12})],
        "two_phase_75_25": [one_pass, PassPhase(0.75, {3: 1.0})],
        "full": [PassPhase(0.0, {3: 1.0})],
    }[name]


@dataclass
class FeedbackConfig(Section):
    """K-pass training and the fusion layer."""

    schedule: Union[SchedulePreset, List[PassPhase]] = "progressive"
    """Distribution of the pass count over the run: a list of phases, or standard (K = 1), progressive (K = 1 until 75 %
    of the steps, then 88 % K = 2 and 12 % K = 3), two_phase_75_25 (K = 1 until 75 %, then K = 3) or full (K = 3)."""
    loss_weights: LossWeightsConfig = field(default_factory=LossWeightsConfig)
    prefix: PrefixConfig = field(default_factory=PrefixConfig)
    prefix_reuse: Optional[bool] = None
    """Whether extra passes compute only what follows the plain prefix of their rows, with pass 1's keys, values and
    losses for the prefix: the same losses and gradients for less work. null = where that is so: with the torch backend,
    without dropout and FP8, with optimizer.sharding none or megatron. true = with Transformer Engine, too."""
    jitter: JitterConfig = field(default_factory=JitterConfig)
    fusion: Literal["gate", "concat", "add"] = "gate"
    """u = N(f) * input_scale; f is (W_U h) * sigmoid(W_G N(e)), W_C [N(h); N(e)], or W_U h + W_T N(e)."""
    input_scale: Optional[float] = None
    """Scale s of a fused input, the RMS of a plain one; null = 1 with model.input_norm rms, else the RMS of a new
    embedding table, model.init_method_std."""
    eval_passes: Optional[int] = None
    """Passes in validation; null = the schedule's maximum."""
    sequential_eval: SequentialEvalConfig = field(default_factory=SequentialEvalConfig)

    @property
    def phases(self) -> List[PassPhase]:
        """The schedule as a list of phases."""
        return preset_phases(self.schedule) if isinstance(self.schedule, str) else self.schedule

    @property
    def max_passes(self) -> int:
        """Largest pass count that the schedule can draw."""
        return max(max(phase.passes) for phase in self.phases)

    @property
    def validation_passes(self) -> int:
        """Pass count of a validation run."""
        return self.eval_passes or self.max_passes

    @property
    def sequential_passes(self) -> int:
        """Passes that stand for the recurrence in validation; 0 = no sequential validation."""
        wanted = self.sequential_eval.passes
        if self.max_passes == 1:
            return 0
        return 2 * self.max_passes if wanted is None else wanted

    def phase_start_steps(self, train_steps: int) -> List[int]:
        """First step of each phase in a new run of this length."""
        return [step_at_fraction(phase.from_fraction, train_steps) for phase in self.phases]

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("feedback", self)
        rules.numbers("input_scale", above=True)
        rules.integers("eval_passes", high=MAX_PASSES)
        nested = [self.loss_weights, self.prefix, self.jitter, self.sequential_eval]
        found = [problem for section in nested for problem in section.problems()]
        if rules.usable("schedule"):
            phases = [phase.problems(f"feedback.schedule[{i}]") for i, phase in enumerate(self.phases)]
            found += [problem for phase in phases for problem in phase]
            if not any(phases):
                self._schedule_rules(rules)
        if rules.usable("schedule") and not found:
            self._sequential_rules(rules)
        if rules.usable("schedule", "loss_weights") and not found:
            found += self._weight_problems()
        return rules.problems + found

    def _schedule_rules(self, rules: Rules) -> None:
        """The phases cover the run from its first step on, each once."""
        starts = [phase.from_fraction for phase in self.phases]
        if not starts:
            rules.add("schedule", "empty", "give at least [{from_fraction: 0, passes: {1: 1.0}}]")
        elif starts[0] != 0:
            rules.add("schedule", f"the first phase starts at {starts[0]}", "let it start with from_fraction: 0")
        elif any(a >= b for a, b in itertools.pairwise(starts)):
            rules.add("schedule", f"the phases start at {starts}", "sort them by from_fraction, each value once")

    def _sequential_rules(self, rules: Rules) -> None:
        """More passes than were trained stand for the recurrence, and some of them are left for what is generated."""
        passes, prompt = self.sequential_passes, self.sequential_eval.fused_passes
        if 0 < passes <= self.max_passes:
            rules.problems.append(
                f"feedback.sequential_eval.passes = {passes}: no more than the {self.max_passes} passes that are "
                f"trained; give at least {self.max_passes + 1}, or 0 for no sequential validation"
            )
        elif 0 < passes < prompt + 2:
            rules.problems.append(
                f"feedback.sequential_eval.fused_passes = {prompt}: leaves none of feedback.sequential_eval.passes = "
                f"{passes} to iterate what is generated; give at most {passes - 2}"
            )

    def _weight_problems(self) -> List[str]:
        """Relative weights exist for every extra pass that can be drawn, and do not vanish together."""
        weights = self.loss_weights.per_pass
        rules = Rules("feedback.loss_weights", self.loss_weights)
        if self.loss_weights.first_pass == 0 and any(1 in phase.passes for phase in self.phases):
            why = "the schedule has one-pass batches, which would train nothing"
            rules.add("first_pass", why, "give it a value above 0, or leave pass count 1 out of feedback.schedule")
        if weights is None:
            return rules.problems
        if len(weights) < self.max_passes - 1:
            why = f"{len(weights)} weights, but the schedule draws up to {self.max_passes} passes"
            rules.add("per_pass", why, f"give {self.max_passes - 1} weights, for passes 2 to {self.max_passes}")
            return rules.problems
        counts = sorted({count for phase in self.phases for count in phase.passes if count > 1})
        empty = [count for count in counts if sum(weights[: count - 1]) == 0]
        if empty:
            why = f"the weights of passes 2 to {empty[0]} are all zero"
            rules.add("per_pass", why, f"give one of the first {empty[0] - 1} a value above 0")
        return rules.problems


def resolved_input_scale(config: "PretrainConfig") -> float:
    """Scale s of fused inputs: feedback.input_scale, or the RMS of plain inputs of a new model."""
    if config.feedback.input_scale is not None:
        return config.feedback.input_scale
    return 1.0 if config.model.input_norm == "rms" else config.model.init_method_std
