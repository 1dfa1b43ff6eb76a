"""Trade of memory for time."""

from dataclasses import dataclass
from typing import List

from megatron_fbt.config.rules import Rules, Section


@dataclass
class MemoryConfig(Section):
    """What is kept and what is freed during a step."""

    deallocate_pipeline_outputs: bool = True
    """Free a stage's output once it has been sent (pipeline parallel only)."""

    def problems(self) -> List[str]:
        """See Section."""
        return Rules("memory", self).problems
