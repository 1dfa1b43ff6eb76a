"""What a run reports."""

from dataclasses import dataclass


@dataclass
class LoggingConfig:
    """Console, TensorBoard; metrics.jsonl always has every step."""

    log_interval: int = 1
    """Steps between console lines."""
    tensorboard: bool = True
    """Write TensorBoard events to <run.dir>/tensorboard."""
