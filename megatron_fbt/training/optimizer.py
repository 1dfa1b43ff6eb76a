"""One optimizer step: reduce, measure, clip, update, with a single host synchronisation."""

import contextlib
import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Callable, Iterator, List, Optional

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from megatron_fbt.config.feedback import LossWeightsConfig
from megatron_fbt.config.optimizer import OptimizerConfig
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
from megatron_fbt.core.parallel import Layout
from megatron_fbt.core.schedule import PassTotals
from megatron_fbt.model.loss import pass_loss_weights


@dataclass(frozen=True)
class StepReport:
    """What one step did, the same on every rank."""

    loss_per_pass: List[float]
    """Mean NLL over the loss tokens of the global batch, of each pass, in nats."""
    grad_norm: float
    """Global norm of the gradient of the mean loss, before clipping."""
    loss_tokens: int
    """Tokens of the global batch that the loss counts."""
    skipped: bool
    """The loss or the gradient was not finite, or a spike: nothing was updated."""
    stop_requested: bool
    """Some rank was asked to stop."""
    z_loss: float = 0.0
    """What the z-loss adds to the objective."""
    spike: Optional[str] = None
    """Why the step was skipped although its numbers are finite."""
    busy: bool = False
    """Some rank was still writing its part of a checkpoint."""


def clip_factor(grad_norm: float, clip_grad: float) -> float:
    """Factor that brings a gradient of this norm down to clip_grad (0 = no clipping)."""
    return min(1.0, clip_grad / (grad_norm + 1e-6)) if clip_grad > 0 else 1.0


class Optimizer:
    """AdamW by Megatron-Core, plain or with its states sharded over data-parallel ranks, or Muon and AdamW.

    Gradients arrive as sums over loss tokens. The global token count, the sum of squares, the losses of the passes and
    the stop flag travel in one reduction; division and clipping are then one multiplication.

    Args:
        config: optimizer section.
        model: the stage in its gradient buffers.
        layout: this process's place.
    """

    def __init__(self, config: OptimizerConfig, model: DistributedDataParallel, layout: Layout):
        self.config, self.model, self.layout = config, model, layout
        self.megatron = build_megatron_optimizer(config, model)
        self.judge: Callable[[float, float], Optional[str]] = lambda loss, norm: None
        """Says from loss and gradient norm why a step is to be skipped, the same on all ranks; None = it is not."""
        self.updates = 0
        """Updates made so far: the optimizer's step count."""
        self.fusion_updates = 0
        """Updates of the fusion layer, which sleeps until the first multi-pass batch."""

    @property
    def param_groups(self) -> List[dict]:
        """Groups that a learning-rate schedule sets."""
        return self.megatron.param_groups

    def zero_grad(self) -> None:
        """Clear the gradient buffers."""
        self.model.zero_grad_buffer()
        self.megatron.zero_grad()
        disarm_reduction(self.model)

    @property
    def on_last_backward(self) -> Optional[Callable[[], None]]:
        """What run_passes must call when the last backward begins; None where gradients are reduced afterwards."""
        overlap = self.model.ddp_config.overlap_grad_reduce
        return functools.partial(arm_reduction, self.model) if overlap else None

    def step(self, totals: PassTotals, fusion_active: bool, stop_requested: bool, busy: bool = False) -> StepReport:
        """Finish one global batch.

        Args:
            totals: losses and loss tokens of this rank's micro-batches.
            fusion_active: False until the run's first multi-pass batch: fusion weights and their states stay as they
                are.
            stop_requested: whether this rank was asked to stop.
            busy: whether this rank is still writing its part of a checkpoint.
        """
        reduce_gradients(self.model)
        with cuda_type_names():
            self.megatron.prepare_grads()
        report = self._measure(totals, stop_requested, busy)
        spike = None if report.skipped else self.judge(report.loss_per_pass[0], report.grad_norm)
        if spike is not None:
            report = dataclasses.replace(report, skipped=True, spike=spike)
        if not report.skipped:
            factor = clip_factor(report.grad_norm, self.config.clip_grad) / max(report.loss_tokens, 1)
            gradients = main_gradients(self.megatron)
            if gradients:
                torch._foreach_mul_(gradients, factor)
            with torch.no_grad(), self._dormant_fusion(fusion_active):
                self.megatron.step_with_ready_grads()
            self.updates += 1
            self.fusion_updates += int(fusion_active)
        return report

    @torch.no_grad()
    def _measure(self, totals: PassTotals, stop_requested: bool, busy: bool) -> StepReport:
        layout = self.layout
        local = torch.zeros(5 + totals.nll.numel(), dtype=torch.float64, device=layout.device)
        counted = float(self.config.sharding == "megatron" or layout.data_rank == 0)
        for gradient, weight in zip(main_gradients(self.megatron), norm_weights(self.megatron)):
            squares = torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2
            local[0] += counted * weight * squares  # 0 * NaN is NaN: a bad copy is noticed on every rank
        if layout.is_last_stage and layout.tensor_rank == 0:
            local[1] = totals.tokens
            local[3] = totals.z_loss
            local[5:] = totals.nll
        local[2], local[4] = float(stop_requested), float(busy)
        dist.all_reduce(local)
        squares, tokens, stops, z_loss, writers, *sums = local.tolist()  # the step's one host synchronisation
        divisor = max(tokens, 1.0)
        losses, z_loss = [nll / divisor for nll in sums], z_loss / divisor
        norm = math.sqrt(squares) / divisor
        finite = math.isfinite(norm) and all(map(math.isfinite, [*losses, z_loss]))
        return StepReport(losses, norm, int(tokens) if finite else 0, not finite, stops > 0, z_loss, None, writers > 0)

    @contextlib.contextmanager
    def _dormant_fusion(self, active: bool) -> Iterator[None]:
        """While not active, keep the fusion group away from the inner optimizer: no update, decay or step count."""
        inner = self.megatron.optimizer
        groups = inner.param_groups
        if not active:
            inner.param_groups = [group for group in groups if not group.get(FUSION_GROUP)]
        try:
            yield
        finally:
            inner.param_groups = groups


def total_loss(loss_per_pass: List[float], loss_weights: LossWeightsConfig, extra_factor: float = 1.0) -> float:
    """The objective of a step from its per-pass losses (method section 3), without a z-loss."""
    weights = pass_loss_weights(loss_weights, len(loss_per_pass), extra_factor)
    return sum(weight * loss for weight, loss in zip(weights, loss_per_pass))
