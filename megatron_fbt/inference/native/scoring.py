"""Log-likelihood of given continuations: by parallel passes, or by the recurrence of decoding itself."""

import itertools
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple

import torch

from megatron_fbt.errors import ConfigError
from megatron_fbt.hf.generation_fbt import check_regime
from megatron_fbt.inference.native.decoding import Decoder, check_tokens
from megatron_fbt.inference.native.model import NativeModel
from megatron_fbt.inference.native.rows import Rows
from megatron_fbt.model.shift import shift_right

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
        passes: parallel passes over context and continuation, the plain one included; the more, the closer to decoding,
            which they equal from `exact_passes` on. None = decode token by token, the recurrence itself. The standard
            regime takes one pass in any case.
        batch_size: rows that are computed together.

    Raises:
        ConfigError: a setting without a meaning, or an empty context or continuation.
    """
    _check(model, pairs, regime, fused_passes, passes, batch_size)
    by_recurrence = passes is None and regime != "standard"
    order = sorted(range(len(pairs)), key=lambda i: (len(pairs[i][1]), len(pairs[i][0])))
    found: Dict[int, Score] = {}
    for batch in _batches(order, pairs, batch_size, by_recurrence):
        chosen = [pairs[i] for i in batch]
        if by_recurrence:
            states = _decoded_states(model, chosen, regime, fused_passes)
        else:
            states = _pass_states(model, chosen, regime, fused_passes, passes or 1)
        found.update(zip(batch, _scores(model, chosen, states), strict=True))
    return [found[i] for i in range(len(pairs))]


def exact_passes(context: int, continuation: int, regime: str, fused_passes: int = 1) -> int:
    """Parallel passes that equal decoding token by token, for so many tokens of context and continuation."""
    if regime == "standard":
        return 1
    if regime == "recurrent":
        return context + continuation - 1
    return continuation + (fused_passes if regime == "fused" else 0)


def _check(
    model: NativeModel, pairs: Sequence[Pair], regime: str, fused_passes: int, passes: Optional[int], batch: int
) -> None:
    try:
        check_regime(regime, fused_passes)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    least = 1 + fused_passes if regime == "fused" else 1
    if passes is not None and passes < least:
        raise ConfigError(f"passes={passes}: must be at least {least} in the {regime} regime")
    if batch < 1:
        raise ConfigError(f"batch_size={batch}: must be at least 1")
    for part in zip(*pairs):
        check_tokens(part, model.vocab_size)


def _batches(
    order: List[int], pairs: Sequence[Pair], batch_size: int, equal_continuations: bool
) -> List[Tuple[int, ...]]:
    """Pairs to compute together; in decoding, the rows of a batch leave their contexts in the same column."""
    groups = itertools.groupby(order, key=lambda i: len(pairs[i][1]) if equal_continuations else 0)
    whole = [list(members) for _, members in groups]
    return [tuple(group[i : i + batch_size]) for group in whole for i in range(0, len(group), batch_size)]


@torch.no_grad()
def _decoded_states(
    model: NativeModel, pairs: Sequence[Pair], regime: str, fused_passes: int
) -> Optional[torch.Tensor]:
    """States that predict the continuations, decoded: [n, b, h] on the last stage."""
    contexts, continuations = zip(*pairs)
    decoder = Decoder(model, contexts, regime, fused_passes, len(continuations[0]) - 1)
    states = [decoder.prompt()]
    tokens = torch.tensor([list(row) for row in continuations], device=model.layout.device)
    states += [decoder.step(tokens[:, t : t + 1]) for t in range(tokens.size(1) - 1)]
    if not model.layout.is_last_stage:
        return None
    return torch.cat([states[0][-1:], *states[1:]])


@torch.no_grad()
def _pass_states(
    model: NativeModel, pairs: Sequence[Pair], regime: str, fused_passes: int, passes: int
) -> Optional[torch.Tensor]:
    """States of the last of some parallel passes, that of each row's last column the last: [n, b, h]."""
    rows = Rows(model.stage, [[*context, *continuation[:-1]] for context, continuation in pairs], cached=False)
    length, held = rows.length, None
    behind = torch.tensor([len(continuation) - 1 for _, continuation in pairs], device=rows.device)
    answer = torch.arange(length, device=rows.device)[:, None] >= length - behind  # [s, b]
    prompt_passes = {"standard": 1, "soft": 1, "fused": 1 + fused_passes, "recurrent": passes}[regime]
    most = max(exact_passes(len(context), len(continuation), regime, fused_passes) for context, continuation in pairs)
    inputs = model.plain_inputs(rows.tokens)
    states = model.run(rows, inputs, 0, length)
    for number in range(2, min(passes, most) + 1):
        before = model.feed_back(rows, states, length)
        before = None if before is None else shift_right(before)
        held = inputs if number == prompt_passes + 1 else held
        inputs = model.fused_inputs(rows.tokens, before, rows.fused_columns(0, length))
        if number > prompt_passes and inputs is not None:
            inputs = torch.where(answer[..., None], inputs, held)
        states = model.run(rows, inputs, 0, length)
    return states


@torch.no_grad()
def _scores(model: NativeModel, pairs: Sequence[Pair], states: Optional[torch.Tensor]) -> List[Score]:
    """Scores of the continuations, whose last tokens the last columns predict."""
    targets = [token for _, continuation in pairs for token in continuation]
    result = None
    if states is not None:
        lengths = [len(continuation) for _, continuation in pairs]
        picked = torch.cat([states[-length:, row] for row, length in enumerate(lengths)])  # [tokens, h]
        result = _token_scores(model, picked, torch.tensor(targets, device=picked.device))
    result = model.agree(result, (2, len(targets)), torch.float64).cpu()
    found, begin = [], 0
    for _, continuation in pairs:
        values, likeliest = result[:, begin : begin + len(continuation)]
        found.append(Score(values.tolist(), bool(likeliest.all())))
        begin += len(continuation)
    return found


def _token_scores(model: NativeModel, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[tokens, h] and [tokens] -> log-likelihood, and whether the token is the likeliest: float64 [2, tokens]."""
    piece, found = max(1, MOST_LOGITS // model.vocab_size), []
    for part, wanted in zip(states.split(piece), targets.split(piece), strict=True):
        logits = model.logits(part[:, None])[:, 0]
        values = logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
        found.append(torch.stack([values.double(), (logits.argmax(-1) == wanted).double()]))
    return torch.cat(found, dim=1)
