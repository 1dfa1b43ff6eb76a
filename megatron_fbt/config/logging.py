"""What a run reports."""

from dataclasses import dataclass
from typing import List, Optional

from megatron_fbt.config.rules import Rules, Section


@dataclass
class LoggingConfig(Section):
    """Console, TensorBoard; metrics.jsonl always has every step."""

    log_interval: int = 1
    """Steps between console lines."""
    diagnostics_interval: Optional[int] = 100
    """Steps between measurements of states and gates (update norms, RMS, saturation); null = none."""
    straggler_interval: Optional[int] = None
    """Steps between looks for the slowest rank, by products that each rank times on its own; null = none."""
    straggler_factor: float = 1.3
    """A line warns of a rank whose products take so many times the median rank's."""
    tensorboard: bool = True
    """Write TensorBoard events to <run.dir>/tensorboard."""

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("logging", self)
        rules.integers("log_interval", "diagnostics_interval", "straggler_interval")
        rules.numbers("straggler_factor", low=1.0)
        return rules.problems
