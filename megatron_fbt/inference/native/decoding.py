"""The four regimes on the Megatron model (method section 1): prompts, steps, and greedy or sampled text.

Shapes: n columns, b rows, h hidden; states are [n, b, h].
"""

from dataclasses import dataclass
from typing import Callable, List, Optional, Sequence

import torch

from megatron_fbt.errors import BadNumbersError, ConfigError
from megatron_fbt.inference.native.model import NativeModel
from megatron_fbt.inference.native.rows import Rows
from megatron_fbt.inference.sampling import choose_tokens
from megatron_fbt.inference.text import GenerationOptions


class Decoder:
    """Takes a batch through a regime: the prompt once, then one column at a time. Every method is collective.

    Args:
        model: the model.
        prompts: token ids of each row, at least one.
        regime: standard, soft, fused or recurrent.
        fused_passes: fused passes over the prompt in the fused regime.
        new_tokens: most columns that will be added.
    """

    def __init__(
        self,
        model: NativeModel,
        prompts: Sequence[Sequence[int]],
        regime: str,
        fused_passes: int = 1,
        new_tokens: int = 0,
    ):
        self.model, self.regime, self.fused_passes = model, regime, fused_passes
        self.rows = Rows(model.stage, prompts, new_tokens)
        self.done = 0
        """Columns that are in the cache."""
        self._last: Optional[torch.Tensor] = None

    @torch.no_grad()
    def prompt(self) -> Optional[torch.Tensor]:
        """The whole prompt; its top states on the last stage, None on the others."""
        rows, length = self.rows, self.rows.length
        if self.regime == "recurrent":
            states = [self.step(rows.tokens[:, t : t + 1]) for t in range(length)]
            return torch.cat(states) if self.model.layout.is_last_stage else None
        count = 1 + self.fused_passes if self.regime == "fused" else 1
        states = self.model.passes(rows, rows.tokens, 0, count)
        self.done, self._last = length, None if states is None else states[-1:]
        return states

    @torch.no_grad()
    def passes(self, tokens: torch.Tensor, count: int) -> Optional[torch.Tensor]:
        """What follows the prompt, by parallel passes instead of one by one; it does not go on from there.

        Args:
            tokens: [b, n].
            count: passes; the states of the first `count` - 1 columns are those of decoding.

        Returns:
            Top states [n, b, h] on the last stage, None on the others.
        """
        last = self.model.feed_back(self.rows, self._last, 1)
        return self.model.passes(self.rows, tokens, self.done, count, last)

    @torch.no_grad()
    def step(self, tokens: torch.Tensor) -> Optional[torch.Tensor]:
        """One more column.

        Args:
            tokens: [b, 1].

        Returns:
            Its top states [1, b, h] on the last stage, None on the others.
        """
        model, rows, begin, end = self.model, self.rows, self.done, self.done + 1
        if self.regime == "standard" or begin == 0:
            inputs = model.plain_inputs(tokens)
        else:
            before = model.feed_back(rows, self._last, 1)
            inputs = model.fused_inputs(tokens, before, rows.fused_columns(begin, end))
        self._last = model.run(rows, inputs, begin, end)
        self.done = end
        return self._last


@dataclass
class Generated:
    """The continuation of one prompt."""

    token_ids: List[int]
    """New tokens, with the one that ended the text."""
    finish: str
    """eos or length."""


def generate(
    model: NativeModel,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    eos: Optional[int] = None,
    seeds: Optional[Sequence[int]] = None,
    on_tokens: Optional[Callable[[List[Optional[int]]], None]] = None,
) -> List[Generated]:
    """Continue prompts of any lengths in one batch; collective, and with the same result on every process.

    Args:
        model: the model.
        prompts: token ids of each, at least one.
        options: regime, sampling, and most tokens to generate.
        eos: token that ends a text; None = none does.
        seeds: of the rows' draws; None = options.seed for each.
        on_tokens: called after each step with the new token of each row, None for a row that has ended.

    Raises:
        ConfigError: an option without a meaning, or a prompt without a token or with an unknown one.
        BadNumbersError: a logit is not finite.
    """
    options.validate()
    check_tokens(prompts, model.vocab_size)
    seeds = [options.seed] * len(prompts) if seeds is None else list(seeds)
    if len(seeds) != len(prompts) or any(not 0 <= seed < 2**56 for seed in seeds):
        raise ConfigError("seed: one for each prompt, at least 0 and smaller than 2^56")
    decoder = Decoder(model, prompts, options.regime, options.fused_passes, options.max_new_tokens - 1)
    states = decoder.prompt()
    results: List[List[int]] = [[] for _ in prompts]
    open_rows = [True] * len(prompts)
    for number in range(options.max_new_tokens):
        tokens = _choose(model, states, options, seeds, number)
        found = [token if is_open else None for token, is_open in zip(tokens.tolist(), open_rows, strict=True)]
        for row, token in enumerate(found):
            if token is not None:
                results[row].append(token)
                open_rows[row] = token != eos
        if on_tokens is not None:
            on_tokens(found)
        if not any(open_rows) or number == options.max_new_tokens - 1:
            break
        states = decoder.step(tokens[:, None])
    return [Generated(ids, "length" if is_open else "eos") for ids, is_open in zip(results, open_rows, strict=True)]


def check_tokens(rows: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Refuse rows without a token or with one that the model does not know.

    Raises:
        ConfigError: naming the row.
    """
    if not rows:
        raise ConfigError("there is no prompt: give at least one")
    for number, row in enumerate(rows):
        if not len(row):
            raise ConfigError(f"prompt {number} is empty: give at least one token")
        if not (0 <= min(row) and max(row) < vocab_size):
            raise ConfigError(f"prompt {number}: its token ids must lie between 0 and {vocab_size - 1}")


@torch.no_grad()
def _choose(
    model: NativeModel, states: Optional[torch.Tensor], options: GenerationOptions, seeds: List[int], number: int
) -> torch.Tensor:
    """The next token of each row, [b], the same on all processes."""
    tokens = None
    if states is not None:
        logits = model.logits(states[-1:])[0]
        tokens = choose_tokens(logits, options.temperature, options.top_k, options.top_p, seeds, number)
        tokens = tokens.masked_fill(~logits.isfinite().all(-1), -1)
    tokens = model.agree(tokens, (len(seeds),), torch.int64)
    if (tokens < 0).any():
        raise BadNumbersError("the model's logits are not finite: there is no next token")
    return tokens
