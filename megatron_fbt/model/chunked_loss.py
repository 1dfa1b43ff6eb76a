"""Cross-entropy over hidden states and the output head's weight: logits exist for one chunk of tokens at a time.

Where the weight has a gradient buffer, the gradients of a chunk are computed while its logits are there: the weight's
goes into the buffer at once, that of the hidden states waits for the backward. Else the backward computes the logits of
each chunk again. Either way a pass whose backward is still to come keeps nothing of the size of the vocabulary.

Shapes: n tokens of a chunk, N of all (s * b), h hidden, v rows of the head on this rank that are no padding.
"""

from dataclasses import dataclass
from typing import Iterator, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_fbt.core.parallel import Layout


@dataclass(frozen=True)
class LossShard:
    """This rank's part of the vocabulary, and how much of its logits may exist at once."""

    vocab_size: int
    """Entries of the vocabulary without padding."""
    layout: Layout
    group: dist.ProcessGroup
    """Tensor-parallel group."""
    chunk_bytes: float
    """Size of a chunk's float32 logits; a chunk has one token at least."""

    def real(self, weight: torch.Tensor) -> torch.Tensor:
        """The rows of this rank's weight or its gradient, [v/tp, h], that are no padding: a view [v, h]."""
        rows = weight.size(0)
        return weight[: min(max(self.vocab_size - self.layout.tensor_rank * rows, 0), rows)]

    def chunks(self, weight: torch.Tensor, tokens: int) -> Iterator[slice]:
        """Slices of the N tokens, of equal size but for the last; the same on all ranks, whatever padding they hold."""
        size = max(1, int(self.chunk_bytes / (4 * weight.size(0))))
        return (slice(begin, min(begin + size, tokens)) for begin in range(0, tokens, size))

    def gather(self, states: torch.Tensor) -> torch.Tensor:
        """[s/tp, b, h] -> [s, b, h]; what is whole already stays as it is."""
        if self.layout.sequence_shards == 1:
            return states
        whole = states.new_empty((states.size(0) * self.layout.tensor_size, *states.shape[1:]))
        dist.all_gather_into_tensor(whole, states.contiguous(), group=self.group)
        return whole

    def sum_parts(self, grad: torch.Tensor) -> torch.Tensor:
        """Gradient [s, b, h] of this rank's part of the vocabulary -> that of all, [s/tp, b, h] if it is split."""
        if self.layout.sequence_shards == 1:
            return self.reduce(grad, dist.ReduceOp.SUM)
        own = grad.new_empty((grad.size(0) // self.layout.tensor_size, *grad.shape[1:]))
        dist.reduce_scatter_tensor(own, grad, group=self.group)
        return own

    def reduce(self, x: torch.Tensor, op: dist.ReduceOp) -> torch.Tensor:
        """x, reduced in place over tensor-parallel ranks."""
        if self.layout.tensor_size > 1:
            dist.all_reduce(x, op=op, group=self.group)
        return x


class _Scores(NamedTuple):
    """What a chunk's logits come to; exps is the logits' memory, [n, v], the others [n]."""

    exps: torch.Tensor
    """exp(logit - largest)."""
    largest: torch.Tensor
    """Of the logits on all ranks."""
    total: torch.Tensor
    """Sum of exps over the vocabulary of all ranks."""
    losses: torch.Tensor
    normalizers: torch.Tensor
    """log sum exp of the logits."""


def _own_labels(labels: torch.Tensor, first: int, rows: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Whether this rank holds each label [n], bool, and the row where it does; 0 where it is elsewhere."""
    inside = (labels >= first) & (labels < first + rows)
    return inside, torch.where(inside, labels - first, 0)


def _score(states: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, first: int, shard: LossShard) -> _Scores:
    """Score a chunk: states [n, h], real rows of the weight [v, h] that begin with entry `first`, labels [n]."""
    logits, rows = (states @ weight.t()).float(), weight.size(0)
    largest = logits.amax(1) if rows else logits.new_full((len(logits),), float("-inf"))
    logits.sub_(shard.reduce(largest, dist.ReduceOp.MAX)[:, None])
    inside, label = _own_labels(labels, first, rows)
    picked = torch.where(inside, logits.gather(1, label[:, None])[:, 0], 0.0) if rows else inside.float()
    logits.exp_()
    total, picked = shard.reduce(torch.stack([logits.sum(1), picked]), dist.ReduceOp.SUM)
    normalizers = total.log()
    return _Scores(logits, largest, total, normalizers - picked, normalizers + largest)


def _logit_gradient(
    exps: torch.Tensor,
    own: Tuple[torch.Tensor, torch.Tensor],
    total: torch.Tensor,
    normalizers: torch.Tensor,
    weights: torch.Tensor,
    squares: Optional[torch.Tensor],
) -> torch.Tensor:
    """Gradient [n, v] of sum(weights * losses + squares * normalizers^2), in the memory of exps.

    Args:
        exps: [n, v], see _Scores; so are total and normalizers.
        own: see _own_labels.
        total: [n].
        normalizers: [n].
        weights: [n].
        squares: [n] or None.
    """
    inside, label = own
    scale = weights if squares is None else weights + 2 * squares * normalizers
    gradient = exps.mul_((scale / total)[:, None])
    if gradient.size(1):
        gradient.scatter_add_(1, label[:, None], -(weights * inside)[:, None])
    return gradient


class _ChunkedLoss(torch.autograd.Function):
    """See chunked_loss. buffer: the weight's gradient buffer, [v/tp, h] float32, or None to compute logits twice."""

    @staticmethod
    def forward(ctx, states, weight, labels, weights, squares, shard: LossShard, buffer: Optional[torch.Tensor]):
        """Return the objective, and losses and log sum exp of each token without a gradient."""
        whole = shard.gather(states)
        flat, label = whole.flatten(0, 1), labels.t().flatten()
        real, first = shard.real(weight), shard.layout.tensor_rank * weight.size(0)
        losses = torch.empty(len(flat), dtype=torch.float32, device=flat.device)
        largest, total, normalizers = (torch.empty_like(losses) for _ in range(3))
        gradient = None if buffer is None else torch.empty_like(flat)
        for part in shard.chunks(weight, len(flat)):
            scores = _score(flat[part], real, label[part], first, shard)
            losses[part], normalizers[part] = scores.losses, scores.normalizers
            largest[part], total[part] = scores.largest, scores.total
            if buffer is not None:
                own = _own_labels(label[part], first, len(real))
                factors = _parts(part, weights, squares)
                above = _logit_gradient(scores.exps, own, scores.total, scores.normalizers, *factors).to(flat.dtype)
                torch.mm(above, real, out=gradient[part])
                _add_product(shard.real(buffer), above, flat[part])
                del above
            del scores  # before the next chunk's logits are there
        ctx.shard, ctx.direct = shard, buffer is not None
        if ctx.direct:
            ctx.save_for_backward(shard.sum_parts(gradient.view_as(whole)))
        else:
            ctx.save_for_backward(states, weight, label, weights, squares, largest, total, normalizers)
        losses, normalizers = losses.view(whole.shape[:2]), normalizers.view(whole.shape[:2])
        objective = (losses * weights).sum()
        if squares is not None:
            objective = objective + (normalizers.square() * squares).sum()
        ctx.mark_non_differentiable(losses, normalizers)
        return objective, losses, normalizers

    @staticmethod
    @once_differentiable
    def backward(ctx, above, *unused):
        """Gradients of states and, without a buffer, of the weight."""
        if ctx.direct:
            (gradient,) = ctx.saved_tensors
            return gradient * above.to(gradient.dtype), None, None, None, None, None, None
        states, weight, label, weights, squares, largest, total, normalizers = ctx.saved_tensors
        shard = ctx.shard
        weights, squares = weights * above, None if squares is None else squares * above
        whole = shard.gather(states)
        flat, real, first = whole.flatten(0, 1), shard.real(weight), shard.layout.tensor_rank * weight.size(0)
        gradient = torch.empty_like(flat)
        weight_gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for part in shard.chunks(weight, len(flat)):
            exps = (flat[part] @ real.t()).float().sub_(largest[part, None]).exp_()
            own, factors = _own_labels(label[part], first, len(real)), _parts(part, weights, squares)
            logits = _logit_gradient(exps, own, total[part], normalizers[part], *factors).to(flat.dtype)
            torch.mm(logits, real, out=gradient[part])
            _add_product(shard.real(weight_gradient), logits, flat[part])
            del exps, logits  # before the next chunk's logits are there
        summed = shard.sum_parts(gradient.view_as(whole))
        return summed, weight_gradient.to(weight.dtype), None, None, None, None, None


def _parts(part: slice, weights: torch.Tensor, squares: Optional[torch.Tensor]) -> Tuple:
    """A chunk of both [s, b]."""
    return weights.flatten()[part], None if squares is None else squares.flatten()[part]


def _add_product(total: torch.Tensor, above: torch.Tensor, states: torch.Tensor) -> None:
    """total [v, h] += above [n, v] transposed times states [n, h], the sum over chunks in float32."""
    if states.dtype == total.dtype:
        total.addmm_(above.t(), states)
    else:
        total.add_(above.t() @ states)


def chunked_loss(
    states: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    squares: Optional[torch.Tensor],
    shard: LossShard,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """sum(weights * losses + squares * normalizers^2) over the tokens; the logits of one chunk exist at a time.

    With a gradient buffer (`weight.main_grad`) the weight's gradient is added there in this call, for a backward whose
    gradient of the objective is 1, as those of all passes are: the schedule's without a loss scale, and AttachLoss's.

    Args:
        states: [s/tp, b, h].
        weight: this rank's rows of the output head, [v/tp, h].
        labels: [b, s].
        weights: of the negative log-likelihoods, [s, b] float32, without a gradient.
        squares: of the squared log sum exp (z-loss), [s, b] float32; None = there is none.
        shard: vocabulary, layout and size of a chunk.

    Returns:
        The objective; negative log-likelihoods and log sum exp over the real vocabulary, float32 [s, b], without a
        gradient.
    """
    buffer = None
    if torch.is_grad_enabled() and weight.requires_grad:
        buffer = getattr(weight, "main_grad", None)
    head = weight if buffer is None else weight.detach()
    return _ChunkedLoss.apply(states, head, labels, weights, squares, shard, buffer)
