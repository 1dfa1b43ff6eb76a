"""Shape of the network. Field names as Megatron-Core spells them."""

import math
from dataclasses import dataclass
from typing import Literal, Optional


@dataclass
class ModelConfig:
    """Architecture of one Full-Bandwidth Transformer (decoder-only, RMSNorm, RoPE, SwiGLU, no biases)."""

    num_layers: int = 4
    """Transformer layers in the whole model."""
    hidden_size: int = 128
    """Width D of the residual stream and of the carried state."""
    ffn_hidden_size: Optional[int] = None
    """Inner width of the SwiGLU MLP; null = 8/3 of hidden_size rounded up to a multiple of 64."""
    num_attention_heads: int = 4
    """Query heads."""
    num_query_groups: Optional[int] = None
    """Key/value heads (grouped-query attention); null = num_attention_heads."""
    kv_channels: Optional[int] = None
    """Size of one head; null = hidden_size / num_attention_heads."""
    qk_layernorm: bool = False
    """RMSNorm on queries and keys, per head."""
    layernorm_epsilon: float = 1e-5
    """Epsilon of every norm, the weightless N of the fusion included."""
    rotary_base: float = 10000.0
    """Base of the rotary position embedding."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights; residual outputs use std / sqrt(2 num_layers)."""
    attention_dropout: float = 0.0
    """Dropout on attention probabilities."""
    hidden_dropout: float = 0.0
    """Dropout on the residual branches and the embedding."""
    share_embeddings_and_output_weights: bool = True
    """Embedding and output head are one matrix."""
    input_norm: Literal["rms", "none"] = "rms"
    """What the stack reads at a plain position: N(e) (rms) or the embedding itself (none)."""
    vocab_size: Optional[int] = None
    """Entries of the vocabulary; null = the tokenizer's. Must not be smaller than the tokenizer's."""
    make_vocab_size_divisible_by: int = 128
    """The embedding is padded to a multiple of this times tensor_model_parallel_size; padded rows take no part."""
    transformer_impl: Literal["auto", "torch", "transformer_engine"] = "auto"
    """Layer backend; auto = transformer_engine where it is installed and a GPU is present, else torch."""

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Number of key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Inner width of the MLP."""
        return self.ffn_hidden_size or math.ceil(8 * self.hidden_size / 3 / 64) * 64
