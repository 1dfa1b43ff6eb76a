"""Is feedback training healthy? What a step's passes did to states and gates (method section 7)."""

import contextlib
import math
from typing import Dict, Iterator

import torch
import torch.distributed as dist

from megatron_fbt.core.parallel import Layout
from megatron_fbt.data.batch import MicroBatch
from megatron_fbt.model.fusion import Fusion, GateFusion

LOW, HIGH = 0.05, 0.95
"""Outside of these a gate counts as saturated."""
UPDATE, OPEN, STATE, VALUES, GATE_LOW, GATE_HIGH, GATES, FUSED, POSITIONS = range(9)
"""Columns of the sums: squares of h^k - h^(k-1) and of h^k over positions that are not final; squares and number of
all state values; gate values below LOW, above HIGH and in all; fused positions and positions in all."""


class PassDiagnostics:
    """Sums over the micro-batches of one step, of this rank.

    Positions with a loss are counted, so padding is not. In pass k a position t is open if t >= k: an earlier one holds
    its recurrent value already.

    Args:
        passes: K.
        layout: this process's place.
    """

    def __init__(self, passes: int, layout: Layout):
        self.layout = layout
        self.sums = torch.zeros(passes, POSITIONS + 1, dtype=torch.float64, device=layout.device)
        self.previous: Dict[int, torch.Tensor] = {}

    def _own_rows(self, whole: torch.Tensor) -> torch.Tensor:
        """[b, s] -> this rank's [s/tp, b] of it; all [s, b] where the sequence is not split."""
        return whole.t()[self.layout.own_rows(whole.size(1))]

    @property
    def _counts(self) -> bool:
        """Whether another tensor-parallel rank does not count the same positions."""
        return self.layout.sequence_shards > 1 or self.layout.tensor_rank == 0

    @torch.no_grad()
    def count_states(self, index: int, states: torch.Tensor, batch: MicroBatch) -> None:
        """On the last stage.

        Args:
            index: pass, counted from 0.
            states: h, [s/tp, b, h].
            batch: its micro-batch.
        """
        if not self._counts:
            return
        h = states.detach().float()
        counted = self._own_rows(batch.loss_mask > 0)
        squares = h.square().sum(-1)
        sums = self.sums[index]
        sums[STATE] += (squares * counted).sum()
        sums[VALUES] += counted.sum() * h.size(-1)
        before = self.previous.pop(id(batch), None)
        if before is not None:
            positions = torch.arange(batch.loss_mask.size(1), device=h.device).expand_as(batch.loss_mask)
            still_open = counted & self._own_rows(positions > index)
            sums[UPDATE] += ((h - before).square().sum(-1) * still_open).sum()
            sums[OPEN] += (squares * still_open).sum()
        if index + 1 < len(self.sums):
            self.previous[id(batch)] = h

    @torch.no_grad()
    def count_fused(self, index: int, fused: torch.Tensor) -> None:
        """On the first stage: fused [s/tp, b] bool of a pass counted from 0."""
        if self._counts:
            self.sums[index, FUSED] += fused.sum()
            self.sums[index, POSITIONS] += fused.numel()

    @contextlib.contextmanager
    def watch_gate(self, index: int, fusion: Fusion) -> Iterator[None]:
        """Count the gates of a call of the fusion layer, in pass 2 alone: they depend on the tokens only."""
        if index != 1 or not isinstance(fusion, GateFusion):
            yield
            return
        handle = fusion.token_gate.register_forward_hook(lambda module, args, output: self._count_gate(output[0]))
        try:
            yield
        finally:
            handle.remove()

    @torch.no_grad()
    def _count_gate(self, logits: torch.Tensor) -> None:
        gate = torch.sigmoid(logits.float())
        self.sums[1, GATE_LOW] += (gate < LOW).sum()
        self.sums[1, GATE_HIGH] += (gate > HIGH).sum()
        self.sums[1, GATES] += gate.numel()

    def reduce(self) -> Dict[str, float]:
        """Sum over all ranks; collective.

        Returns:
            state_rms_pass_k for all passes; for k >= 2 update_norm_pass_k = |h^k - h^(k-1)| / |h^k| over open positions
            and fused_share_pass_k; gate_low_share and gate_high_share where there are gates.
        """
        dist.all_reduce(self.sums)
        found = {}
        for k, row in enumerate(self.sums.tolist(), start=1):
            found[f"state_rms_pass_{k}"] = math.sqrt(_share(row[STATE], row[VALUES]))
            if k > 1:
                found[f"update_norm_pass_{k}"] = math.sqrt(_share(row[UPDATE], row[OPEN]))
                found[f"fused_share_pass_{k}"] = _share(row[FUSED], row[POSITIONS])
            if row[GATES]:
                found["gate_low_share"] = row[GATE_LOW] / row[GATES]
                found["gate_high_share"] = row[GATE_HIGH] / row[GATES]
        return found


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
