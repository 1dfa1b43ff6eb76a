"""Length of a run and its batches."""

from dataclasses import dataclass, field
from typing import List, Optional

from megatron_fbt.config.rules import Rules, Section, step_at_fraction


@dataclass
class ZLossConfig(Section):
    """Adds coefficient * mean of (log sum exp of the logits)^2 to the loss of each pass, in a part of the run."""

    coefficient: float = 0.0
    """0 = no z-loss; the paper has 1e-5 in the cool-down."""
    from_fraction: float = 0.0
    """First step of the window, as a fraction of the run's steps."""
    to_fraction: float = 1.0
    """End of the window, as a fraction of the run's steps; the step there is outside."""

    def coefficient_at(self, step: int, train_steps: int) -> float:
        """The coefficient in a step (counted from 0); 0 outside the window."""
        begin, end = (step_at_fraction(share, train_steps) for share in (self.from_fraction, self.to_fraction))
        return self.coefficient if begin <= step < end else 0.0

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("training.z_loss", self)
        rules.numbers("coefficient")
        rules.numbers("from_fraction", high=1.0, below=True)
        rules.numbers("to_fraction", above=True, high=1.0)
        if rules.usable("from_fraction", "to_fraction"):
            why, remedy = f"not above from_fraction = {self.from_fraction:g}", "let the window end after it begins"
            rules.require(self.from_fraction < self.to_fraction, "to_fraction", why, remedy)
        return rules.problems


@dataclass
class SpikeConfig(Section):
    """Steps that stand out from the steps before are skipped as those with numbers that are not finite."""

    window: int = 128
    """Good steps whose median a step is compared with; nothing is skipped before there are as many."""
    loss_factor: Optional[float] = None
    """A loss of pass 1 above this many times the median is a spike; null = never."""
    grad_norm_factor: Optional[float] = None
    """A gradient norm above this many times the median is a spike; null = never."""

    @property
    def active(self) -> bool:
        """Whether anything is compared."""
        return self.loss_factor is not None or self.grad_norm_factor is not None

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("training.spikes", self)
        rules.integers("window")
        rules.numbers("loss_factor", "grad_norm_factor", low=1.0, above=True)
        return rules.problems


@dataclass
class TrainingConfig(Section):
    """Exactly one of train_steps, train_samples, train_tokens gives the length of the run."""

    train_steps: Optional[int] = None
    """Optimizer steps."""
    train_samples: Optional[int] = None
    """Rows of sequence_length tokens."""
    train_tokens: Optional[int] = None
    """Tokens, each counted once whatever the number of passes."""
    micro_batch_size: int = 1
    """Rows in one forward pass of one data-parallel rank."""
    global_batch_size: int = 8
    """Rows in one optimizer step, over all ranks."""
    rampup_batch_size: Optional[List[int]] = None
    """[start, increment, samples]: grow the global batch from start by increments over this many samples."""
    eval_interval: Optional[int] = None
    """Steps between validations; null = only at the end of the run."""
    eval_iters: int = 8
    """Global batches in one validation; 0 = no validation."""
    max_bad_steps: int = 10
    """Steps in a row with a non-finite loss or gradient, or a spike, after which the run ends."""
    max_rewinds: int = 0
    """How often a run whose last max_bad_steps steps were bad goes back to its last good checkpoint, and on without the
    data that it has read since; after that it ends. 0 = it ends at once."""
    spikes: SpikeConfig = field(default_factory=SpikeConfig)
    wall_clock_limit_s: Optional[float] = None
    """Seconds after its start at which the run saves and leaves with exit code 75, as on a signal; null = no limit."""
    z_loss: ZLossConfig = field(default_factory=ZLossConfig)

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("training", self)
        lengths = ("train_steps", "train_samples", "train_tokens")
        rules.integers(*lengths, "micro_batch_size", "global_batch_size", "eval_interval", "max_bad_steps")
        rules.integers("eval_iters", "max_rewinds", low=0)
        rules.numbers("wall_clock_limit_s", above=True)
        given = {name: getattr(self, name) for name in lengths if getattr(self, name) is not None}
        if len(given) != 1:
            found = ", ".join(f"{name} = {value!r}" for name, value in given.items()) or "none of them is given"
            rules.problems.append(
                "training.train_steps, training.train_samples, training.train_tokens: exactly one gives the length "
                f"of the run, but {found}; set one and leave the others null"
            )
        if rules.usable("micro_batch_size", "global_batch_size"):
            micro, batch = self.micro_batch_size, self.global_batch_size
            why = f"not a multiple of training.micro_batch_size = {micro}"
            rules.require(batch % micro == 0, "global_batch_size", why, f"give a multiple of {micro}")
        if self.rampup_batch_size is not None and rules.usable("rampup_batch_size", "global_batch_size"):
            self._rampup_rules(rules)
        sections = [getattr(self, name) for name in ("z_loss", "spikes") if rules.usable(name)]
        return rules.problems + [problem for section in sections for problem in section.problems()]

    def num_microbatches(self, data_parallel_size: int) -> int:
        """Micro-batches of each data-parallel rank in a step of global_batch_size rows."""
        return self.global_batch_size // (self.micro_batch_size * data_parallel_size)

    def _rampup_rules(self, rules: Rules) -> None:
        """[start, increment, samples] reaches global_batch_size exactly."""
        field, remedy = "rampup_batch_size", "give [start, increment, samples]"
        if len(self.rampup_batch_size) != 3:
            rules.add(field, f"has {len(self.rampup_batch_size)} entries instead of three", remedy)
            return
        start, increment, samples = self.rampup_batch_size
        if start < 1 or increment < 1 or samples < 1:
            rules.add(field, "every entry must be at least 1", remedy)
        elif start >= self.global_batch_size:
            why = f"starts at or above training.global_batch_size = {self.global_batch_size}"
            rules.add(field, why, "start lower, or set it to null")
        elif (self.global_batch_size - start) % increment:
            why = (
                f"global_batch_size - start = {self.global_batch_size - start} is not a multiple of the "
                f"increment {increment}"
            )
            rules.add(field, why, "change start or increment so that the steps end at training.global_batch_size")
