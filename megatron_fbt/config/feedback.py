"""The training recipe of the feedback path (method of arXiv:2608.08888)."""

from dataclasses import dataclass, field
from typing import Dict, List, Literal, Optional


@dataclass
class PassPhase:
    """From `from_fraction` of the run on, each global batch draws its pass count K with these probabilities."""

    from_fraction: float
    """Start of the phase as a fraction of the run's steps, 0 <= from_fraction < 1; the first phase starts at 0."""
    passes: Dict[int, float]
    """{K: probability}; the probabilities add up to 1."""


@dataclass
class LossWeightsConfig:
    """loss = first_pass * NLL_1 + extra_passes * sum_k p_k NLL_k / sum_k p_k over k = 2..K."""

    first_pass: float = 1.0
    """Weight of the plain pass."""
    extra_passes: float = 1.0
    """The method's lambda: total weight of passes 2..K."""
    per_pass: Optional[List[float]] = None
    """Relative weights p_2, p_3, ... of the extra passes; null = equal."""


@dataclass
class PrefixConfig:
    """Prefix mix-in: in each extra pass the first 1 + floor(U L) positions stay plain, U uniform in [0, 1)."""

    enabled: bool = True
    granularity: Literal["row", "document"] = "row"
    """row: one cut for each row and pass; document: one for each packed document and pass."""


@dataclass
class JitterConfig:
    """Uniform noise on the carried state, in training only."""

    scale: float = 0.02
    """Half-width of the uniform distribution, per element; 0 = off."""


def default_schedule() -> List[PassPhase]:
    """One pass until 75 % of the steps, then 88 % two-pass and 12 % three-pass batches: 75/22/3 over the run."""
    return [PassPhase(0.0, {1: 1.0}), PassPhase(0.75, {2: 0.88, 3: 0.12})]


@dataclass
class FeedbackConfig:
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
