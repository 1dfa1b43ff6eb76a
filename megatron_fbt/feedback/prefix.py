"""Which positions are fused in an extra pass: document starts and prefix mix-in (method section 4)."""

from typing import Optional

import torch

from megatron_fbt.config.feedback import PrefixConfig
from megatron_fbt.feedback.counter import PREFIX, counter_hash, uniform
from megatron_fbt.model.attention_mask import document_index, document_positions

_WHETHER = 1
"""Last counter of the draw that decides whether there is a mix-in; the draw of its length has none."""


def document_spans(document_starts: torch.Tensor) -> tuple:
    """Index, start and length of the document (or part of one) that each position of a row lies in.

    Args:
        document_starts: [b, s] bool; position 0 of every row is one.

    Returns:
        Three int64 tensors [b, s].
    """
    positions = torch.arange(document_starts.size(1), device=document_starts.device).expand_as(document_starts)
    index, start = document_index(document_starts), positions - document_positions(document_starts)
    lengths = torch.zeros_like(index).scatter_add_(1, index, torch.ones_like(index))
    return index, start, lengths.gather(1, index)


def fused_positions(
    config: PrefixConfig,
    document_starts: torch.Tensor,
    sample_ids: torch.Tensor,
    pass_number: int,
    seed: int,
    region: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Positions whose input is fused in pass `pass_number` >= 2 of training.

    Args:
        config: prefix mix-in.
        document_starts: [b, s] bool.
        sample_ids: [b] int64, places in the global consumed order.
        pass_number: k, counted from 1.
        seed: run.seed.
        region: [b, s] bool, what the data mark as the feedback region; needed with granularity prompt.

    Returns:
        [b, s] bool.
    """
    if config.granularity == "prompt":
        assert region is not None, "the data mark no feedback region, see config/checks.py"
        return region & ~document_starts
    if config.probability == 0:
        return ~document_starts
    positions = torch.arange(document_starts.size(1), device=document_starts.device).expand_as(document_starts)
    if config.granularity == "row":
        index, start, length = 0, 0, document_starts.size(1)
    else:
        index, start, length = document_spans(document_starts)
    counters = (sample_ids[:, None], pass_number, index)
    u = uniform(counter_hash(seed, PREFIX, *counters))
    if config.exponent != 1:
        u = u**config.exponent
    plain_length = 1 + torch.floor((config.low + (config.high - config.low) * u) * length).long()
    if config.probability < 1:
        mixed_in = uniform(counter_hash(seed, PREFIX, *counters, _WHETHER)) < config.probability
        plain_length = torch.where(mixed_in, plain_length, 0)
    return ~document_starts & (positions - start >= plain_length)
