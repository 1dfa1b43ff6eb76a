"""AdamW whose states, and with zero2 and zero3 gradients and weights too, DeepSpeed shards."""

import math
from typing import Any, ContextManager, Dict, List, Optional

import torch

from megatron_fbt.config.optimizer import OptimizerConfig
from megatron_fbt.core import zero_state
from megatron_fbt.core.optimizer_state import OwnedState
from megatron_fbt.core.parallel import Layout
from megatron_fbt.core.schedule import PassTotals
from megatron_fbt.core.stage import FBTStage
from megatron_fbt.core.zero import ZeroEngine
from megatron_fbt.training.optimizer import BatchSums, HeldBytes, Optimizer, StepReport, clip_factor, moment_bytes


class ZeroOptimizer(Optimizer):
    """Over DeepSpeed's engine, which is asked to step in any case: that is what drops the gradients.

    Args:
        config: optimizer section.
        settings: DeepSpeed's configuration.
        stage: the model.
        layout: this process's place.
    """

    def __init__(self, config: OptimizerConfig, settings: Dict[str, Any], stage: FBTStage, layout: Layout):
        super().__init__(config, layout)
        self.engine = ZeroEngine(config, settings, stage)

    @property
    def param_groups(self) -> List[dict]:
        """See Optimizer."""
        return self.engine.adamw.param_groups

    def zero_grad(self) -> None:
        """There are none: each step drops them."""

    def through(self, chunk: torch.nn.Module) -> torch.nn.Module:
        """The engine runs the passes, so that it sees the backward and gathers what zero3 has sharded."""
        return self.engine.through(chunk)

    def step(self, totals: PassTotals, fusion_active: bool, stop_requested: bool, busy: bool = False) -> StepReport:
        """See Optimizer."""
        sums = self._sum_over_ranks(totals, stop_requested, busy, torch.zeros(()))
        self.engine.adamw.fusion_active = fusion_active
        decision = _Decision(self, sums)
        finite = self.engine.step(decision, one_pass=totals.nll.numel() == 1)
        report = decision.report if finite and decision.report is not None else sums.report(math.inf)
        self._count(report, fusion_active)
        return report

    def held_bytes(self) -> HeldBytes:
        """See Optimizer."""
        params = list(self.engine.stage.parameters())
        flats = {shard.flat for shard in (zero_state.shard_of(self.engine, param) for param in params) if shard}
        weights = [param.ds_tensor if hasattr(param, "ds_id") else param for param in params]
        return HeldBytes(
            sum(weight.nbytes for weight in weights),
            sum(flat.nbytes for flat in flats),
            moment_bytes(self.engine.adamw.state),
        )

    @property
    def is_sharded(self) -> bool:
        """See Optimizer."""
        return True

    def owned_weight(self, param: torch.nn.Parameter) -> Optional[OwnedState]:
        """See Optimizer."""
        return zero_state.owned_weight(param) if self.config.sharding == "zero3" else None

    def whole_shapes(self) -> ContextManager[None]:
        """See Optimizer."""
        return zero_state.whole_shapes(self.engine.stage)

    def before_loading(self) -> None:
        """Let go of weights that zero3 has gathered, so that they are gathered again."""
        self.engine.release_weights()

    def owned_state(self, param: torch.nn.Parameter) -> OwnedState:
        """See Optimizer."""
        return zero_state.owned_state(self.engine, param)

    def make_state(self, param: torch.nn.Parameter, updates: int) -> OwnedState:
        """See Optimizer."""
        return zero_state.make_state(self.engine, param, updates)


class _Decision:
    """What to do with the gradients of a step, made when DeepSpeed knows their norm and asks for the first shard."""

    def __init__(self, optimizer: ZeroOptimizer, sums: BatchSums):
        self.optimizer, self.sums = optimizer, sums
        self.report: Optional[StepReport] = None

    def __call__(self) -> Optional[float]:
        """Factor for all gradients, which DeepSpeed has averaged over data-parallel ranks; None = no update."""
        optimizer, copies = self.optimizer, self.optimizer.layout.data_size
        if self.report is None:
            self.report = optimizer._judged(self.sums.report(optimizer.engine.averaged_norm * copies))
        if self.report.skipped:
            return None
        return clip_factor(self.report.grad_norm, optimizer.config.clip_grad) * copies / self.sums.divisor
