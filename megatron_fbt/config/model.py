"""Shape of the network. Field names as Megatron-Core spells them."""

import math
from dataclasses import dataclass
from typing import List, Literal, Optional

from megatron_fbt.config.rules import Rules, Section


@dataclass
class ModelConfig(Section):
    """Architecture of one Full-Bandwidth Transformer (decoder-only, RMSNorm, RoPE, SwiGLU)."""

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
    add_qkv_bias: bool = False
    """Biases on queries, keys and values (and on the gates of attention_output_gate), zero at first; no other layer has
    any."""
    attention_output_gate: bool = False
    """Multiply each attention output by a sigmoid gate computed from the layer's input, element by element."""
    sliding_window: Optional[int] = None
    """Positions that a query sees, its own included; null = all earlier ones."""
    window_attn_skip_freq: Optional[int] = None
    """Every n-th layer (counted from 1) sees all earlier positions in spite of sliding_window; null = no layer does."""
    layernorm_epsilon: float = 1e-5
    """Epsilon of every norm, the weightless N of the fusion included."""
    rotary_base: float = 10000.0
    """Base of the rotary position embedding."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights."""
    scaled_init: bool = True
    """Depth scaling: the residual branches' output projections start with init_method_std / sqrt(2 num_layers)."""
    residual_multiplier: float = 1.0
    """Each residual branch (attention, MLP) is multiplied by this before it is added."""
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

    def window_of(self, layer_number: int) -> Optional[int]:
        """Positions that a query sees in a layer (counted from 1), its own included; None = all earlier ones."""
        skips = self.window_attn_skip_freq is not None and layer_number % self.window_attn_skip_freq == 0
        return None if skips else self.sliding_window

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("model", self)
        rules.integers("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
        rules.integers("kv_channels", "vocab_size", "make_vocab_size_divisible_by")
        rules.integers("sliding_window")
        rules.integers("window_attn_skip_freq", low=2)
        rules.numbers("layernorm_epsilon", "rotary_base", "init_method_std", "residual_multiplier", above=True)
        rules.numbers("attention_dropout", "hidden_dropout", high=1.0, below=True)
        if rules.usable("num_attention_heads", "num_query_groups"):
            groups, heads = self.query_groups, self.num_attention_heads
            why = f"model.num_attention_heads = {heads} is not a multiple of it"
            rules.require(heads % groups == 0, "num_query_groups", why, f"give a divisor of {heads}")
        if rules.usable("sliding_window", "window_attn_skip_freq") and self.window_attn_skip_freq is not None:
            why, remedy = "there is no window that layers could skip", "set model.sliding_window, or this to null"
            rules.require(self.sliding_window is not None, "window_attn_skip_freq", why, remedy)
        if rules.usable("hidden_size", "num_attention_heads", "kv_channels"):
            self._head_size_rules(rules)
        return rules.problems

    def _head_size_rules(self, rules: Rules) -> None:
        """A head has a whole, even size: the rotary embedding turns pairs of channels."""
        if self.kv_channels is not None:
            remedy = "give an even number"
            rules.require(self.kv_channels % 2 == 0, "kv_channels", "odd; the rotary embedding needs pairs", remedy)
            return
        heads = self.num_attention_heads
        why = f"not a multiple of model.num_attention_heads = {heads} with an even quotient"
        remedy = f"give a multiple of {2 * heads}, or set model.kv_channels"
        rules.require(self.hidden_size % (2 * heads) == 0, "hidden_size", why, remedy)
