"""Continuations of many prompts, batch by batch; the batch that a prompt is in does not matter to its text."""

import sys
import time
from collections import Counter
from typing import Any, Dict, Iterator, List, Optional, Sequence, TextIO

import torch
from transformers import LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from megatron_fbt.errors import ConfigError
from megatron_fbt.inference.prompts import Prompt
from megatron_fbt.inference.sampling import FiniteLogits, SeededSampling, row_seed
from megatron_fbt.inference.text import GenerationOptions, decode_continuation


class TokenCounter(BaseStreamer):
    """Shows on a terminal how many tokens there are so far."""

    def __init__(self, total: int, terminal: TextIO) -> None:
        self.total = total
        self.terminal = terminal
        self.count = -1  # the prompt comes first

    def put(self, value: torch.Tensor) -> None:
        self.count += 1
        self.terminal.write(f"\r{self.count}/{self.total} tokens")
        self.terminal.flush()

    def end(self) -> None:
        self.terminal.write("\r\033[K")


class TextPrinter(BaseStreamer):
    """Writes the continuation of one prompt as its tokens come; all of it is what decode_continuation gives."""

    def __init__(self, tokenizer: Any, prompt: List[int], out: TextIO) -> None:
        self.tokenizer, self.prompt, self.out = tokenizer, prompt, out
        self.new: Optional[List[int]] = None
        self.written = ""

    def put(self, value: torch.Tensor) -> None:
        if self.new is None:  # the prompt comes first
            self.new = []
            return
        self.new += value.flatten().tolist()
        text = decode_continuation(self.tokenizer, self.prompt, self.new)
        if not text.endswith("\ufffd"):  # half a character
            self._write(text)

    def end(self) -> None:
        self._write(decode_continuation(self.tokenizer, self.prompt, self.new or []))

    def _write(self, text: str) -> None:
        if text.startswith(self.written):
            self.out.write(text[len(self.written) :])
            self.out.flush()
            self.written = text


def continue_prompts(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    options: GenerationOptions,
    batch_size: int = 8,
    terminal: Optional[TextIO] = None,
    stream: Optional[TextIO] = None,
) -> Iterator[List[Dict[str, Any]]]:
    """Continue prompts of any lengths.

    Args:
        model: From load_network.
        tokenizer: From load_tokenizer.
        prompts: In the order of the results.
        options: Checked here.
        batch_size: Prompts that are continued together; 1 with `stream`.
        terminal: Where a running token count is shown; None = nowhere.
        stream: Where the text is written as it comes; None = nowhere.

    Yields:
        For each batch a list with, for each prompt: number (from 1), prompt, continuation, regime, prompt_tokens,
        new_tokens, token_ids of the continuation, seconds of the batch, tokens_per_second of the whole batch, finish
        ("eos" or "length").

    Raises:
        ConfigError: An option without a meaning.
        BadNumbersError: A logit is not finite.
    """
    options.validate()
    if batch_size < 1 or (stream is not None and batch_size > 1):
        raise ConfigError(f"batch_size={batch_size}: must be at least 1, and 1 where text is streamed")
    warn_of_length(model, prompts, options.max_new_tokens)
    before: Counter = Counter()
    for begin in range(0, len(prompts), batch_size):
        batch = prompts[begin : begin + batch_size]
        seeds = []
        for prompt in batch:
            seeds.append(row_seed(options.seed, prompt.ids, before[tuple(prompt.ids)]))
            before[tuple(prompt.ids)] += 1
        streamer: Optional[BaseStreamer] = None
        if stream is not None:
            streamer = TextPrinter(tokenizer, batch[0].ids, stream)
        elif terminal is not None:
            streamer = TokenCounter(options.max_new_tokens, terminal)
        began = time.perf_counter()
        rows = _generate(model, batch, options, seeds, streamer)
        yield _describe(model, tokenizer, batch, options, rows, begin, time.perf_counter() - began)


def warn_of_length(model: Any, prompts: Sequence[Prompt], new_tokens: int) -> None:
    """Say on standard error that texts may become longer than what the model was trained on."""
    longest, trained = max(len(prompt.ids) for prompt in prompts) + new_tokens, model.config.max_position_embeddings
    if longest > trained:
        print(f"warning: up to {longest} tokens, the model was trained on rows of {trained}", file=sys.stderr)


def _generate(
    model: Any,
    batch: Sequence[Prompt],
    options: GenerationOptions,
    seeds: List[int],
    streamer: Optional[BaseStreamer],
) -> List[List[int]]:
    """New tokens of each row, with the one that ended its text."""
    width = max(len(prompt.ids) for prompt in batch)
    ids = torch.tensor([[0] * (width - len(prompt.ids)) + prompt.ids for prompt in batch])
    mask = torch.tensor([[0] * (width - len(prompt.ids)) + [1] * len(prompt.ids) for prompt in batch])
    processors = LogitsProcessorList([FiniteLogits()])
    if options.temperature > 0:
        processors.append(SeededSampling(options.temperature, options.top_k, options.top_p, seeds, width))
    output = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        regime=options.regime,
        fused_passes=options.fused_passes,
        gate_table=True if options.gate_table else None,
        max_new_tokens=options.max_new_tokens,
        do_sample=False,
        logits_processor=processors,
        streamer=streamer,
    )
    ends = end_tokens(model)
    rows = []
    for row in output[:, width:].tolist():
        stop = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
        rows.append(row[:stop])
    return rows


def end_tokens(model: Any) -> set:
    """Ids that end a text."""
    ends = model.generation_config.eos_token_id
    return set() if ends is None else set(ends) if isinstance(ends, (list, tuple)) else {ends}


def _describe(
    model: Any,
    tokenizer: Any,
    batch: Sequence[Prompt],
    options: GenerationOptions,
    rows: List[List[int]],
    begin: int,
    seconds: float,
) -> List[Dict[str, Any]]:
    speed, ends = sum(map(len, rows)) / seconds, end_tokens(model)
    return [
        {
            "number": begin + place + 1,
            "prompt": prompt.content,
            "continuation": decode_continuation(tokenizer, prompt.ids, new),
            "regime": options.regime,
            "prompt_tokens": len(prompt.ids),
            "new_tokens": len(new),
            "token_ids": new,
            "seconds": round(seconds, 3),
            "tokens_per_second": round(speed, 1),
            "finish": "eos" if new[-1] in ends else "length",
        }
        for place, (prompt, new) in enumerate(zip(batch, rows, strict=True))
    ]


def continue_text(
    model: Any, tokenizer: Any, prompt: str, options: GenerationOptions, terminal: Optional[TextIO] = None
) -> Dict[str, Any]:
    """Continue one prompt; see continue_prompts.

    Raises:
        ConfigError: An option without a meaning, or an empty prompt.
    """
    options.validate()
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    if not ids:
        raise ConfigError("the prompt is empty: give at least one token")
    return next(continue_prompts(model, tokenizer, [Prompt(prompt, list(ids))], options, 1, terminal))[0]
