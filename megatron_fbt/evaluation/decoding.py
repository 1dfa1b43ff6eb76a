"""Continuations of prompts up to stop strings: batched, with sampling that does not depend on the batch."""

from dataclasses import dataclass, field
from typing import Any, Dict, List, Sequence, Tuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from megatron_fbt.inference.sampling import FiniteLogits, SeededSampling
from megatron_fbt.inference.text import decode_continuation


@dataclass
class Decoding:
    """How to go on from a prompt.

    Attributes:
        until: Strings that end the continuation; they are not part of it.
        max_new_tokens: Most tokens.
        temperature: 0 = greedy.
        top_k: Sample among this many likeliest tokens; 0 = all.
        top_p: Sample among the likeliest tokens that hold this share of the probability; 1 = all.
    """

    until: Tuple[str, ...] = ()
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass
class Continuation:
    """What came of one prompt.

    Attributes:
        text: Up to the stop string.
        ids: Tokens of the whole continuation, end-of-text and stop string included.
        finish: "stop" (a stop string), "eos" or "length".
        prompt_ids: What was continued.
    """

    text: str
    ids: List[int]
    finish: str
    prompt_ids: List[int] = field(default_factory=list)


class StopStrings(StoppingCriteria):
    """Ends each row whose new text holds a stop string."""

    def __init__(self, tokenizer: Any, until: Sequence[str], prompt: int) -> None:
        self.tokenizer, self.until, self.prompt = tokenizer, until, prompt
        self.tail = 4 + max(len(text.encode("utf-8")) for text in until)  # a token stands for a byte or more

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        tails = input_ids[:, max(self.prompt, input_ids.shape[1] - self.tail) :].tolist()
        texts = self.tokenizer.batch_decode(tails, skip_special_tokens=True)
        done = [any(stop in text for stop in self.until) for text in texts]
        return torch.tensor(done, device=input_ids.device)


@torch.no_grad()
def continue_prompts(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[List[int]],
    seeds: Sequence[int],
    decoding: Decoding,
    regime: str,
    fused_passes: int = 1,
) -> List[Continuation]:
    """Continue a batch of prompts.

    Args:
        model: An exported model.
        tokenizer: Its tokenizer.
        prompts: Token ids, each at least one.
        seeds: Of the rows' sampling, see choose_tokens.
        decoding: Until when, and how.
        regime, fused_passes: As in the model's generate.

    Raises:
        BadNumbersError: A logit is not finite.
    """
    width = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    keep = torch.zeros_like(ids)
    for place, prompt in enumerate(prompts):
        ids[place, width - len(prompt) :] = torch.tensor(prompt)
        keep[place, width - len(prompt) :] = 1
    end = model.generation_config.eos_token_id
    ends = set(end if isinstance(end, list) else [] if end is None else [end])
    options: Dict[str, Any] = {}
    if decoding.until:
        options["stopping_criteria"] = StoppingCriteriaList([StopStrings(tokenizer, decoding.until, width)])
    processors = LogitsProcessorList([FiniteLogits()])
    if decoding.temperature > 0:
        processors.append(SeededSampling(decoding.temperature, decoding.top_k, decoding.top_p, seeds, width))
    output = model.generate(
        ids.to(model.device),
        attention_mask=keep.to(model.device),
        regime=regime,
        fused_passes=fused_passes,
        max_new_tokens=decoding.max_new_tokens,
        pad_token_id=min(ends, default=0),
        temperature=0,
        logits_processor=processors,
        **options,
    )
    return [_finish(tokenizer, prompt, row[width:].tolist(), decoding, ends) for prompt, row in zip(prompts, output)]


def _finish(tokenizer: Any, prompt: List[int], new: List[int], decoding: Decoding, ends: set) -> Continuation:
    """Cut what a row has after its own end."""
    finish = "length"
    place = next((place for place, token in enumerate(new) if token in ends), None)
    if place is not None:
        new, finish = new[: place + 1], "eos"
    text = decode_continuation(tokenizer, prompt, new)
    stops = [text.find(stop) for stop in decoding.until if stop in text]
    if stops:
        first = min(stops)
        longest = max(len(stop) for stop in decoding.until if text.startswith(stop, first))
        new, finish = new[: tokens_until(tokenizer, prompt, new, first + longest)], "stop"
        text = text[:first]
    return Continuation(text, new, finish, prompt)


def tokens_until(tokenizer: Any, prompt: List[int], new: List[int], end: int) -> int:
    """How many of the new tokens it takes for `end` characters of the continuation."""
    low, high = 0, len(new)
    while low < high:
        middle = (low + high) // 2
        if len(decode_continuation(tokenizer, prompt, new[:middle])) >= end:
            high = middle
        else:
            low = middle + 1
    return low
