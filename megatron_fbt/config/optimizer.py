"""AdamW and the learning-rate schedule."""

from dataclasses import dataclass
from typing import List, Literal

from megatron_fbt.config.rules import Rules, Section


@dataclass
class OptimizerConfig(Section):
    """AdamW, through Megatron-Core."""

    sharding: Literal["none", "megatron"] = "none"
    """megatron: optimizer states are split over data-parallel ranks by Megatron-Core's distributed optimizer."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["WSD", "cosine"] = "WSD"
    """WSD: warm-up, constant, decay over the last lr_decay_fraction. cosine: warm-up, cosine to the end."""
    lr_warmup_steps: int = 0
    """Linear warm-up, in steps of the full global batch."""
    lr_decay_fraction: float = 0.25
    """Share of the run over which WSD decays linearly to min_lr."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 = no clipping."""

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("optimizer", self)
        rules.numbers("lr", "adam_eps", above=True)
        rules.numbers("min_lr", "weight_decay", "clip_grad")
        rules.integers("lr_warmup_steps", low=0)
        rules.numbers("lr_decay_fraction", high=1.0)
        rules.numbers("adam_beta1", "adam_beta2", high=1.0, below=True)
        if rules.usable("lr", "min_lr"):
            why = f"above optimizer.lr = {self.lr!r}"
            rules.require(self.min_lr <= self.lr, "min_lr", why, "give at most the peak learning rate")
        return rules.problems
