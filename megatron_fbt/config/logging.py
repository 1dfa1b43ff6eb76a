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
    tensorboard: bool = True
    """Write TensorBoard events to <run.dir>/tensorboard."""

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("logging", self)
        rules.integers("log_interval", "diagnostics_interval")
        return rules.problems
