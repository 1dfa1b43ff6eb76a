"""The feedback map iterated far beyond the trained passes: where it leads, how fast, and what that is worth.

Pass k of a Full-Bandwidth Transformer is one Jacobi iteration of the recurrence that decoding follows. A map that
contracts comes to rest; whether it rests at good states is another question, which only the loss there can answer.
"""

import math
from dataclasses import dataclass
from typing import Any, Callable, Iterator, List, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_PASSES = 100_000
"""What a command may ask for."""
LOGITS_AT_ONCE = 1 << 25
"""Logits computed together, so that a large vocabulary does not fill the memory."""


@dataclass
class PassSeries:
    """What each of K passes did; lists of K, pass 1 first.

    Attributes:
        losses: Mean NLL over the scored positions, nats.
        update_norms: |h^k - h^(k-1)| / |h^k| over scored positions that are not final (t >= k); None for pass 1 and
            where every position is final.
        state_rms: RMS of the scored positions' top states.
        open_shares: Share of the scored positions that is not final.
        length: Positions T of a row; after T passes all states are those of the recurrence.
        scored: Positions with a loss.
        epsilon: Relative spacing of the states' number format.
    """

    losses: List[float]
    update_norms: List[Optional[float]]
    state_rms: List[float]
    open_shares: List[float]
    length: int
    scored: int
    epsilon: float

    @property
    def finite(self) -> bool:
        """Whether every loss is a finite number."""
        return all(map(math.isfinite, self.losses))


def pass_states(model: Any, input_ids: Tensor, passes: int, document_starts: Optional[Tensor] = None) -> Iterator:
    """Top states [B, T, D] of pass 1, 2, ... as an exported model's parallel_passes has them, one at a time.

    Args:
        model: An exported model (FBTForCausalLM).
        input_ids: [B, T], without padding.
        passes: K.
        document_starts: [B, T] bool, as in the model's forward.
    """
    network, config = model.model, model.config
    plain, token = network.embed(input_ids)
    positions, kept_apart = network.positions(input_ids, None, 0), {}
    stays_plain = positions == 0
    if document_starts is not None:
        starts = document_starts.bool()
        if getattr(config, "reset_position_ids", False):  # exports of the first versions do not know it
            positions = network.positions(input_ids, None, 0, starts)
        if getattr(config, "reset_attention_mask", False):
            kept_apart = {"documents": starts.long().cumsum(-1)}
        stays_plain = (positions == 0) | starts
    inputs = plain
    for k in range(passes):
        state = network.stack(inputs, positions, **kept_apart)
        yield state
        if k + 1 < passes:
            fused = network.fusion(token, F.pad(state[:, :-1], (0, 0, 1, 0)))
            inputs = torch.where(stays_plain[..., None], plain, fused)


@torch.no_grad()
def iterate(
    model: Any,
    input_ids: Tensor,
    labels: Optional[Tensor] = None,
    passes: int = 300,
    batch: int = 8,
    document_starts: Optional[Tensor] = None,
    on_pass: Callable[[], None] = lambda: None,
) -> PassSeries:
    """Iterate the K-pass map without gradients; two states of a batch are held at a time.

    Args:
        model: An exported model, in evaluation mode.
        input_ids: [N, T], without padding.
        labels: [N, T], as in the model's forward: position t is scored against labels[:, t + 1], -100 = no loss.
            None = the input itself.
        passes: K.
        batch: Rows computed together.
        document_starts: [N, T] bool, plain in every pass, as is each row's first position; None = no others.
        on_pass: Called after each pass of each batch.

    Raises:
        ValueError: No position has a loss, or passes or batch is below 1.
    """
    if passes < 1 or batch < 1:
        raise ValueError(f"passes={passes}, batch={batch}: must be at least 1")
    targets = F.pad((input_ids if labels is None else labels)[:, 1:], (0, 1), value=-100)
    scored = int((targets != -100).sum())
    if scored == 0:
        raise ValueError("labels: no position has a loss; give rows of at least two tokens")
    sums, epsilon = torch.zeros(passes, len(_COLUMNS), dtype=torch.float64), 0.0
    for first in range(0, len(input_ids), batch):
        rows = slice(first, first + batch)
        starts = None if document_starts is None else document_starts[rows].to(model.device)
        ids, answers = input_ids[rows].to(model.device), targets[rows].to(model.device)
        previous = None
        for k, state in enumerate(pass_states(model, ids, passes, starts), start=1):
            sums[k - 1] += _pass_sums(model, k, state, previous, answers)
            previous, epsilon = state, torch.finfo(state.dtype).eps
            on_pass()
    return _series(sums, input_ids.shape[1], scored, epsilon)


_COLUMNS = ("nll", "squares", "values", "update", "open_squares", "open_positions")


def _pass_sums(model: Any, k: int, state: Tensor, previous: Optional[Tensor], targets: Tensor) -> Tensor:
    """Sums of one pass over one batch, by _COLUMNS."""
    counted = targets != -100
    h = state.float()
    squares = h.square().sum(-1, dtype=torch.float64)
    still_open = counted & (torch.arange(targets.shape[1], device=targets.device) >= k)
    update = torch.zeros_like(squares) if previous is None else (h - previous.float()).square().sum(-1).double()
    found = [
        nll_sum(model, state[counted], targets[counted]),
        squares[counted].sum(),
        counted.sum() * state.shape[-1],
        update[still_open].sum(),
        squares[still_open].sum(),
        still_open.sum(),
    ]
    return torch.stack([value.double().cpu() for value in found])


def nll_sum(model: Any, states: Tensor, targets: Tensor) -> Tensor:
    """Sum of the negative log-likelihoods, nats, of targets [n] at top states [n, D]."""
    rows = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    total = torch.zeros((), dtype=torch.float64, device=states.device)
    for part, answer in zip(states.split(rows), targets.split(rows), strict=True):
        total += F.cross_entropy(model.lm_head(part).float(), answer, reduction="none").double().sum()
    return total


def _series(sums: Tensor, length: int, scored: int, epsilon: float) -> PassSeries:
    losses, rms, norms, shares = [], [], [], []
    for k, row in enumerate(sums.tolist(), start=1):
        nll, squares, values, update, open_squares, open_positions = row
        losses.append(nll / scored)
        rms.append(math.sqrt(squares / values))
        shares.append(open_positions / scored)
        norms.append(math.sqrt(update / open_squares) if k > 1 and open_positions and open_squares else None)
    return PassSeries(losses, norms, rms, shares, length, scored, epsilon)
