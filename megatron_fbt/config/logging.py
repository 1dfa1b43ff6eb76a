"""What a run reports."""

from dataclasses import dataclass
from typing import List

from megatron_fbt.config.rules import Rules, Section


@dataclass
class LoggingConfig(Section):
    """Console, TensorBoard; metrics.jsonl always has every step."""

    log_interval: int = 1
    """Steps between console lines."""
    tensorboard: bool = True
    """Write TensorBoard events to <run.dir>/tensorboard."""

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("logging", self)
        rules.integers("log_interval")
        return rules.problems
