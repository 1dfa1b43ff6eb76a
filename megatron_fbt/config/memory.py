"""Trade of memory for time."""

from dataclasses import dataclass
from typing import List, Literal, Optional

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

    chunked_loss: Optional[bool] = None
    """Whether the loss computes logits for one chunk of tokens at a time. null = where it costs no time: not with
    optimizer.sharding zero1, zero2 and zero3. true = with zero1 and zero2, too, where logits are computed twice."""
    loss_chunk_mib: float = 256.0
    """Size of a chunk's float32 logits on each process, in MiB; a chunk has one token at least."""

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("memory", self)
        rules.numbers("loss_chunk_mib", above=True)
        return rules.problems

    def chunks_loss(self, sharding: str) -> bool:
        """Whether the loss is chunked under a value of optimizer.sharding."""
        return not sharding.startswith("zero") if self.chunked_loss is None else self.chunked_loss
