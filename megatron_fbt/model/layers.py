"""Layers of the `torch` backend that Megatron-Core's local spec lacks.

Shapes: s sequence (the rank's part of it under sequence parallelism), b micro batch, h hidden, np and ng query heads
and key/value heads of this rank, hn head size.
"""

from typing import Optional

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_fbt.model.attention_mask import AttentionMasks


def rms_normalize(x: torch.Tensor, eps: float) -> torch.Tensor:
    """N(x) = x / sqrt(mean(x^2) + eps) over the last dimension, without a weight."""
    return F.rms_norm(x, (x.size(-1),), None, eps)


class RMSNorm(torch.nn.Module):
    """RMSNorm with a weight, usable under sequence parallelism.

    Args:
        config: Megatron-Core's configuration; `sequence_parallel` marks the weight so that its gradient is summed over
            the tensor-parallel ranks, each of which sees a part of the sequence.
        hidden_size: size of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        options = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, **options))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> the same shape and type."""
        return F.rms_norm(x, (x.size(-1),), self.weight, self.eps)


class SDPAttention(torch.nn.Module):
    """Causal attention by PyTorch's scaled_dot_product_attention, in the place of Megatron-Core's core attention.

    Megatron-Core hands the attention mask through untouched: here it is the AttentionMasks of the micro-batch, of which
    a layer takes the one for its kind.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: Optional[float] = None,
        softmax_scale: Optional[float] = None,
        **unused,
    ):
        super().__init__()
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self"
        self.layer_number = layer_number
        self.windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Optional[AttentionMasks],
        **unused,
    ) -> torch.Tensor:
        """Attend to what the masks let a query see, causally.

        Args:
            query: [s, b, np, hn].
            key: [s, b, ng, hn].
            value: [s, b, ng, hn].
            attention_mask: None = all earlier positions.

        Returns:
            [s, b, np * hn].
        """
        assert attention_mask is not None or not self.windowed, "a layer with a window needs its mask"
        mask = attention_mask and (attention_mask.window if self.windowed else attention_mask.full)
        value = value.contiguous()  # kept for the backward, a view would keep the whole projection
        if attention_mask is not None and attention_mask.joined is not None:
            key, value = attention_mask.joined.join(self.layer_number, key, value)
        repeats = query.size(2) // key.size(2)
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=2) for x in (key, value))
        heads = [x.permute(1, 2, 0, 3) for x in (query, key, value)]  # [b, np, s, hn]
        if self.training and self.dropout > 0:
            with get_cuda_rng_tracker().fork():  # tensor-parallel ranks hold different heads: different masks
                context = self._attend(*heads, mask, self.dropout)
        else:
            context = self._attend(*heads, mask, 0.0)
        return context.permute(2, 0, 1, 3).flatten(2)

    def _attend(self, query, key, value, mask: Optional[torch.Tensor], dropout: float) -> torch.Tensor:
        """[b, np, s, hn] -> the same shape."""
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=self.softmax_scale
        )
