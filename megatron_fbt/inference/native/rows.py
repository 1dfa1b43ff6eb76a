"""Rows of different lengths in one batch: padding on the left, positions, masks, and Megatron-Core's cache.

Shapes: b rows, s columns of this call, c columns up to the last new token, hn head size.
"""

from typing import Any, Dict, Optional, Sequence

import torch
from megatron.core.inference.contexts import StaticInferenceContext

from megatron_fbt.core.stage import FBTStage
from megatron_fbt.model.attention_mask import AttentionMasks


class Rows:
    """Token ids of a batch, and what attention must know of them.

    Padding lies left of a row's first token. It attends to itself alone, nothing attends to it, and a row's first token
    has position 0, so a row has the states that it would have by itself.

    Args:
        stage: the model's part of this process.
        prompts: token ids of each row, at least one.
        new_tokens: columns to keep free behind the prompts.
    """

    def __init__(self, stage: FBTStage, prompts: Sequence[Sequence[int]], new_tokens: int = 0):
        self.device, self.dtype = stage.layout.device, stage.config.params_dtype
        self.window = stage.context.window
        self.length = max(len(prompt) for prompt in prompts)
        capacity = self.length + new_tokens
        pads = [self.length - len(prompt) for prompt in prompts]
        tokens = [[0] * pad + list(prompt) for pad, prompt in zip(pads, prompts, strict=True)]
        self.tokens = torch.tensor(tokens, dtype=torch.int64, device=self.device)  # [b, s]
        self.pads = torch.tensor(pads, device=self.device)[:, None] if any(pads) else None  # [b, 1]
        columns = torch.arange(capacity, device=self.device)[None]
        self.positions = columns if self.pads is None else (columns - self.pads).clamp(min=0)  # [b or 1, c]
        angles = stage.context.rotary(capacity)  # [c, 1, 1, hn]
        self.rotary = angles if self.pads is None else angles[:, 0, 0][self.positions.t()].unsqueeze(2)
        self.cache = StaticInferenceContext(len(prompts), capacity)

    def fused_columns(self, begin: int, end: int) -> torch.Tensor:
        """Which columns may be fused: all but padding and each row's first token. [s, b] bool."""
        return (self.positions[:, begin:end] > 0).expand(len(self.tokens), -1).t()

    def attention(self, begin: int, end: int) -> Dict[str, Any]:
        """Arguments of the transformer block for columns [begin, end), after what the cache holds of [0, begin)."""
        masks = self._masks(begin, end)
        self.cache.sequence_len_offset = begin
        return {"attention_mask": masks, "rotary_pos_emb": self.rotary, "inference_context": self.cache}

    def _masks(self, begin: int, end: int) -> Optional[AttentionMasks]:
        """[b or 1, 1, queries, keys]; None where plain causal attention within the call is all that is needed."""
        if begin == 0 and self.pads is None and self.window is None:
            return None
        queries = torch.arange(begin, end, device=self.device)[:, None]
        keys = torch.arange(end, device=self.device)
        seen, itself = (keys <= queries)[None], keys == queries
        if self.pads is not None:
            seen = (seen & (keys >= self.pads[:, None])) | itself
        window = None if self.window is None else self._additive(seen & (queries - keys < self.window))
        return AttentionMasks(self._additive(seen), window)

    def _additive(self, seen: torch.Tensor) -> torch.Tensor:
        """bool [b or 1, queries, keys] -> 0 where true, -inf elsewhere, with a dimension for the heads."""
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~seen, float("-inf")).unsqueeze(1)
