"""The choice of the next token: greedy, or drawn so that a row's text depends on its seed alone."""

import hashlib
from typing import Sequence

import torch
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from megatron_fbt.errors import BadNumbersError
from megatron_fbt.feedback.counter import TOKEN, counter_hash, uniform


def choose_tokens(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, seeds: Sequence[int], number: int
) -> torch.Tensor:
    """One token for each row.

    The distribution is that of transformers' own processors. The draw is a function of the row's seed and the number of
    the token, so neither the other rows of the batch nor their order matter.

    Args:
        logits: float32 [b, v].
        temperature: 0 = greedy.
        top_k: draw among so many; 0 = all.
        top_p: draw among the likeliest tokens that hold this share; 1 = all.
        seeds: of each row, below 2**56.
        number: how many tokens were chosen before.

    Returns:
        int64 [b].
    """
    if temperature == 0:
        return logits.argmax(-1)
    scores = logits.double() - logits.double().amax(-1, keepdim=True)  # the likeliest stays 0 at any temperature
    scores = TemperatureLogitsWarper(float(temperature))(None, scores)
    if top_k:
        scores = TopKLogitsWarper(min(top_k, logits.size(-1)))(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(float(top_p))(None, scores)
    cumulated = scores.softmax(-1).cumsum(-1)
    draws = torch.stack([uniform(counter_hash(seed, TOKEN, number)) for seed in seeds]).to(logits.device)
    found = torch.searchsorted(cumulated, (draws * cumulated[:, -1])[:, None], right=True)[:, 0]
    return found.clamp(max=logits.size(-1) - 1)


def row_seed(seed: int, ids: Sequence[int], occurrence: int = 0) -> int:
    """Seed of a prompt's draws, below 2**56: of its own tokens, so that its place among other prompts does not matter.

    Args:
        seed: The user's.
        ids: Tokens of the prompt.
        occurrence: How many equal prompts come before it, so that equal prompts get texts of their own.
    """
    content = f"{seed} {occurrence} {' '.join(map(str, ids))}"
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:7], "big")


class SeededSampling(LogitsProcessor):
    """Makes transformers' greedy search draw each token by choose_tokens.

    Args:
        temperature: Larger than 0.
        top_k: As in choose_tokens.
        top_p: As in choose_tokens.
        seeds: Of the rows.
        prompt_length: Columns of the prompts.
    """

    def __init__(self, temperature: float, top_k: int, top_p: float, seeds: Sequence[int], prompt_length: int):
        self.settings, self.seeds, self.prompt_length = (temperature, top_k, top_p), seeds, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores [b, v] of which only the drawn token is left."""
        number = input_ids.shape[1] - self.prompt_length
        drawn = choose_tokens(scores.float(), *self.settings, self.seeds, number)
        return torch.full_like(scores, float("-inf")).scatter(1, drawn[:, None], 0.0)


class FiniteLogits(LogitsProcessor):
    """Passes logits on, and ends generation where there is no next token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores [b, v] as they are.

        Raises:
            BadNumbersError: One of them is not finite.
        """
        if not scores.isfinite().all():
            raise BadNumbersError("the model's logits are not finite: there is no next token")
        return scores
