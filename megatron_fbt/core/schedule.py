"""K passes over a pipeline: pass k of a stage is a virtual pipeline chunk over shared weights.

F(micro batch m, pass k, stage s) needs F(m, k, s-1), or F(m, k-1, last) when s = 0 and k > 0. Those are the
dependencies of Megatron-Core's interleaved schedule, whose ring sends the last stage's output of chunk k to the first
stage's chunk k + 1. So that schedule runs the K passes unchanged.
"""

import contextlib
import copy
from dataclasses import dataclass, replace
from typing import Callable, List, Optional, Sequence, Tuple

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import make_viewless_tensor

from megatron_fbt.config.feedback import FeedbackConfig
from megatron_fbt.core.fp8 import begin_step, end_step
from megatron_fbt.core.last_backward import LastBackward
from megatron_fbt.core.pass_by_pass import PassByPass
from megatron_fbt.core.prefix_reuse import PrefixReuse, ZeroGradient
from megatron_fbt.core.row_groups import group_rows
from megatron_fbt.core.stage import FBTStage
from megatron_fbt.data.batch import MicroBatch
from megatron_fbt.feedback.diagnostics import PassDiagnostics
from megatron_fbt.feedback.jitter import jitter_noise
from megatron_fbt.feedback.prefix import fused_positions
from megatron_fbt.model.loss import AttachLoss, pass_loss_weights


@dataclass
class Recipe:
    """What the passes of one batch need beside the tokens."""

    feedback: FeedbackConfig
    seed: int
    training: bool
    extra_factor: float = 1.0
    """Factor of the extra passes' weight in this step, see LossWeightsConfig.warmup_steps."""
    z_loss: float = 0.0
    """Coefficient of the squared log sum exp of the logits in this step."""
    loss_scale: float = 1.0
    """Factor of the whole objective, and so of every gradient."""

    def weights(self, passes: int) -> List[float]:
        """Weight of each pass in the loss of this step, scaled; validation weighs all alike, however many."""
        if not self.training:
            return [1.0] * passes
        weights = pass_loss_weights(self.feedback.loss_weights, passes, self.extra_factor)
        return [self.loss_scale * weight for weight in weights]

    def fused(self, batch: MicroBatch, pass_number: int) -> torch.Tensor:
        """Positions fused in a pass: [b, s] bool. Validation has no mix-in; with granularity prompt the data decide."""
        prefix = self.feedback.prefix if self.training else replace(self.feedback.prefix, probability=0.0)
        return fused_positions(
            prefix, batch.document_starts, batch.sample_ids, pass_number, self.seed, batch.feedback_region
        )

    def held(self, batch: MicroBatch, pass_number: int, inputs: torch.Tensor) -> torch.Tensor:
        """The stack's inputs [s/tp, b, h] of pass 2 or later; see SequentialRecipe, which holds some of them."""
        return inputs

    @property
    def jitter_scale(self) -> float:
        """Half-width of the noise on the carried state."""
        return self.feedback.jitter.scale if self.training else 0.0


class PassTotals:
    """Sums of the masked NLL of each pass, of the z-loss and of the loss tokens, over this rank's micro-batches.

    nll is not weighted; z_loss is what it adds to the objective, with its coefficient and the weights of the passes.
    """

    def __init__(self, passes: int, device: torch.device):
        self.nll = torch.zeros(passes, device=device)
        self.z_loss = torch.zeros((), device=device)
        self.tokens = torch.zeros((), device=device)

    def add(self, pass_index: int, nll: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count one micro-batch of one pass (passes are counted from 0 here); tokens are counted in the first."""
        self.nll[pass_index] += nll.detach()
        if pass_index == 0:
            self.tokens += tokens


class PassView(torch.nn.Module):
    """One pass over the shared stage module, in the shape of a virtual pipeline chunk.

    Args:
        stage: owned elsewhere: K views share one set of parameters.
        index: pass, counted from 0; also the virtual chunk number.
        weights: loss weight of every pass of the step.
        recipe: prefix mix-in and jitter.
        totals: where the losses are summed.
        config: Megatron-Core's configuration for the schedule, a copy with the virtual size set.
    """

    def __init__(self, stage: FBTStage, index: int, weights: List[float], recipe: Recipe, totals: PassTotals, config):
        super().__init__()
        object.__setattr__(self, "stage", stage)  # not registered as a child
        self.vp_stage, self.weights, self.recipe, self.totals = index, weights, recipe, totals
        self.config, self.model_type = config, stage.model_type
        self.received: Optional[torch.Tensor] = None
        self.last_backward: Optional[LastBackward] = None
        self.diagnostics: Optional[PassDiagnostics] = None
        self.reuse: Optional[PrefixReuse] = None

    @property
    def is_last_pass(self) -> bool:
        """Whether this pass returns its loss instead of sending its state on."""
        return self.vp_stage == len(self.weights) - 1

    def set_input_tensor(self, tensors) -> None:
        """Take what the previous stage, or the last stage's previous pass, has sent."""
        self.received = tensors[0] if isinstance(tensors, list) else tensors

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Run the pass on this stage.

        Returns:
            What goes to the next stage or pass, [s/tp, b, h]; on the last stage of the last pass the weighted sum of
            the masked losses.
        """
        empty = self.reuse is not None and self.reuse.is_empty(batch, self.vp_stage)
        output = self._without_layers(batch) if empty else self._through_layers(batch)
        self.received = None
        if self.reuse is not None:
            output = self.reuse.watch(batch, output) if self.vp_stage == 0 else output
            self.reuse.forget(batch, self.vp_stage)
        if self.last_backward is not None:
            output = self.last_backward.watch(output, batch)
        # An identity returns a view, which Megatron-Core's output deallocation refuses.
        return make_viewless_tensor(inp=output, requires_grad=output.requires_grad, keep_graph=True)

    def _through_layers(self, batch: MicroBatch) -> torch.Tensor:
        stage, start = self.stage, self._start(batch)
        hidden = self._first_inputs(batch) if stage.pre_process else self._received_part(batch)
        self.received = None
        joined = None if self.reuse is None else self.reuse.part(batch, self.vp_stage)
        starts = batch.host.document_starts if stage.context.packed else None
        states = stage.run_layers(hidden, batch.document_starts, self._recompute(), start, joined, starts)
        return self._finish(states, batch) if stage.post_process else self._padded(states, batch)

    def _without_layers(self, batch: MicroBatch) -> torch.Tensor:
        """Where nothing is fused the pass is pass 1; what is sent, received and counted is as ever."""
        stage, received = self.stage, self.received
        if self.diagnostics is not None and stage.pre_process:
            self._count_inputs(batch, torch.zeros_like(batch.document_starts))
        if not stage.post_process:
            return ZeroGradient.apply(torch.zeros_like(received), received)
        states = self.reuse.whole(batch, self.vp_stage, received)
        if self.diagnostics is not None:
            self.diagnostics.count_states(self.vp_stage, states, batch)
        no_loss = torch.zeros((), device=received.device)  # pass 1 has counted the row's
        return ZeroGradient.apply(no_loss if self.is_last_pass else states, received)

    def _start(self, batch: MicroBatch) -> int:
        """First position that this pass computes."""
        return 0 if self.reuse is None else self.reuse.start(batch, self.vp_stage)

    def _received_part(self, batch: MicroBatch) -> torch.Tensor:
        """What the previous stage has computed, of a tensor that has the whole row's shape."""
        start, shards = self._start(batch), self.stage.layout.sequence_shards
        return self.received[: self.received.size(0) - start // shards] if start else self.received

    def _padded(self, states: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """The states in the shape of the whole row, which every stage receives; what is beyond them is not read."""
        start, shards = self._start(batch), self.stage.layout.sequence_shards
        return torch.nn.functional.pad(states, (0, 0, 0, 0, 0, start // shards)) if start else states

    def _finish(self, states: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """On the last stage: the loss, attached to the row's states if there is another pass."""
        reuse, index = self.reuse, self.vp_stage
        if reuse is not None and index == 0:
            states = reuse.keep_states(batch, states)
        loss, whole = self._weighted_loss(states, batch), states
        if reuse is not None and not (self.is_last_pass and self.diagnostics is None):
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.is_last_pass):
                whole = reuse.whole(batch, index, states)
        if self.diagnostics is not None:
            self.diagnostics.count_states(index, whole, batch)
        return loss if self.is_last_pass else AttachLoss.apply(whole, loss)

    def _recompute(self) -> str:
        return self.stage.memory.policy.of_pass(last=self.is_last_pass)

    def _first_inputs(self, batch: MicroBatch) -> torch.Tensor:
        if self.vp_stage == 0:
            return self.stage.first_inputs(batch.tokens, None, None)
        states, layout, pass_number = self.received, self.stage.layout, self.vp_stage + 1
        length, start = batch.document_starts.size(1), self._start(batch)
        fused, rows, own = (
            self.recipe.fused(batch, pass_number),
            layout.own_rows(length),
            layout.own_rows(length - start),
        )
        if start and layout.sequence_shards == 1:  # of the other positions no state is read
            rows = slice(start - 1, length - 1)
            states = states[rows]
        if self.recipe.jitter_scale > 0:
            positions = torch.arange(rows.start, rows.stop, device=states.device)
            noise = jitter_noise(
                self.recipe.jitter_scale, batch.sample_ids, positions, pass_number, states.size(2), self.recipe.seed
            )
            states = states + noise.to(states.dtype)
        watched = contextlib.nullcontext()
        if self.diagnostics is not None and start == 0:
            self.diagnostics.count_fused(self.vp_stage, fused[:, own])
            watched = self.diagnostics.watch_gate(self.vp_stage, self.stage.fusion)
        elif self.diagnostics is not None:
            self._count_inputs(batch, fused)
        with watched:
            own_fused = fused[:, start + own.start : start + own.stop].t().contiguous()
            if start == 0:
                inputs = self.stage.first_inputs(batch.tokens, states, own_fused)
            elif layout.sequence_shards == 1:
                inputs = self.stage.first_inputs(batch.tokens[:, start:], states, own_fused, aligned=True)
            else:
                inputs = self.stage.first_inputs(batch.tokens[:, start:], states, own_fused, start=start)
        return self.recipe.held(batch, pass_number, inputs)

    def _count_inputs(self, batch: MicroBatch, fused: torch.Tensor) -> None:
        """Fused positions [b, s] and gates of the whole row, which the pass does not compute: gates in pass 2 alone."""
        self.diagnostics.count_fused(self.vp_stage, fused[:, self.stage.layout.own_rows(fused.size(1))])
        if self.vp_stage == 1:
            with self.diagnostics.watch_gate(self.vp_stage, self.stage.fusion), torch.no_grad():
                self.stage.token_products(batch.tokens)

    def _repeated(self, batch: MicroBatch) -> List[Tuple[int, int]]:
        """In pass 1: index and start of the later passes."""
        if self.reuse is None or self.vp_stage > 0:
            return []
        return [(index, self.reuse.start(batch, index)) for index in range(1, len(self.weights))]

    def _weighted_loss(self, states: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Weighted sum of the masked losses of this pass (a scalar)."""
        start, z_loss = self._start(batch), self.recipe.z_loss
        mask = batch.loss_mask.t()[start:]
        weights, repeated = mask * self.weights[self.vp_stage], self._repeated(batch)
        for index, end in repeated:  # the prefix of a later pass has the losses of this one
            weights[:end] += mask[:end] * self.weights[index]
        squares = weights * z_loss if z_loss > 0 else None
        objective, losses, normalizers = self.stage.objective(states, batch.labels[:, start:], weights, squares)
        losses = losses.detach() * mask
        self.totals.add(self.vp_stage, losses.sum(), mask.sum())
        for index, end in repeated:
            self.totals.add(index, losses[:end].sum(), mask.sum())
        if squares is not None:
            self.totals.z_loss += (normalizers.detach().square() * squares).sum() / self.recipe.loss_scale
        return objective


class UnrolledPasses(torch.nn.Module):
    """All passes of a micro-batch in one graph, for shards that want a weight's gradient once; see PassByPass."""

    def __init__(self, views: Sequence[PassView]):
        super().__init__()
        object.__setattr__(self, "views", list(views))
        self.config, self.model_type = views[0].config, views[0].model_type

    def set_input_tensor(self, tensors) -> None:
        """There is no previous stage."""

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Weighted sum of the losses of all passes; the attached ones join in the backward."""
        output = None
        for view in self.views:
            view.set_input_tensor(output)
            output = view(batch)
        return output


def _schedule_config(stage: FBTStage, passes: int):
    config = copy.copy(stage.config)
    if passes > 1 and stage.layout.pipeline_size > 1:
        config.virtual_pipeline_model_parallel_size = passes
        config.microbatch_group_size_per_vp_stage = stage.layout.pipeline_size
        # With two stages the next and the previous rank are the same one: batched calls would match sends to the
        # wrong receives, silently. Overlapped calls order them by the parity of the rank.
        config.overlap_p2p_comm = True
    return config


def _forward_step(iterator, view):
    batch = next(iterator)
    output = view(batch)
    ignored = torch.zeros((), dtype=torch.int, device=output.device)
    return output, lambda loss: (loss, ignored, {})


def run_passes(
    stage: FBTStage,
    micro_batches: Sequence[MicroBatch],
    passes: int,
    recipe: Recipe,
    forward_only: bool = False,
    on_last_backward: Optional[Callable[[], None]] = None,
    diagnostics: Optional[PassDiagnostics] = None,
    through: Callable[[torch.nn.Module], torch.nn.Module] = lambda chunk: chunk,
) -> PassTotals:
    """Forward and, unless forward_only, backward of K passes over the micro-batches of this rank.

    Gradients are those of the *sum* over this rank's loss tokens of sum_k w_k NLL_k, times recipe.loss_scale; they
    are neither reduced over ranks nor divided.

    Args:
        stage: this rank's stage.
        micro_batches: the same number on every rank; each is used once by each pass.
        passes: K, the same on every rank.
        recipe: prefix mix-in and jitter.
        forward_only: no backward.
        on_last_backward: called when the last backward begins, after which every gradient arrives once.
        diagnostics: where states and gates are counted; None = not at all.
        through: wraps what the schedule calls, see Optimizer.through.

    Returns:
        Sums on the last stage's ranks; zeros elsewhere.
    """
    weights = recipe.weights(passes)
    totals = PassTotals(passes, stage.layout.device)
    config = _schedule_config(stage, passes)
    views = [PassView(stage, index, weights, recipe, totals, config) for index in range(passes)]
    reuse = None
    if passes > 1 and recipe.training and stage.reuses_prefix:  # validation has no plain prefix
        micro_batches, starts = group_rows(micro_batches, passes, recipe.fused)
        reuse = PrefixReuse(stage.layout, micro_batches, starts)
    for view in views:
        view.diagnostics, view.reuse = diagnostics, reuse
    unused = tuple(stage.fusion.parameters()) if passes > 1 and stage.pre_process else ()
    last_backward = on_last_backward and LastBackward(micro_batches[-1], on_last_backward, unused)
    common = {
        "forward_step_func": _forward_step,
        "num_microbatches": len(micro_batches),
        "seq_length": micro_batches[0].document_starts.size(1),
        "micro_batch_size": micro_batches[0].document_starts.size(0),
        "forward_only": forward_only,
    }
    begin_step(stage)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not forward_only), stage.training_step():
        _run_schedule(stage, views, micro_batches, last_backward, through, common)
    if not forward_only:
        end_step(stage)
    return totals


def _run_schedule(
    stage: FBTStage,
    views: List[PassView],
    micro_batches: Sequence[MicroBatch],
    last_backward: Optional[LastBackward],
    through: Callable[[torch.nn.Module], torch.nn.Module],
    common: dict,
) -> None:
    """Run Megatron-Core's schedule for the layout and the number of passes; see run_passes."""
    views[0].last_backward = last_backward
    if stage.layout.pipeline_size == 1:
        chunk = UnrolledPasses(views) if stage.one_backward else PassByPass(views)
        schedules.forward_backward_no_pipelining(data_iterator=iter(micro_batches), model=through(chunk), **common)
        return
    if len(views) == 1:
        schedules.forward_backward_pipelining_without_interleaving(
            data_iterator=iter(micro_batches), model=through(views[0]), **common
        )
    else:
        iterators = [iter(micro_batches) for _ in views]
        chunks = [through(view) for view in views]
        schedules.forward_backward_pipelining_with_interleaving(data_iterator=iterators, model=chunks, **common)
