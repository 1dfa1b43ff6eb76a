"""Layout of a run over processes."""

from dataclasses import dataclass
from typing import List, Optional

from megatron_fbt.config.rules import Rules, Section


@dataclass
class ParallelConfig(Section):
    """world size = tensor x pipeline x context x data parallel."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    num_layers_in_first_pipeline_stage: Optional[int] = None
    """Layers of the first stage, which also embeds and fuses; null = as many as the others."""
    num_layers_in_last_pipeline_stage: Optional[int] = None
    """Layers of the last stage, which also holds the output head, run once in each pass; null = as the others."""
    virtual_pipeline_model_parallel_size: Optional[int] = None
    """Interleaved pipeline chunks on each stage. Refused: the passes of a batch take their place in the schedule."""
    context_parallel_size: int = 1
    sequence_parallel: bool = False
    """Split the sequence over the tensor-parallel ranks outside of attention and MLP."""
    world_size: Optional[int] = None
    """Processes of the whole run; null = the launcher's WORLD_SIZE. With it, --dry_run checks a cluster's layout."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over data-parallel ranks while the backward of the last micro-batch's first pass runs."""
    overlap_param_gather: bool = False
    """Gather updated weights during the next forward (optimizer.sharding megatron). Not available: refused."""
    collective_timeout_s: float = 600.0
    """Seconds after which a hanging collective ends the run; for phases slow by nature, the following ones."""
    data_timeout_s: float = 7200.0
    """Seconds that ranks wait for each other while data are read, and indices of their rows are built."""
    load_timeout_s: float = 3600.0
    """Seconds that ranks wait for each other while a checkpoint is loaded."""
    save_timeout_s: float = 3600.0
    """Seconds that ranks wait for each other while a checkpoint is written; in the background it may take longer."""

    @property
    def model_parallel_size(self) -> int:
        """Processes that hold one copy of the model between them."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("parallel", self)
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        rules.integers(*sizes, "world_size")
        rules.numbers("collective_timeout_s", "data_timeout_s", "load_timeout_s", "save_timeout_s", above=True)
        if rules.usable("context_parallel_size") and self.context_parallel_size > 1:
            rules.add("context_parallel_size", "context parallelism is not available in this version", "set it to 1")
        if rules.usable("sequence_parallel", sizes[0]) and self.sequence_parallel:
            why = f"needs tensor parallelism, but parallel.{sizes[0]} = {self.tensor_model_parallel_size}"
            remedy = f"set it to false, or parallel.{sizes[0]} to 2 or more"
            rules.require(self.tensor_model_parallel_size > 1, "sequence_parallel", why, remedy)
        if rules.usable("overlap_param_gather") and self.overlap_param_gather:
            why = "the K views of a stage read its weights without the module whose calls would wait for the gather"
            rules.add("overlap_param_gather", why, "set it to false")
        if self.virtual_pipeline_model_parallel_size is not None:
            why = "the schedule's virtual chunks are the passes of a batch, so a stage is one piece"
            remedy = "set it to null; with K passes the pipeline bubble is a K-th as large without chunks"
            rules.add("virtual_pipeline_model_parallel_size", why, remedy)
        rules.integers("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        return rules.problems
