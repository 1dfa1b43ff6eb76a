"""Extra passes that compute the fused suffix alone (method section 4, prefix reuse).

Where the first positions of every row of a micro-batch are plain in pass k, their states, keys, values and losses are
those of pass 1. So pass k begins at the first position that is fused in some row: its queries see pass 1's keys and
values before it, the state that enters it is the previous pass's, and the losses before it are pass 1's, which count
there with the weight of pass k as well. Every row of a micro-batch begins at the same position, as plain positions that
are computed again are equal.

The backward of pass k is a run of the engine of its own, before that of pass 1. So what pass k reads of pass 1 is a
leaf there, and pass 1's backward adds the gradient that has come to it.
"""

from dataclasses import dataclass, field
from typing import Dict, Optional, Sequence, Tuple

import torch
from megatron.core import tensor_parallel

from megatron_fbt.core.last_backward import CallInBackward
from megatron_fbt.core.parallel import Layout
from megatron_fbt.data.batch import MicroBatch


class _Waiting:
    """The gradient that has come to what later passes read, until the backward of pass 1 adds it."""

    def __init__(self):
        self.gradient: Optional[torch.Tensor] = None

    def take(self, leaf: torch.Tensor) -> None:
        """Take a leaf's gradient, so that the leaf and its values need not outlive the passes that read it."""
        gradient, leaf.grad = leaf.grad, None
        self.gradient = gradient if self.gradient is None else self.gradient.add_(gradient)


class _AddWaiting(torch.autograd.Function):
    """Identity on a tensor; its backward adds the gradient that waits, which is that of its first rows."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, waiting: _Waiting) -> torch.Tensor:
        """Return x."""
        ctx.waiting = waiting
        return x

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        """The sum of both gradients."""
        first, ctx.waiting.gradient = ctx.waiting.gradient, None
        if first is not None:
            grad = grad.clone()
            grad[: first.size(0)] += first
        return grad, None


class ZeroGradient(torch.autograd.Function):
    """Identity on a tensor; another one, which nothing was computed from, gets a gradient of zero."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        """Return x."""
        ctx.size, ctx.options = unused.shape, {"dtype": unused.dtype, "device": unused.device}
        return x

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        """The gradient, and zeros."""
        return grad, torch.zeros(ctx.size, **ctx.options)


def share(x: torch.Tensor, rows: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """What pass 1 goes on with, and a leaf of its first rows that later passes read, for a tensor of pass 1."""
    if not x.requires_grad:
        return x, x[:rows]
    waiting, leaf = _Waiting(), x.detach()[:rows].requires_grad_()
    leaf.register_post_accumulate_grad_hook(waiting.take)
    return _AddWaiting.apply(x, waiting), leaf


@dataclass
class PlainPass:
    """What later passes read of pass 1 of one micro-batch, on one stage."""

    rows: int
    """Positions that later passes read the keys and values of."""
    keys_values: Optional[Dict[int, Tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)
    """By layer number; [rows, b, ng, hn] each, keys with their rotation. None = all later passes are through."""
    states: Optional[torch.Tensor] = None
    """Top states [s/tp, b, h], on the last stage."""

    def join(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Keep a layer's keys and values; again when a checkpoint computes them again, for nothing to change."""
        key, kept_key = share(key, self.rows)
        value, kept_value = share(value, self.rows)
        if self.keys_values is not None:
            self.keys_values.setdefault(layer, (kept_key, kept_value))
        return key, value

    def keep_states(self, states: torch.Tensor) -> torch.Tensor:
        """Keep the top states; returns what pass 1 goes on with."""
        states, self.states = share(states, states.size(0))
        return states

    def release(self) -> None:
        """Let keys and values go, which recomputed layers of all passes hold on to through their arguments."""
        self.keys_values = None


@dataclass(frozen=True)
class Suffix:
    """The positions of a row that an extra pass computes: from `start` on."""

    plain: PlainPass
    start: int

    def join(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the whole row: pass 1's before start, then those given, [s - start, b, ng, hn]."""
        first_keys, first_values = self.plain.keys_values[layer]
        return torch.cat([first_keys[: self.start], key]), torch.cat([first_values[: self.start], value])


class PrefixReuse:
    """Where each extra pass of a step begins, and what it reads of pass 1.

    Args:
        layout: this process's place.
        micro_batches: of the step.
        starts: of each of them, the first position that an extra pass fuses, by pass; see row_groups.
    """

    def __init__(self, layout: Layout, micro_batches: Sequence[MicroBatch], starts: Sequence[Sequence[int]]):
        self.layout, self.passes = layout, 1 + len(starts[0])
        self.length = micro_batches[0].document_starts.size(1)
        self.starts = {
            id(batch): [0, *map(self._usable, of_batch)] for batch, of_batch in zip(micro_batches, starts, strict=True)
        }
        self.plain: Dict[int, PlainPass] = {}

    def _usable(self, start: int) -> int:
        """Every tensor-parallel rank has as many rows of the suffix."""
        shards = self.layout.sequence_shards
        return start // shards * shards

    def start(self, batch: MicroBatch, index: int) -> int:
        """First position that a pass, counted from 0, computes."""
        return self.starts[id(batch)][index]

    def is_empty(self, batch: MicroBatch, index: int) -> bool:
        """Whether a pass fuses nothing, so that no layer need run."""
        return self.start(batch, index) == self.length

    def part(self, batch: MicroBatch, index: int) -> object:
        """What the attention of a pass joins its keys and values with: PlainPass, Suffix, or None = nothing."""
        if index == 0:
            starts = self.starts[id(batch)]
            if not any(starts):
                return None
            rows = max(start for start in starts if start < self.length)
            plain = self.plain[id(batch)] = PlainPass(rows)
            return plain if rows else None
        start = self.start(batch, index)
        return Suffix(self.plain[id(batch)], start) if start else None

    def watch(self, batch: MicroBatch, output: torch.Tensor) -> torch.Tensor:
        """The output of pass 1, unchanged; what later passes have read is let go when its backward begins."""
        plain = self.plain.get(id(batch))
        return output if plain is None else CallInBackward.apply(output, plain.release)

    def keep_states(self, batch: MicroBatch, states: torch.Tensor) -> torch.Tensor:
        """Keep pass 1's top states on the last stage; returns what pass 1 goes on with."""
        plain = self.plain.get(id(batch))
        return states if plain is None else plain.keep_states(states)

    def whole(self, batch: MicroBatch, index: int, states: torch.Tensor) -> torch.Tensor:
        """Top states of a suffix, [(s - start)/tp, b, h] -> those of the row, [s/tp, b, h]."""
        start = self.start(batch, index)
        if start == 0:
            return states
        first, rows = self.plain[id(batch)].states, self.layout.own_rows(self.length)
        if start == self.length:
            return first
        if self.layout.sequence_shards > 1:
            # Ranks read different rows of what all of them get: their gradients are summed.
            states = tensor_parallel.gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=True)
        plain = max(0, min(rows.stop, start) - rows.start)
        return torch.cat([first[:plain], states[max(rows.start - start, 0) : max(rows.stop - start, 0)]])

    def forget(self, batch: MicroBatch, index: int) -> None:
        """After the forward of the last pass nothing but the graphs needs what was kept."""
        if index == self.passes - 1:
            self.plain.pop(id(batch), None)
