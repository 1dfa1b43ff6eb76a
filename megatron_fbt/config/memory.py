"""Trade of memory for time."""

from dataclasses import dataclass


@dataclass
class MemoryConfig:
    """What is kept and what is freed during a step."""

    deallocate_pipeline_outputs: bool = True
    """Free a stage's output once it has been sent (pipeline parallel only)."""
