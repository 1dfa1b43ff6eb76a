"""Log-likelihood of given tokens in a regime, by parallel passes or by the recurrence itself.

The prompt is computed as in generation: one plain pass, in the fused regime more of them; in the recurrent one the
whole row is in the feedback region. The tokens after it are computed in K passes at once, on the prompt's keys and
values: pass 1 reads plain inputs, pass k fuses each token with the state before it of pass k - 1. The likelihoods of
the first K tokens are then exactly those of the recurrence (so K = n does for n tokens); later ones err by what K
passes have not settled.

Shapes: B rows, P prompt positions (padded on the left), C continuation positions (filled up on the right).
"""

from dataclasses import dataclass
from typing import Any, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fbt.errors import BadNumbersError
from megatron_fbt.hf.generation_fbt import FBTCache


@dataclass
class ScoredRow:
    """Tokens of one request.

    Attributes:
        ids: Prompt and continuation.
        prompt: Tokens of the prompt, at least 1.
        first: Place of the first token whose likelihood counts, at least `prompt`.
    """

    ids: List[int]
    prompt: int
    first: int


@dataclass
class Passes:
    """How a row is computed.

    Attributes:
        regime: standard, soft, fused or recurrent.
        fused_passes: Fused passes over the prompt in the fused regime.
        passes: Parallel passes K over what is fused; None = token by token. Without a meaning in the standard regime.
    """

    regime: str
    fused_passes: int = 1
    passes: Optional[int] = 4


@torch.no_grad()
def log_likelihoods(model: Any, rows: Sequence[ScoredRow], how: Passes) -> List[Tuple[float, bool]]:
    """Log-likelihood of the counted tokens of each row, in nats, and whether each is the likeliest one.

    Raises:
        BadNumbersError: A logit is not finite.
    """
    prompt = max(row.prompt for row in rows)
    length = max(len(row.ids) - row.prompt for row in rows)
    ids = torch.zeros(len(rows), prompt + length, dtype=torch.long)
    keep = torch.ones(len(rows), prompt + length, dtype=torch.bool)
    for place, row in enumerate(rows):
        start = prompt - row.prompt
        ids[place, start : start + len(row.ids)] = torch.tensor(row.ids)
        keep[place, :start] = False
    ids, keep = ids.to(model.device), None if keep.all() else keep.to(model.device)
    states = continuation_states(model.model, ids, keep, prompt, how)
    results = []
    for place, row in enumerate(rows):
        count, end = len(row.ids) - row.first, len(row.ids) - row.prompt
        logits = model.lm_head(states[place, end - count : end]).float()
        if not logits.isfinite().all():
            raise BadNumbersError(f"the model's logits are not finite in the {how.regime} regime: it cannot be scored")
        targets = torch.tensor(row.ids[row.first :], device=logits.device)
        taken = F.log_softmax(logits, dim=-1).gather(1, targets[:, None])
        results.append((taken.double().sum().item(), bool((logits.argmax(-1) == targets).all())))
    return results


def continuation_states(network: Any, ids: Tensor, keep: Optional[Tensor], prompt: int, how: Passes) -> Tensor:
    """States that predict the continuation: of the prompt's last position and of all further ones but the last.

    Args:
        network: FBTModel.
        ids: [B, P + C].
        keep: [B, P + C], False = padding before a row's first token; None = no padding.
        prompt: P.
        how: Regime and passes.

    Returns:
        [B, C, D]
    """
    ids, keep = ids[:, :-1], None if keep is None else keep[:, :-1]
    if how.regime == "standard":
        return network.parallel_passes(ids, 1, keep)[-1][:, prompt - 1 :]
    if how.regime == "recurrent" and how.passes is not None:
        return network.parallel_passes(ids, min(how.passes, ids.shape[1]), keep)[-1][:, prompt - 1 :]
    cache = FBTCache()
    cache.padded = keep is not None
    if how.passes is None:
        return network.run_regime(ids, how.regime, how.fused_passes, keep, cache, prompt)[:, prompt - 1 :]
    head_keep = None if keep is None else keep[:, :prompt]
    passes = 1 + how.fused_passes if how.regime == "fused" else 1
    last = network.parallel_passes(ids[:, :prompt], passes, head_keep, cache=cache)[-1][:, -1:]
    if ids.shape[1] == prompt:
        return last
    return _settle(network, ids[:, prompt:], keep, cache, last, how.passes)


def _settle(network: Any, ids: Tensor, keep: Optional[Tensor], cache: FBTCache, last: Tensor, passes: int) -> Tensor:
    """The prompt's last state [B, 1, D], and the states of K passes over what follows it."""
    past, length = cache.get_seq_length(), ids.shape[1]
    plain, token = network.embed(ids)
    positions = network.positions(ids, keep, past)
    states = None
    # The state before the first token is the prompt's last one, which is final: pass 2 has a right first state.
    for number in range(min(passes, length + 1)):
        inputs = plain
        if number:
            cache.crop(-length)
            inputs = network.fusion(token, torch.cat([last, states[:, :-1]], dim=1))
        states = network.stack(inputs, positions, keep, cache)
    return torch.cat([last, states], dim=1)
