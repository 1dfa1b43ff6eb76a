"""Configuration of a Full-Bandwidth Transformer in Hugging Face form.

Self-contained: this file is copied into every exported model folder, so it imports nothing but transformers.
"""

from transformers import PretrainedConfig

INPUT_NORMS = ("rms", "none")
FUSIONS = ("gate", "concat", "add")
REGIMES = ("standard", "soft", "fused", "recurrent")


class FBTConfig(PretrainedConfig):
    """Shape of the network and of its feedback path (decoder-only; RMSNorm, RoPE, SwiGLU).

    Args:
        vocab_size: Entries of the vocabulary, without padding.
        hidden_size: Width D of the residual stream and of the carried state.
        intermediate_size: Inner width of the SwiGLU MLP.
        num_hidden_layers: Transformer layers.
        num_attention_heads: Query heads.
        num_key_value_heads: Key/value heads; None = num_attention_heads.
        head_dim: Size of one head; None = hidden_size // num_attention_heads.
        qk_layernorm: RMSNorm on queries and keys, per head.
        attention_bias: Biases on queries, keys and values (and on the output gates); no other layer has any.
        attention_output_gate: Multiply each attention output by the sigmoid of a projection of the layer's input.
        sliding_window: Positions that a query sees, its own included; None = all earlier ones.
        window_attn_skip_freq: Every n-th layer (counted from 1) sees all earlier positions all the same; None = none.
        residual_multiplier: Factor of each residual branch (attention, MLP), before it is added.
        rms_norm_eps: Epsilon of every norm, the weightless norm N of the fusion included.
        rope_theta: Base of the rotary position embedding.
        max_position_embeddings: Longest sequence seen in training, in tokens; longer ones are not refused.
        initializer_range: Standard deviation of initial weights.
        scaled_init: Residual outputs start with initializer_range / sqrt(2 num_hidden_layers).
        attention_dropout: Dropout on attention probabilities, in training.
        hidden_dropout: Dropout on the residual branches and the embedding, in training.
        input_norm: What the stack reads at a plain position: N(e) ("rms") or the embedding e itself ("none").
        fusion: What a fused input is N(...) * input_scale of: "gate" (W_U h) * sigmoid(W_G N(e)), "concat"
            W_C [N(h); N(e)], "add" W_U h + W_T N(e).
        input_scale: Scale of a fused input.
        reset_attention_mask: Attention stays within documents, in calls that give `document_starts`.
        reset_position_ids: Positions are counted from the start of each document, in such calls.
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
        attention_bias=False,
        attention_output_gate=False,
        sliding_window=None,
        window_attn_skip_freq=None,
        residual_multiplier=1.0,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=1024,
        initializer_range=0.02,
        scaled_init=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        input_norm="rms",
        fusion="gate",
        input_scale=1.0,
        reset_attention_mask=False,
        reset_position_ids=False,
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
        self.attention_bias = attention_bias
        self.attention_output_gate = attention_output_gate
        self.sliding_window = sliding_window
        self.window_attn_skip_freq = window_attn_skip_freq
        self.residual_multiplier = residual_multiplier
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.scaled_init = scaled_init
        self.attention_dropout = attention_dropout
        self.hidden_dropout = hidden_dropout
        self.input_norm = input_norm
        self.fusion = fusion
        self.input_scale = input_scale
        self.reset_attention_mask = reset_attention_mask
        self.reset_position_ids = reset_position_ids
        self.passes = passes
        self.regime = regime
        self.use_cache = use_cache
        self._check()
        for name in ("rope_scaling", "rope_parameters"):
            self._refuse_scaling(name, kwargs.pop(name, None))
        super().__init__(
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )

    @property
    def documents_apart(self):
        """Whether a call's `document_starts` change attention or positions, not only which inputs are plain."""
        return self.reset_attention_mask or self.reset_position_ids

    def window_of(self, layer_number):
        """Positions that a query sees in a layer (counted from 1), its own included; None = all earlier ones."""
        skips = self.window_attn_skip_freq is not None and layer_number % self.window_attn_skip_freq == 0
        return None if skips else self.sliding_window

    def to_diff_dict(self):
        """What config.json holds: some versions of transformers leave out a value that is their own default."""
        return {**super().to_diff_dict(), "tie_word_embeddings": self.tie_word_embeddings}

    def _refuse_scaling(self, name, value):
        """Other rotary embeddings than the plain one would be left out in silence."""
        plain = {"rope_type": "default", "type": "default", "rope_theta": self.rope_theta}
        if value and not (isinstance(value, dict) and all(plain.get(key) == held for key, held in value.items())):
            raise ValueError(f"{name}={value!r}: not supported, the model knows rope_theta alone; remove it")

    def _check(self):
        for name, allowed in (("input_norm", INPUT_NORMS), ("fusion", FUSIONS), ("regime", REGIMES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(allowed)}")
        for name in ("rms_norm_eps", "rope_theta", "input_scale", "residual_multiplier"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ValueError(f"{name}={value!r}: must be a finite number above 0")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: must be a whole number, at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: must be even, rotary embeddings turn pairs of channels")
        for name in ("passes", "sliding_window", "window_attn_skip_freq"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
