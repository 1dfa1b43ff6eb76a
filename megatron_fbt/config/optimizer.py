"""AdamW or Muon, how their states are sharded, and the learning-rate schedule."""

from dataclasses import dataclass
from typing import List, Literal, Optional

from megatron_fbt.config.rules import Rules, Section


@dataclass
class OptimizerConfig(Section):
    """AdamW through Megatron-Core, or Muon for the hidden matrices with AdamW for the rest."""

    type: Literal["adamw", "muon"] = "adamw"
    """muon: torch.optim.Muon steps the matrices of attention, MLP and fusion (query, key, value, gate and up each as
    one matrix); AdamW steps embedding, output head and norms. Needs whole matrices on every process."""
    sharding: Literal["none", "megatron", "zero1", "zero2", "zero3"] = "none"
    """What is split over data-parallel ranks. megatron: optimizer states, by Megatron-Core's distributed optimizer.
    zero1: the same, by DeepSpeed. zero2: gradients as well, zero3: parameters as well; both without pipeline stages."""
    offload: bool = False
    """With zero1, zero2 or zero3: keep optimizer states and master weights in the memory of the CPU."""
    deepspeed_config: Optional[str] = None
    """With zero1, zero2 or zero3: JSON file with more of DeepSpeed's settings, such as the sizes of its buckets. What
    contradicts a field of ours is refused."""
    lr: float = 3e-4
    """Peak learning rate; with muon, of what AdamW steps."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay; muon_lr ends in the same proportion to its peak."""
    lr_decay_style: Literal["WSD", "cosine"] = "WSD"
    """WSD: warm-up, constant, decay over the last lr_decay_fraction. cosine: warm-up, cosine to the end."""
    lr_warmup_steps: int = 0
    """Linear warm-up, in steps of the full global batch."""
    lr_decay_fraction: float = 0.25
    """Share of the run over which WSD decays linearly to min_lr."""
    weight_decay: float = 0.1
    """Decoupled weight decay of AdamW, on matrices only."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    muon_lr: float = 1e-2
    """Peak learning rate of the matrices that Muon steps; it follows the schedule of lr."""
    muon_momentum: float = 0.95
    """Nesterov momentum of Muon."""
    muon_ns_steps: int = 5
    """Newton-Schulz iterations that orthogonalise an update."""
    muon_adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"
    """How an update of an m x n matrix is scaled: sqrt(max(1, m / n)), or 0.2 sqrt(max(m, n)), which wants AdamW's
    learning rate and weight decay."""
    muon_weight_decay: float = 0.01
    """Decoupled weight decay of Muon; a step takes muon_lr times this off a weight."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 = no clipping."""

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("optimizer", self)
        rules.numbers("lr", "muon_lr", "adam_eps", above=True)
        rules.numbers("min_lr", "weight_decay", "muon_weight_decay", "clip_grad")
        rules.integers("lr_warmup_steps", low=0)
        rules.numbers("lr_decay_fraction", high=1.0)
        rules.numbers("adam_beta1", "adam_beta2", "muon_momentum", high=1.0, below=True)
        rules.integers("muon_ns_steps", high=99)
        if rules.usable("lr", "min_lr"):
            why = f"above optimizer.lr = {self.lr!r}"
            rules.require(self.min_lr <= self.lr, "min_lr", why, "give at most the peak learning rate")
        if self.type == "muon" and self.sharding != "none":
            why = "optimizer.type = 'muon' would orthogonalise the part of a matrix that a process holds instead of it"
            rules.add("sharding", why, "set it to none, or optimizer.type to adamw")
        if rules.usable("sharding", "offload", "deepspeed_config") and not self.sharding.startswith("zero"):
            why = f"optimizer.sharding = {self.sharding!r} is not DeepSpeed's"
            rules.require(not self.offload, "offload", why, "set it to false, or optimizer.sharding to zero1")
            unused = self.deepspeed_config is None
            rules.require(unused, "deepspeed_config", why, "set it to null, or optimizer.sharding to zero1")
        return rules.problems
