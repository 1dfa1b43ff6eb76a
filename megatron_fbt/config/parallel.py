"""Layout of a run over processes."""

from dataclasses import dataclass
from typing import Optional


@dataclass
class ParallelConfig:
    """world size = tensor x pipeline x context x data parallel."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    sequence_parallel: bool = False
    """Split the sequence over the tensor-parallel ranks outside of attention and MLP."""
    world_size: Optional[int] = None
    """Processes of the whole run; null = the launcher's WORLD_SIZE. With it, --dry_run checks a cluster's layout."""
    overlap_grad_reduce: bool = False
    """Reduce gradients during the backward pass. Not available yet: refused."""
    collective_timeout_s: float = 600.0
    """Seconds after which a hanging collective ends the run."""
