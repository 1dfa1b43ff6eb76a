"""AdamW or Muon by Megatron-Core: one step of reduce, measure, clip, update, with a single host synchronisation."""

import contextlib
import dataclasses
import functools
import math
from typing import Callable, Iterator, List, Optional

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.fp8_utils import is_float8tensor

from megatron_fbt.config.optimizer import OptimizerConfig
from megatron_fbt.core import optimizer_state
from megatron_fbt.core.cpu import cuda_type_names
from megatron_fbt.core.grad_sync import (
    FUSION_GROUP,
    arm_reduction,
    build_megatron_optimizer,
    disarm_reduction,
    main_gradients,
    norm_weights,
    reduce_gradients,
)
from megatron_fbt.core.optimizer_state import OwnedState
from megatron_fbt.core.parallel import Layout
from megatron_fbt.core.schedule import PassTotals
from megatron_fbt.training.loss_scaler import LossScaler
from megatron_fbt.training.optimizer import HeldBytes, Optimizer, StepReport, clip_factor, moment_bytes


class BufferOptimizer(Optimizer):
    """Over Megatron-Core's gradient buffers: plain, or with its states sharded over data-parallel ranks.

    Args:
        config: optimizer section.
        model: the stage in its gradient buffers.
        layout: this process's place.
        scaler: of fp16 gradients.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        model: DistributedDataParallel,
        layout: Layout,
        scaler: Optional[LossScaler] = None,
    ):
        super().__init__(config, layout)
        self.model, self.scaler = model, scaler
        self.megatron = build_megatron_optimizer(config, model)

    @property
    def param_groups(self) -> List[dict]:
        """See Optimizer."""
        return self.megatron.param_groups

    def zero_grad(self) -> None:
        """Clear the gradient buffers."""
        self.model.zero_grad_buffer()
        self.megatron.zero_grad()
        disarm_reduction(self.model)

    @property
    def on_last_backward(self) -> Optional[Callable[[], None]]:
        """Begins to reduce gradients as they arrive, with parallel.overlap_grad_reduce."""
        overlap = self.model.ddp_config.overlap_grad_reduce
        return functools.partial(arm_reduction, self.model) if overlap else None

    def step(self, totals: PassTotals, fusion_active: bool, stop_requested: bool, busy: bool = False) -> StepReport:
        """See Optimizer."""
        reduce_gradients(self.model)
        with cuda_type_names():
            self.megatron.prepare_grads()
        sums = self._sum_over_ranks(totals, stop_requested, busy, self._squares())
        report = self._judged(self._scaled(sums.report(math.sqrt(sums.squares) / self.loss_scale)))
        if not report.skipped:
            factor = clip_factor(report.grad_norm, self.config.clip_grad) / (sums.divisor * self.loss_scale)
            gradients = main_gradients(self.megatron)
            if gradients:
                torch._foreach_mul_(gradients, factor)
            with torch.no_grad(), self._stepping(lambda group: fusion_active or not group.get(FUSION_GROUP)):
                self.megatron.step_with_ready_grads()
        self._count(report, fusion_active)
        if self.scaler is not None and report.finite_loss:
            self.scaler.update(overflow=not math.isfinite(report.grad_norm))
        return report

    def _scaled(self, report: StepReport) -> StepReport:
        """The report, which says whether a smaller loss scale could help."""
        overflow = self.scaler is not None and self.scaler.may_fall and report.skipped and report.finite_loss
        return dataclasses.replace(report, overflow=overflow)

    @torch.no_grad()
    def _squares(self) -> torch.Tensor:
        """Sum of squares of the gradients that this rank counts."""
        total = torch.zeros((), dtype=torch.float64, device=self.layout.device)
        counted = float(self.config.sharding == "megatron" or self.layout.data_rank == 0)
        for gradient, weight in zip(main_gradients(self.megatron), norm_weights(self.megatron)):
            squares = torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2
            total += counted * weight * squares  # 0 * NaN is NaN: a bad copy is noticed on every rank
        return total

    @contextlib.contextmanager
    def _stepping(self, chosen: Callable[[dict], bool]) -> Iterator[None]:
        """Keep parameter groups that are not chosen away from the inner optimizer: no update, decay or step count."""
        inner = self.megatron.optimizer
        groups = inner.param_groups
        inner.param_groups = [group for group in groups if chosen(group)]
        try:
            yield
        finally:
            inner.param_groups = groups

    def owned_weight(self, param: torch.nn.Parameter) -> Optional[OwnedState]:
        """See Optimizer."""
        return optimizer_state.owned_weight(self.megatron, param)

    def after_loading(self) -> None:
        """Round weights that are kept in 8 bits from their masters, by a step that changes nothing else."""
        if self.model.ddp_config.fp8_param_gather:
            with self._stepping(lambda group: False):
                self.megatron.step_with_ready_grads()

    def held_bytes(self) -> HeldBytes:
        """See Optimizer."""
        weights = list(self.model.module.parameters())
        whole = [param for param in weights if not is_float8tensor(param)]
        storages = {param.untyped_storage().data_ptr() for param in whole}
        masters = [p for p in self.megatron.get_parameters() if p.untyped_storage().data_ptr() not in storages]
        return HeldBytes(
            sum(param.numel() if is_float8tensor(param) else param.nbytes for param in weights),
            sum(param.nbytes for param in masters),
            moment_bytes(self.megatron.optimizer.state),
        )

    @property
    def is_sharded(self) -> bool:
        """See Optimizer."""
        return optimizer_state.is_sharded(self.megatron)

    def owned_state(self, param: torch.nn.Parameter) -> OwnedState:
        """See Optimizer."""
        return optimizer_state.owned_state(self.megatron, param)

    def make_state(self, param: torch.nn.Parameter, updates: int) -> OwnedState:
        """See Optimizer."""
        return optimizer_state.make_state(self.megatron, param, updates)

    def set_group_steps(self, updates: List[int]) -> None:
        """See Optimizer."""
        optimizer_state.set_group_steps(self.megatron, updates)
