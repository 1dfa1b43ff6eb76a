"""Generation with a Full-Bandwidth Transformer: the cache with its carried state, checks, and transformers' generate.

Self-contained: this file is copied into every exported model folder, so it imports nothing but torch,
transformers and the files beside it.
"""

import inspect
import math

from transformers import DynamicCache, GenerationMixin

from .configuration_fbt import REGIMES

# What `generate` of the installed transformers calls the key/value cache.
CACHE_NAME = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)

# Settings of `generate` that the carried state excludes, with the values that leave them off (None does in all).
EXCLUDED = {
    "assistant_model": (),
    "assistant_early_exit": (),
    "prompt_lookup_num_tokens": (),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "inputs_embeds": (),
    "guidance_scale": (1,),
    "token_healing": (False,),
    "num_beam_groups": (1,),
    "force_words_ids": (),
    "constraints": (),
    "prefill_chunk_size": (),
    "cache_implementation": ("dynamic",),
}


class FBTCache(DynamicCache):
    """Keys and values, and what the feedback path carries from one call to the next."""

    def __init__(self, regime=None):
        super().__init__()
        self.regime = regime  # of the calls that go on from here
        self.state = None  # [B, D], top state of the last position
        self.padded = False  # some row starts with padding

    def reorder_cache(self, beam_idx):
        """Let row i go on from row beam_idx[i] (beam search)."""
        super().reorder_cache(beam_idx)
        if self.state is not None:
            self.state = self.state.index_select(0, beam_idx.to(self.state.device))

    def crop(self, *args, **kwargs):
        """Forget the last positions. The state before them is not kept, so fused tokens cannot go on from there."""
        length = self.get_seq_length()
        super().crop(*args, **kwargs)
        if self.get_seq_length() != length:
            self.state = None


def real_tokens(attention_mask, cache, past):
    """Boolean [B, S] that marks the tokens, or None where there is no padding."""
    if attention_mask is None or (past and not cache.padded):
        return None
    if attention_mask.dim() != 2:
        raise ValueError(f"attention_mask of shape {tuple(attention_mask.shape)}: must be [rows, positions], 1 = token")
    keep = attention_mask.bool()
    if past:
        return keep
    if keep.all():
        return None
    if cache is not None:
        if not keep[:, -1].all() or (keep[:, :-1] & ~keep[:, 1:]).any():
            raise ValueError("attention_mask: a prompt must be padded on the left only (padding_side='left')")
        cache.padded = True
    return keep


def check_regime(regime, fused_passes):
    if regime not in REGIMES:
        raise ValueError(f"regime={regime!r}: must be one of {', '.join(REGIMES)}")
    if not isinstance(fused_passes, int) or fused_passes < 1:
        raise ValueError(f"fused_passes={fused_passes!r}: must be a whole number, at least 1")


def check_sampling(temperature=None, top_k=None, top_p=None):
    """Refuse sampling parameters without a meaning; None = not set, temperature 0 = greedy, top_k 0 = off."""
    if temperature is not None and not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature}: must be a finite number, 0 (greedy) or larger")
    if top_k is not None and (not isinstance(top_k, int) or top_k < 0):
        raise ValueError(f"top_k={top_k}: must be a whole number, 0 (off) or larger")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: must be larger than 0 and at most 1 (off)")


class FBTGenerationMixin(GenerationMixin):
    """transformers' generate, with a regime and with greedy decoding at temperature 0."""

    def prepare_inputs_for_generation(
        self, input_ids, past_key_values=None, cache=None, attention_mask=None, use_cache=True, **kwargs
    ):
        cache = past_key_values if cache is None else cache
        if cache is not None and input_ids.shape[1] > cache.get_seq_length():
            input_ids = input_ids[:, cache.get_seq_length() :]
        passed_on = ("regime", "fused_passes", "prompt_length", "logits_to_keep")
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "past_key_values": cache,
            "use_cache": use_cache,
            **{name: kwargs[name] for name in passed_on if name in kwargs},
        }

    def build_gate_table(self):
        """Compute the gates of all tokens once; see FBTModel.build_gate_table."""
        self.model.build_gate_table()

    def load_custom_generate(self, *args, **kwargs):
        """No folder can replace `generate`: transformers 4 would execute code that it finds there, trusted or not.

        Raises:
            OSError: Always; while a model is loaded, transformers takes it for "there is none".
        """
        raise OSError("custom_generate is not supported: it would bypass the carried state; leave it out")

    def init_continuous_batching(self, *args, **kwargs):
        """Not in this model.

        Raises:
            ValueError: Always.
        """
        raise ValueError("continuous batching keeps no carried state between tokens: call generate with batches")

    def generate_batch(self, *args, **kwargs):
        """Not in this model; see init_continuous_batching."""
        self.init_continuous_batching()

    def choose_gate_table(self, wanted):
        """Make, drop or check the gate table (True, False, None = keep one that still fits)."""
        if wanted is False:
            self.model.gate_table = None
        elif wanted or self.model.gate_table is not None:
            self.model.build_gate_table()

    def generate(self, inputs=None, generation_config=None, regime=None, fused_passes=1, gate_table=None, **kwargs):
        """transformers' generate in one of the four regimes.

        Args:
            inputs: [B, P] prompt ids (also as input_ids); rows of different lengths are padded on the left.
            generation_config: As in transformers.
            regime: "standard", "soft", "fused" or "recurrent"; None = config.regime.
            fused_passes: Fused passes over the prompt in the fused regime.
            gate_table: True: look up the gates of tokens in a table, [vocab_size, hidden_size], which is computed in
                the first such call and stays with the model; False: compute them. None = as the model has it.
            kwargs: As in transformers; temperature 0 = greedy.

        Raises:
            ValueError: A parameter without a meaning, or a decoding method that the carried state excludes.
        """
        regime = self.config.regime if regime is None else regime
        check_regime(regime, fused_passes)
        self.choose_gate_table(gate_table)
        base = self.generation_config if generation_config is None else generation_config

        def setting(name):
            return kwargs[name] if name in kwargs else getattr(base, name, None)

        check_sampling(setting("temperature"), setting("top_k"), setting("top_p"))
        if setting("temperature") == 0:
            kwargs.update(do_sample=False, temperature=1.0, top_k=50, top_p=1.0)  # the defaults: no warning
        for name, off in EXCLUDED.items():
            value = setting(name)
            if value is not None and not (isinstance(value, (bool, int, float, str)) and value in off):
                shown = repr(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__
                raise ValueError(
                    f"{name}={shown} is not supported: it would rewind or bypass the carried state; leave it out"
                )
        prompt = kwargs.get("input_ids") if inputs is None else inputs
        caches = [kwargs.pop(name, None) for name in ("cache", "past_key_values")]
        if setting("use_cache") is not False:
            kwargs[CACHE_NAME] = next((cache for cache in caches if cache is not None), FBTCache())
        kwargs["prompt_length"] = 1 if prompt is None else prompt.shape[1]
        return super().generate(inputs, generation_config, regime=regime, fused_passes=fused_passes, **kwargs)
