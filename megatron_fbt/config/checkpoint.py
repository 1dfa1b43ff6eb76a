"""When the state of a run is written."""

from dataclasses import dataclass
from typing import List, Optional

from megatron_fbt.config.rules import Rules, Section


@dataclass
class CheckpointConfig(Section):
    """Checkpoints go to <run.dir>/checkpoints; a run whose folder holds one resumes from it."""

    save_interval: Optional[int] = None
    """Steps between checkpoints; null = only at the end and when stopped."""
    keep_last: Optional[int] = None
    """Number of newest checkpoints kept; null = all."""

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("checkpoint", self)
        rules.integers("save_interval", "keep_last")
        return rules.problems
