"""When the state of a run is written."""

from dataclasses import dataclass
from typing import Optional


@dataclass
class CheckpointConfig:
    """Checkpoints go to <run.dir>/checkpoints; a run whose folder holds one resumes from it."""

    save_interval: Optional[int] = None
    """Steps between checkpoints; null = only at the end and when stopped."""
    keep_last: Optional[int] = None
    """Number of newest checkpoints kept; null = all."""
