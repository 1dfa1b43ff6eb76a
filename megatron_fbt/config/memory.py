"""Trade of memory for time."""

from dataclasses import dataclass
from typing import ClassVar, List, Literal, Optional

from megatron_fbt.config.rules import Rules, Section, show

LARGEST = 2.0**30
"""Of numbers of MiB and GiB: more than any process has, and a number of bytes that an integer can have."""


@dataclass(frozen=True)
class RecomputePolicy:
    """What a step computes again in its backward instead of keeping it; names and values as in MemoryConfig."""

    recompute: str = "none"
    recompute_passes: str = "all"

    def of_pass(self, last: bool) -> str:
        """none, selective or full for a pass of a batch; last = it is the batch's last one."""
        return "none" if last and self.recompute_passes == "early" else self.recompute

    def __str__(self) -> str:
        return self.recompute if self.recompute == "none" else f"{self.recompute}, {self.recompute_passes} passes"


@dataclass
class MemoryConfig(Section):
    """What is kept and what is freed during a step."""

    deallocate_pipeline_outputs: bool = True
    """Free a stage's output once it has been sent (pipeline parallel only)."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Computed again in the backward instead of kept. selective: attention. full: every layer, from its input."""
    recompute_passes: Literal["all", "early"] = "all"
    """Passes that recompute; early = all but a batch's last one, whose activations are used up first."""
    budget_gib: Optional[float] = None
    """Memory of each process in GiB, from which recompute and recompute_passes follow: those of the least computation
    whose estimate fits (--dry_run prints it). null = they are as given."""
    chosen: ClassVar[Optional[RecomputePolicy]] = None
    """What budget_gib has come to, on the instance; no field of a file."""

    chunked_loss: Optional[bool] = None
    """Whether the loss computes logits for one chunk of tokens at a time. null = where it costs no time: not with
    optimizer.sharding zero1, zero2 and zero3. true = with zero1 and zero2, too, where logits are computed twice."""
    loss_chunk_mib: float = 256.0
    """Size of a chunk's float32 logits on each process, in MiB; a chunk has one token at least."""

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("memory", self)
        rules.numbers("loss_chunk_mib", "budget_gib", above=True, high=LARGEST)
        for field, default in vars(RecomputePolicy()).items():
            if self.budget_gib is not None and rules.usable(field) and getattr(self, field) != default:
                why = f"memory.budget_gib = {show(self.budget_gib)} chooses it"
                rules.add(field, why, f"set it to {default}, or memory.budget_gib to null")
        return rules.problems

    @property
    def policy(self) -> RecomputePolicy:
        """What a step computes again; with a budget only after a plan's choice was set as `chosen`."""
        if self.budget_gib is None:
            return RecomputePolicy(self.recompute, self.recompute_passes)
        assert self.chosen is not None, "memory.budget_gib has not been resolved: make_plan chooses"
        return self.chosen

    def chunks_loss(self, sharding: str, fp8_head: bool) -> bool:
        """Whether the loss is chunked under values of optimizer.sharding and precision.fp8_head."""
        if fp8_head:  # one product of all tokens
            return False
        return not sharding.startswith("zero") if self.chunked_loss is None else self.chunked_loss
