"""What a Hugging Face folder's config.json means as a training configuration; what has no counterpart is refused."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional

from transformers import CONFIG_MAPPING, PretrainedConfig

from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.errors import CheckpointError, ConfigError
from megatron_fbt.hf.configuration_fbt import FBTConfig

STOCK_TYPES = ("llama", "mistral", "qwen2", "qwen3")
SLIDING = "sliding_attention"
"""What transformers calls a layer with a window."""
LONGEST_ROW = 4096
"""Longest data.sequence_length that a stock model's max_position_embeddings becomes by itself."""


@dataclass(frozen=True)
class Source:
    """A folder's configuration.

    Attributes:
        config: With model.vocab_size; the sections run, data.tokenizer and precision are left at their defaults, and
            so is feedback.input_scale of a stock model.
        model_type: As transformers names it.
    """

    config: PretrainConfig
    model_type: str

    @property
    def is_fbt(self) -> bool:
        """Whether the folder has a feedback path of its own."""
        return self.model_type == FBTConfig.model_type


def read_source(folder: Path, fusion: Optional[str] = None, sequence_length: Optional[int] = None) -> Source:
    """Read config.json.

    Args:
        folder: An exported FBT, or a Llama, Mistral, Qwen2 or Qwen3.
        fusion: Variant of a stock model's fresh fusion layer; None = gate.
        sequence_length: data.sequence_length; None = max_position_embeddings, of a stock model 4096 at most.

    Raises:
        ConfigError: sequence_length is below 1.
        CheckpointError: The file cannot be read, or the model has features that this project has not; the message
            names every one with its value.
    """
    tree = _read_json(folder / "config.json")
    model_type = tree.get("model_type")
    if model_type != FBTConfig.model_type and model_type not in STOCK_TYPES:
        known = ", ".join((FBTConfig.model_type, *STOCK_TYPES))
        raise CheckpointError(f"{folder}: model_type = {model_type!r}: must be one of {known}. Give such a model.")
    if model_type == FBTConfig.model_type:
        if fusion is not None and fusion != tree.get("fusion"):
            raise CheckpointError(f"{folder}: fusion = {tree.get('fusion')!r}, not {fusion!r}: leave --fusion out")
        config = _fbt_config(_instance(FBTConfig, tree, folder))
    else:
        hf = _instance(CONFIG_MAPPING[model_type], tree, folder)
        problems = _unsupported(hf, tree)
        if problems:
            raise CheckpointError(f"{folder} cannot become a Full-Bandwidth Transformer: {'; '.join(problems)}")
        config = _stock_config(hf)
        config.feedback.fusion = fusion or "gate"
        config.data.sequence_length = min(config.data.sequence_length, LONGEST_ROW)
    if sequence_length is not None:
        if sequence_length < 1:
            raise ConfigError(f"sequence_length = {sequence_length}: must be at least 1")
        config.data.sequence_length = sequence_length
    problems = config.model.problems() + config.feedback.problems() + config.data.problems()
    if problems:
        raise CheckpointError(f"{folder}/config.json describes no usable model: {'; '.join(problems)}")
    return Source(config, model_type)


def _read_json(path: Path) -> Dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Name a folder with a Hugging Face model.") from error
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path} holds no configuration. Name a folder with a Hugging Face model.")
    return tree


def _instance(kind: type, tree: Dict[str, Any], folder: Path) -> PretrainedConfig:
    """The configuration as transformers reads it, defaults filled in."""
    try:
        return kind.from_dict(tree)
    except Exception as error:  # transformers checks types and values by various exceptions
        text = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{folder}/config.json is no {tree['model_type']} configuration: {text}") from error


def _common(hf: PretrainedConfig) -> PretrainConfig:
    """What every source has."""
    config = PretrainConfig()
    model = config.model
    model.num_layers, model.hidden_size = hf.num_hidden_layers, hf.hidden_size
    model.ffn_hidden_size, model.vocab_size = hf.intermediate_size, hf.vocab_size
    model.num_attention_heads = hf.num_attention_heads
    model.num_query_groups = hf.num_key_value_heads or hf.num_attention_heads
    model.kv_channels = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    model.layernorm_epsilon, model.init_method_std = hf.rms_norm_eps, hf.initializer_range
    model.rotary_base = _rope(hf)["rope_theta"]
    model.attention_dropout = hf.attention_dropout
    model.share_embeddings_and_output_weights = hf.tie_word_embeddings
    config.data.sequence_length = hf.max_position_embeddings
    return config


def _fbt_config(hf: FBTConfig) -> PretrainConfig:
    """The inverse of export.hf_config."""
    config = _common(hf)
    model, feedback, data = config.model, config.feedback, config.data
    model.qk_layernorm, model.add_qkv_bias = hf.qk_layernorm, hf.attention_bias
    model.attention_output_gate = hf.attention_output_gate
    model.sliding_window, model.window_attn_skip_freq = hf.sliding_window, hf.window_attn_skip_freq
    model.residual_multiplier, model.scaled_init = hf.residual_multiplier, hf.scaled_init
    model.hidden_dropout, model.input_norm = hf.hidden_dropout, hf.input_norm
    feedback.fusion, feedback.input_scale = hf.fusion, hf.input_scale
    if hf.regime == "standard" and hf.passes == 1:
        feedback.schedule = "standard"
    feedback.eval_passes = None if hf.passes == feedback.max_passes else hf.passes
    data.reset_attention_mask, data.reset_position_ids = hf.reset_attention_mask, hf.reset_position_ids
    return config


def _stock_config(hf: PretrainedConfig) -> PretrainConfig:
    """Plain inputs are the source's own, so that the ordinary mode is the source."""
    config = _common(hf)
    model = config.model
    model.input_norm = "none"
    model.qk_layernorm, model.add_qkv_bias = hf.model_type == "qwen3", hf.model_type == "qwen2"
    windows = _windows(hf)
    if any(windows):
        model.sliding_window = hf.sliding_window
        model.window_attn_skip_freq = _skip_freq(windows)
    return config


def _rope(hf: PretrainedConfig) -> Dict[str, Any]:
    """rope_theta, rope_type and what else there is, wherever this version of transformers keeps it."""
    found = dict(getattr(hf, "rope_scaling", None) or {})
    found.update(getattr(hf, "rope_parameters", None) or {})
    found.setdefault("rope_theta", getattr(hf, "rope_theta", None) or 10_000.0)
    found.setdefault("rope_type", found.get("type", "default"))
    found.setdefault("partial_rotary_factor", getattr(hf, "partial_rotary_factor", None) or 1.0)
    return found


def _windows(hf: PretrainedConfig) -> List[bool]:
    """For every layer, whether it has a sliding window."""
    count, window = hf.num_hidden_layers, getattr(hf, "sliding_window", None)
    if hf.model_type == "llama" or window is None:
        return [False] * count
    if hf.model_type == "mistral":
        return [True] * count
    return [kind == SLIDING for kind in hf.layer_types]


def _skip_freq(windows: List[bool]) -> Optional[int]:
    """n such that every n-th layer (counted from 1) has no window and every other one has.

    Returns:
        None if all have one; 0 if there is no such number.
    """
    if all(windows):
        return None
    first = windows.index(False) + 1
    return first if [number % first != 0 for number in range(1, len(windows) + 1)] == windows else 0


def _unsupported(hf: PretrainedConfig, tree: Dict[str, Any]) -> List[str]:
    """Every feature of a stock model that this project's models cannot have, with its value."""
    problems = []

    def refuse(field: str, value: Any, why: str) -> None:
        problems.append(f"{field} = {value!r}: {why}")

    if tree.get("quantization_config"):
        refuse("quantization_config", tree["quantization_config"], "give the unquantized model")
    if "auto_map" in tree:
        why = "code of the model's own is not executed; remove the entry if it is a stock model all the same"
        refuse("auto_map", tree["auto_map"], why)
    heads = [name for name in tree.get("architectures") or [] if not name.endswith("ForCausalLM")]
    if heads:
        refuse("architectures", heads, "give a ...ForCausalLM, with an output head over the vocabulary")
    if hf.hidden_act not in ("silu", "swish"):
        refuse("hidden_act", hf.hidden_act, "layers here have silu")
    if hf.model_type in ("llama", "qwen3") and hf.attention_bias:  # the other families do not read it
        refuse("attention_bias", True, "biases on the attention's output have no place here")
    if hf.model_type == "llama" and hf.mlp_bias:
        refuse("mlp_bias", True, "MLPs here have no biases")
    rope = _rope(hf)
    if rope["rope_type"] != "default":
        why = "the rotary embedding here has a base (model.rotary_base) and no scaling; give a model without it"
        refuse("rope_scaling", rope, why)
    if rope["partial_rotary_factor"] != 1:
        refuse("partial_rotary_factor", rope["partial_rotary_factor"], "the rotary embedding here turns whole heads")
    windows, types = _windows(hf), getattr(hf, "layer_types", None)
    if hf.model_type == "mistral" and types is not None and [kind == SLIDING for kind in types] != windows:
        refuse("layer_types", types, f"a mistral has sliding_window = {hf.sliding_window} in every layer or in none")
    elif any(windows) and _skip_freq(windows) == 0:
        why = f"the layers without the window of {hf.sliding_window} are not every n-th one (window_attn_skip_freq)"
        refuse("layer_types", types, why)
    return problems
