"""Trade of memory for time."""

from dataclasses import dataclass
from typing import List, Literal

from megatron_fbt.config.rules import Rules, Section


@dataclass
class MemoryConfig(Section):
    """What is kept and what is freed during a step."""

    deallocate_pipeline_outputs: bool = True
    """Free a stage's output once it has been sent (pipeline parallel only)."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Computed again in the backward instead of kept. selective: attention. full: every layer, from its input."""
    recompute_passes: Literal["all", "early"] = "all"
    """Passes that recompute; early = all but a batch's last one, whose activations are used up first."""

    def problems(self) -> List[str]:
        """See Section."""
        return Rules("memory", self).problems
