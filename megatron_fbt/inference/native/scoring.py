"""Log-likelihood of given continuations: by parallel passes, or by the recurrence of decoding itself."""

from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple

import torch

from megatron_fbt.errors import BadNumbersError, ConfigError
from megatron_fbt.hf.generation_fbt import check_regime
from megatron_fbt.inference.native.decoding import Decoder, check_tokens
from megatron_fbt.inference.native.model import NativeModel

MOST_LOGITS = 1 << 24
"""Of one piece of the positions that are scored: 64 MB."""
Pair = Tuple[Sequence[int], Sequence[int]]


@dataclass
class Score:
    """Of one continuation."""

    log_likelihoods: List[float]
    """Of each token, in nats."""
    greedy: bool
    """Whether each token is the likeliest one where it stands."""

    @property
    def log_likelihood(self) -> float:
        """Of the whole continuation."""
        return sum(self.log_likelihoods)


def score(
    model: NativeModel,
    pairs: Sequence[Pair],
    regime: str = "soft",
    fused_passes: int = 1,
    passes: Optional[int] = None,
    batch_size: int = 8,
) -> List[Score]:
    """Score continuations as a regime would decode them; collective, and with the same result on every process.

    Args:
        model: the model.
        pairs: (context, continuation), token ids of each, at least one.
        regime: standard, soft, fused or recurrent. The context is the prompt.
        fused_passes: fused passes over the context in the fused regime.
        passes: parallel passes K over the continuation, the plain one included (over the whole row in the recurrent
            regime): the first K tokens have the likelihoods of decoding, later ones what K passes have settled. None =
            decode token by token, the recurrence itself. Without a meaning in the standard regime.
        batch_size: rows that are computed together.

    Raises:
        ConfigError: a setting without a meaning, or an empty context or continuation.
        BadNumbersError: a logit is not finite.
    """
    _check(model, pairs, regime, fused_passes, passes, batch_size)
    order = sorted(range(len(pairs)), key=lambda i: (len(pairs[i][1]), len(pairs[i][0])))
    found: Dict[int, Score] = {}
    for begin in range(0, len(order), batch_size):
        batch = order[begin : begin + batch_size]
        chosen = [pairs[i] for i in batch]
        states = _states(model, chosen, regime, fused_passes, passes)
        found.update(zip(batch, _scores(model, chosen, states), strict=True))
    return [found[i] for i in range(len(pairs))]


def _check(
    model: NativeModel, pairs: Sequence[Pair], regime: str, fused_passes: int, passes: Optional[int], batch: int
) -> None:
    try:
        check_regime(regime, fused_passes)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if passes is not None and passes < 1:
        raise ConfigError(f"passes={passes}: must be at least 1")
    if batch < 1:
        raise ConfigError(f"batch_size={batch}: must be at least 1")
    for part in zip(*pairs):
        check_tokens(part, model.vocab_size)


@torch.no_grad()
def _states(
    model: NativeModel, pairs: Sequence[Pair], regime: str, fused_passes: int, passes: Optional[int]
) -> Optional[torch.Tensor]:
    """States that predict the continuations: [longest continuation, b, h] on the last stage, None on the others."""
    contexts, continuations = zip(*pairs)
    length = max(map(len, continuations)) - 1
    filled = [[*row[:-1], *[0] * (length + 1 - len(row))] for row in continuations]  # on the right: nothing looks there
    tokens = torch.tensor(filled, dtype=torch.int64, device=model.layout.device).view(len(pairs), length)
    decoder = Decoder(model, contexts, regime, fused_passes, length)
    if regime == "standard" or (regime == "recurrent" and passes is not None):
        whole = torch.cat([decoder.rows.tokens, tokens], dim=1)
        count = 1 if regime == "standard" else min(passes, whole.size(1))
        states = [model.passes(decoder.rows, whole, 0, count)]
    else:
        states = [decoder.prompt()]
        if passes is None:
            states += [decoder.step(tokens[:, t : t + 1]) for t in range(length)]
        elif length:
            states.append(decoder.passes(tokens, min(passes, length + 1)))
    return torch.cat(states)[-length - 1 :] if model.layout.is_last_stage else None


@torch.no_grad()
def _scores(model: NativeModel, pairs: Sequence[Pair], states: Optional[torch.Tensor]) -> List[Score]:
    """Scores of the continuations, whose first tokens the first states predict."""
    lengths = [len(continuation) for _, continuation in pairs]
    result = None
    if states is not None:
        picked = torch.cat([states[:length, row] for row, length in enumerate(lengths)])  # [tokens, h]
        targets = [token for _, continuation in pairs for token in continuation]
        result = _token_scores(model, picked, torch.tensor(targets, device=picked.device))
    result = model.agree(result, (2, sum(lengths)), torch.float64).cpu()
    if not result.isfinite().all():
        raise BadNumbersError("the model's logits are not finite: it cannot be scored")
    pieces = result.split(lengths, dim=1)
    return [Score(values.tolist(), bool(likeliest.all())) for values, likeliest in pieces]


def _token_scores(model: NativeModel, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[tokens, h] and [tokens] -> log-likelihood, and whether the token is the likeliest: float64 [2, tokens]."""
    piece, found = max(1, MOST_LOGITS // model.vocab_size), []
    for part, wanted in zip(states.split(piece), targets.split(piece), strict=True):
        logits = model.logits(part[:, None])[:, 0]
        values = logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
        found.append(torch.stack([values.double(), (logits.argmax(-1) == wanted).double()]))
    return torch.cat(found, dim=1)
