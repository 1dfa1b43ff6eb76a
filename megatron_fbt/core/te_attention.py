"""Transformer Engine's attention for a pass that computes the end of its rows alone (feedback.prefix_reuse)."""

from typing import Optional

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fbt.model.attention_mask import AttentionMasks


def joining(base: type) -> type:
    """A class of core attention that joins its keys and values with those of pass 1 before it attends.

    Args:
        base: Megatron-Core's TEDotProductAttention.
    """

    class JoiningAttention(base):
        """The base, given AttentionMasks; where queries are fewer than keys, the last of both belong together."""

        def __init__(self, config: TransformerConfig, layer_number: int, *args, **kwargs):
            super().__init__(config, layer_number, *args, **kwargs)
            self.joined_as = layer_number

        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: Optional[AttentionMasks],
            attn_mask_type: AttnMaskType,
            **kwargs,
        ) -> torch.Tensor:
            """See Megatron-Core's; query [s - start, b, np, hn], key and value [s - start, b, ng, hn]."""
            if attention_mask is not None:
                key, value = attention_mask.joined.join(self.joined_as, key, value)
            if query.size(0) < key.size(0):
                attn_mask_type = AttnMaskType.causal_bottom_right
            return super().forward(query, key, value, None, attn_mask_type, **kwargs)

    return JoiningAttention
