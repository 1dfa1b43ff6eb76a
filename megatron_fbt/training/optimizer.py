"""What the trainer asks of an optimizer, whatever shards its states: one step, and its part of a checkpoint."""

import contextlib
import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Callable, ContextManager, Dict, List, Mapping, Optional

import torch
import torch.distributed as dist

from megatron_fbt.config.feedback import LossWeightsConfig
from megatron_fbt.config.optimizer import OptimizerConfig
from megatron_fbt.core.optimizer_state import OwnedState
from megatron_fbt.core.parallel import Layout
from megatron_fbt.core.schedule import PassTotals
from megatron_fbt.model.loss import pass_loss_weights
from megatron_fbt.training.loss_scaler import LossScaler


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
    overflow: bool = False
    """The loss was finite and the scaled gradient was not: the next step has a smaller loss scale, or is about to."""
    busy: bool = False
    """Some rank was still writing its part of a checkpoint."""

    @property
    def finite_loss(self) -> bool:
        """Whether the losses are finite, whatever the gradient is."""
        return all(map(math.isfinite, [*self.loss_per_pass, self.z_loss]))


@dataclass(frozen=True)
class BatchSums:
    """Sums of one global batch over all ranks."""

    squares: float
    """Of the gradients, where the caller gave them."""
    tokens: float
    stops: float
    z_loss: float
    writers: float
    nll: List[float]

    @property
    def divisor(self) -> float:
        """What sums are divided by to be means over loss tokens."""
        return max(self.tokens, 1.0)

    def report(self, norm: float) -> StepReport:
        """The step's report.

        Args:
            norm: of the gradient of the summed loss.
        """
        losses, z_loss, norm = [nll / self.divisor for nll in self.nll], self.z_loss / self.divisor, norm / self.divisor
        finite = math.isfinite(norm) and all(map(math.isfinite, [*losses, z_loss]))
        tokens = int(self.tokens) if finite else 0
        return StepReport(losses, norm, tokens, not finite, self.stops > 0, z_loss, busy=self.writers > 0)


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of tensors on one rank."""

    weights: int
    master_weights: int
    moments: int


def clip_factor(grad_norm: float, clip_grad: float) -> float:
    """Factor that brings a gradient of this norm down to clip_grad (0 = no clipping)."""
    return min(1.0, clip_grad / (grad_norm + 1e-6)) if clip_grad > 0 else 1.0


class Optimizer(ABC):
    """Gradients arrive as sums over loss tokens; division and clipping are one multiplication.

    Args:
        config: optimizer section.
        layout: this process's place.
    """

    def __init__(self, config: OptimizerConfig, layout: Layout):
        self.config, self.layout = config, layout
        self.judge: Callable[[float, float], Optional[str]] = lambda loss, norm: None
        """Says from loss and gradient norm why a step is to be skipped, the same on all ranks; None = it is not."""
        self.updates = 0
        """Updates made so far: the optimizer's step count."""
        self.fusion_updates = 0
        """Updates of the fusion layer, which sleeps until the first multi-pass batch."""

    scaler: Optional[LossScaler] = None
    """Of fp16 gradients."""

    @property
    def loss_scale(self) -> float:
        """Factor that the loss of the next step must have."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    @abstractmethod
    def param_groups(self) -> List[dict]:
        """Groups that a learning-rate schedule sets."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Forget the gradients, before the first backward of a step."""

    @property
    def on_last_backward(self) -> Optional[Callable[[], None]]:
        """What run_passes must call when the last backward begins; None = nothing."""
        return None

    def through(self, chunk: torch.nn.Module) -> torch.nn.Module:
        """What a schedule of Megatron-Core must call instead of a chunk of passes; see run_passes."""
        return chunk

    @abstractmethod
    def step(self, totals: PassTotals, fusion_active: bool, stop_requested: bool, busy: bool = False) -> StepReport:
        """Finish one global batch.

        Args:
            totals: losses and loss tokens of this rank's micro-batches.
            fusion_active: False until the run's first multi-pass batch: fusion weights and their states stay as they
                are.
            stop_requested: whether this rank was asked to stop.
            busy: whether this rank is still writing its part of a checkpoint.
        """

    @property
    @abstractmethod
    def is_sharded(self) -> bool:
        """Whether data-parallel ranks hold different parts of the states."""

    def owned_weight(self, param: torch.nn.Parameter) -> Optional[OwnedState]:
        """This rank's part of a weight under the kind ""; None where all data-parallel ranks hold all of it."""
        return None

    def whole_shapes(self) -> ContextManager[None]:
        """Within it, weights have their shapes whatever part of them this rank holds; their elements may be missing."""
        return contextlib.nullcontext()

    def before_loading(self) -> None:  # noqa: B027
        """Called when the weights are about to be replaced."""

    def after_loading(self) -> None:  # noqa: B027
        """Called on all ranks when the weights have been replaced; collective."""

    @abstractmethod
    def owned_state(self, param: torch.nn.Parameter) -> OwnedState:
        """What this rank has of a parameter's state; moments of a parameter that was never stepped are zeros."""

    @abstractmethod
    def make_state(self, param: torch.nn.Parameter, updates: int) -> OwnedState:
        """Give this rank's part of a parameter a state to be filled.

        Args:
            param: the model's parameter.
            updates: step count of this parameter; 0 leaves it without moments, as a parameter never stepped.

        Returns:
            What is to be filled, by kind.
        """

    def set_group_steps(self, updates: List[int]) -> None:  # noqa: B027
        """Tell optimizers that count steps by parameter group each group's count."""

    @abstractmethod
    def held_bytes(self) -> HeldBytes:
        """What this rank holds of weights and states; those of parameters that were never stepped do not exist yet."""

    def _sum_over_ranks(self, totals: PassTotals, stop_requested: bool, busy: bool, squares: torch.Tensor) -> BatchSums:
        """Token count, losses, flags and the sum of squares of the gradients in one reduction."""
        layout = self.layout
        local = torch.zeros(5 + totals.nll.numel(), dtype=torch.float64, device=layout.device)
        local[0] = squares
        if layout.is_last_stage and layout.tensor_rank == 0:
            local[1] = totals.tokens
            local[3] = totals.z_loss
            local[5:] = totals.nll
        local[2], local[4] = float(stop_requested), float(busy)
        dist.all_reduce(local)
        squares, tokens, stops, z_loss, writers, *sums = local.tolist()  # the host waits for the device here
        return BatchSums(squares, tokens, stops, z_loss, writers, sums)

    def _judged(self, report: StepReport) -> StepReport:
        """The report, skipped if it is a spike."""
        spike = None if report.skipped else self.judge(report.loss_per_pass[0], report.grad_norm)
        return report if spike is None else dataclasses.replace(report, skipped=True, spike=spike)

    def _count(self, report: StepReport, fusion_active: bool) -> None:
        if not report.skipped:
            self.updates += 1
            self.fusion_updates += int(fusion_active)


def moment_bytes(states: Mapping[torch.Tensor, Dict[str, Any]]) -> int:
    """Of an inner optimizer's states, without step counts."""
    tensors = [value for state in states.values() for value in state.values() if torch.is_tensor(value)]
    return sum(tensor.nbytes for tensor in tensors if tensor.dim() > 0)


def total_loss(loss_per_pass: List[float], loss_weights: LossWeightsConfig, extra_factor: float = 1.0) -> float:
    """The objective of a step from its per-pass losses (method section 3), without a z-loss."""
    weights = pass_loss_weights(loss_weights, len(loss_per_pass), extra_factor)
    return sum(weight * loss for weight, loss in zip(weights, loss_per_pass))
