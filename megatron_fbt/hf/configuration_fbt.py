"""Configuration of a Full-Bandwidth Transformer in Hugging Face form.

Self-contained: this file is copied into every exported model folder, so it imports nothing but transformers.
"""

from transformers import PretrainedConfig

INPUT_NORMS = ("rms", "none")
FUSIONS = ("gate",)
REGIMES = ("standard", "soft", "fused", "recurrent")


class FBTConfig(PretrainedConfig):
    """Shape of the network and of its feedback path (decoder-only; RMSNorm, RoPE, SwiGLU, no biases).

    Args:
        vocab_size: Entries of the vocabulary, without padding.
        hidden_size: Width D of the residual stream and of the carried state.
        intermediate_size: Inner width of the SwiGLU MLP.
        num_hidden_layers: Transformer layers.
        num_attention_heads: Query heads.
        num_key_value_heads: Key/value heads; None = num_attention_heads.
        head_dim: Size of one head; None = hidden_size // num_attention_heads.
        qk_layernorm: RMSNorm on queries and keys, per head.
        rms_norm_eps: Epsilon of every norm, the weightless norm N of the fusion included.
        rope_theta: Base of the rotary position embedding.
        max_position_embeddings: Longest sequence seen in training, in tokens; longer ones are not refused.
        initializer_range: Standard deviation of initial weights; residual outputs use it / sqrt(2 num_hidden_layers).
        attention_dropout: Dropout on attention probabilities, in training.
        hidden_dropout: Dropout on the residual branches and the embedding, in training.
        input_norm: What the stack reads at a plain position: N(e) ("rms") or the embedding e itself ("none").
        fusion: "gate": u = N((W_U h) * sigmoid(W_G N(e))) * input_scale.
        input_scale: Scale of a fused input.
        passes: Parallel passes K of a forward call that names neither `passes` nor `regime`.
        regime: Regime of a `generate` call that names none: "standard", "soft", "fused" or "recurrent".
        tie_word_embeddings: Embedding and output head are one matrix.

    Raises:
        ValueError: A value that no model can have; the message names field and value.
    """

    model_type = "fbt"
    keys_to_ignore_at_inference = ["past_key_values", "cache", "pass_losses", "state"]

    def __init__(
        self,
        vocab_size=32000,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=None,
        head_dim=None,
        qk_layernorm=False,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=1024,
        initializer_range=0.02,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        input_norm="rms",
        fusion="gate",
        input_scale=1.0,
        passes=1,
        regime="soft",
        use_cache=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=True,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.head_dim = hidden_size // num_attention_heads if head_dim is None else head_dim
        self.qk_layernorm = qk_layernorm
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.attention_dropout = attention_dropout
        self.hidden_dropout = hidden_dropout
        self.input_norm = input_norm
        self.fusion = fusion
        self.input_scale = input_scale
        self.passes = passes
        self.regime = regime
        self.use_cache = use_cache
        self._check()
        super().__init__(
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )

    def to_diff_dict(self):
        """What config.json holds: some versions of transformers leave out a value that is their own default."""
        return {**super().to_diff_dict(), "tie_word_embeddings": self.tie_word_embeddings}

    def _check(self):
        for name, allowed in (("input_norm", INPUT_NORMS), ("fusion", FUSIONS), ("regime", REGIMES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(allowed)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: must be even, rotary embeddings turn pairs of channels")
        if self.passes < 1:
            raise ValueError(f"passes={self.passes}: must be at least 1")
