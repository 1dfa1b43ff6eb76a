"""A model's plain mode as one of transformers' own classes, where one computes exactly the same.

Plain mode leaves the fusion out. What the stock classes lack is folded into weights: N(e) into the rows of the
embedding, the factor of the residual branches into their output projections.
"""

import dataclasses
from typing import Any, Dict, Iterator, List, Tuple

import torch
from transformers import AutoConfig, PretrainedConfig

from megatron_fbt.config.model import ModelConfig
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.errors import ConfigError
from megatron_fbt.hf.weights import EMBEDDING, RowMap, hf_tensors

BRANCH_OUTPUTS = (".self_attn.o_proj.weight", ".mlp.down_proj.weight")
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
}


def stock_class(model: ModelConfig) -> str:
    """Name of the class that computes the plain mode of this architecture.

    Raises:
        ConfigError: There is none; the message names the option.
    """
    for name, why in _obstacles(model):
        raise ConfigError(
            f"model.{name} = {getattr(model, name)}: {why}, so that plain mode has no stock class. Use --format fbt."
        )
    if model.qk_layernorm:
        return "Qwen3ForCausalLM"
    if model.add_qkv_bias:
        return "Qwen2ForCausalLM"
    if model.sliding_window is None:
        return "LlamaForCausalLM"
    return "MistralForCausalLM" if model.window_attn_skip_freq is None else "SmolLM3ForCausalLM"


def has_stock_class(model: ModelConfig) -> bool:
    """Whether stock_class names one."""
    return not any(True for _ in _obstacles(model))


def _obstacles(model: ModelConfig) -> Iterator[Tuple[str, str]]:
    """Options that no stock class has, and why."""
    if model.attention_output_gate:
        yield "attention_output_gate", "no stock class gates attention outputs like this"
    if model.qk_layernorm and model.add_qkv_bias:
        yield "add_qkv_bias", "no stock class has both biases and norms on queries and keys"


def stock_config(config: PretrainConfig, vocab_size: int, fields: Dict[str, Any]) -> Tuple[PretrainedConfig, dict]:
    """The configuration of the stock class.

    Args:
        config: The run's configuration.
        vocab_size: Rows of the unpadded embedding.
        fields: What the configuration shares with every format: special tokens and number format.

    Returns:
        The configuration, and the fields that config.json must hold whatever a release's defaults are.

    Raises:
        ConfigError: See stock_class.
    """
    model = config.model
    architecture = stock_class(model)
    fields = {
        **fields,
        "architectures": [architecture],
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.query_groups,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": model.layernorm_epsilon,
        "rope_theta": model.rotary_base,
        "max_position_embeddings": config.data.sequence_length,
        "initializer_range": model.init_method_std,
        "attention_dropout": model.attention_dropout,
        "tie_word_embeddings": stays_tied(model),
        "bos_token_id": None,
    }
    if architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM"):
        fields["attention_bias"] = False
    if architecture in ("LlamaForCausalLM", "SmolLM3ForCausalLM"):
        fields["mlp_bias"] = False
    fields.update(_window_fields(model, architecture))
    return AutoConfig.for_model(MODEL_TYPES[architecture], **fields), fields


def _window_fields(model: ModelConfig, architecture: str) -> Dict[str, Any]:
    """Windows in the words of the class."""
    if architecture == "LlamaForCausalLM":
        return {}
    fields: Dict[str, Any] = {"sliding_window": model.sliding_window}
    if architecture == "MistralForCausalLM":
        return fields
    windows = [model.window_of(number) for number in range(1, model.num_layers + 1)]
    fields["use_sliding_window"] = model.sliding_window is not None
    fields["layer_types"] = ["full_attention" if window is None else "sliding_attention" for window in windows]
    if architecture == "SmolLM3ForCausalLM":
        fields["no_rope_layers"] = [1] * model.num_layers  # 1 = this layer has rotary embeddings
    else:
        fields["max_window_layers"] = model.num_layers if model.sliding_window is None else 0
    return fields


def stays_tied(model: ModelConfig) -> bool:
    """Whether embedding and head are one matrix in the stock class: not where N is folded into the embedding."""
    return model.share_embeddings_and_output_weights and model.input_norm == "none"


def stock_tensors(config: PretrainConfig, vocab_size: int) -> List[RowMap]:
    """What the export consists of; the fusion is left out."""
    model = config.model
    found = []
    for row_map in hf_tensors(config, vocab_size):
        if row_map.source.startswith("fusion."):
            continue
        if row_map.source == EMBEDDING and model.input_norm == "rms":
            if model.share_embeddings_and_output_weights:
                found.append(dataclasses.replace(row_map, name="lm_head.weight"))
            row_map = dataclasses.replace(row_map, unit_rms=model.layernorm_epsilon)
        if row_map.name.endswith(BRANCH_OUTPUTS):
            row_map = dataclasses.replace(row_map, factor=model.residual_multiplier)
        found.append(row_map)
    return found


def stock_notes(config: PretrainConfig, dtype: torch.dtype) -> List[str]:
    """What a stock class cannot have, and what was folded into weights."""
    model, rounding = config.model, str(dtype).removeprefix("torch.")
    notes = [
        "plain mode only: the fusion weights are left out, so that soft, fused and recurrent decoding is not possible"
    ]
    if model.input_norm == "rms":
        untied = ", and the head is a matrix of its own" if model.share_embeddings_and_output_weights else ""
        notes.append(
            f"model.input_norm rms: the embedding holds N(e) in place of e, computed in float32 and rounded to "
            f"{rounding}{untied}"
        )
    if model.residual_multiplier != 1:
        notes.append(
            f"model.residual_multiplier {model.residual_multiplier:g}: multiplied into o_proj and down_proj in float32 "
            f"and rounded to {rounding}"
        )
    if config.data.reset_attention_mask:
        notes.append(
            "data.reset_attention_mask: a row is one document in the stock class; give documents in rows of their own"
        )
    return notes
