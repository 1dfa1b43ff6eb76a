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
    verify_on_load: bool = True
    """Compare the hashes of all files that are read, whole files; sizes are compared in any case."""
    init_from: Optional[str] = None
    """Checkpoint whose weights a new run starts from: a step_... folder, or a run folder for its newest one. Steps,
    optimizer and data begin anew. A run that has a checkpoint of its own resumes from that."""

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("checkpoint", self)
        rules.integers("save_interval", "keep_last")
        if rules.usable("init_from") and self.init_from is not None:
            rules.require(bool(self.init_from.strip()), "init_from", "empty", "name a folder, or set it to null")
        return rules.problems
