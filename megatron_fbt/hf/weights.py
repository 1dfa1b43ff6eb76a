"""Names and layouts of weights: canonical (as in training) and Hugging Face (as in an export)."""

from typing import Dict, Iterator, List, Mapping, Tuple

import torch
from torch import Tensor

from megatron_fbt.config.model import ModelConfig
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.errors import CheckpointError

# Shape legend: V vocabulary, D hidden size, F inner width, np query heads, ng key/value heads, hn head size.


def to_hf_weights(weights: Mapping[str, Tensor], config: PretrainConfig) -> Dict[str, Tensor]:
    """Convert canonical weights to the names and layouts of modeling_fbt.py.

    Args:
        weights: Every canonical weight, full and without vocabulary padding.
        config: Of the run that the weights belong to; sections model and feedback are used.

    Returns:
        Weights by Hugging Face name; a tied output head is left out.

    Raises:
        CheckpointError: A weight is missing, unknown or of another shape than the configuration says.
    """
    expected = dict(canonical_shapes(config, _vocabulary(weights)))
    missing, unknown = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or unknown:
        raise CheckpointError(
            f"weights do not match the configuration: missing {_some(missing)}; not expected {_some(unknown)}. "
            "Use the config.yaml that was saved with the checkpoint."
        )
    result: Dict[str, Tensor] = {}
    for name, shape in expected.items():
        if tuple(weights[name].shape) != shape:
            raise CheckpointError(
                f"{name}: shape {tuple(weights[name].shape)}, the configuration says {shape}. "
                "Use the config.yaml that was saved with the checkpoint."
            )
        result.update(_convert(name, weights[name], config.model))
    return result


FUSION_MATRICES = {
    "gate": ("state_proj", "token_gate"),
    "concat": ("concat_state_proj", "concat_token_proj"),
    "add": ("state_proj", "token_proj"),
}
"""The [D, D] matrices of each fusion variant, of the state and of the token; they keep their names in an export."""


def canonical_shapes(config: PretrainConfig, vocab_size: int) -> Iterator[Tuple[str, Tuple[int, ...]]]:
    """Canonical name and full, unpadded shape of every weight of a model."""
    model = config.model
    hidden, head = model.hidden_size, model.head_size
    queries, groups = model.num_attention_heads * head, model.query_groups * head
    yield "embedding.word_embeddings.weight", (vocab_size, hidden)
    for matrix in FUSION_MATRICES[config.feedback.fusion]:
        yield f"fusion.{matrix}.weight", (hidden, hidden)
    for index in range(model.num_layers):
        layer = f"decoder.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        gates = queries if model.attention_output_gate else 0
        yield f"{layer}.self_attention.linear_qkv.weight", (queries + gates + 2 * groups, hidden)
        if model.qk_layernorm:
            yield f"{layer}.self_attention.q_layernorm.weight", (head,)
            yield f"{layer}.self_attention.k_layernorm.weight", (head,)
        yield f"{layer}.self_attention.linear_proj.weight", (hidden, queries)
        yield f"{layer}.pre_mlp_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.linear_fc1.weight", (2 * model.ffn_size, hidden)
        yield f"{layer}.mlp.linear_fc2.weight", (hidden, model.ffn_size)
    yield "decoder.final_layernorm.weight", (hidden,)
    if not model.share_embeddings_and_output_weights:
        yield "output_layer.weight", (vocab_size, hidden)


_WHOLE_MODEL = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_IN_A_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}


def _convert(name: str, weight: Tensor, model: ModelConfig) -> Dict[str, Tensor]:
    """One canonical weight -> its one to four Hugging Face weights."""
    if name.startswith("fusion."):
        return {f"model.{name}": weight}
    if name in _WHOLE_MODEL:
        return {_WHOLE_MODEL[name]: weight}
    index, part = name.removeprefix("decoder.layers.").split(".", 1)
    layer = f"model.layers.{index}"
    if part == "self_attention.linear_qkv.weight":
        parts = split_qkv(weight, model)
        return {f"{layer}.self_attn.{letter}_proj.weight": value for letter, value in parts.items()}
    if part == "mlp.linear_fc1.weight":
        gate, up = weight.chunk(2)
        return {f"{layer}.mlp.gate_proj.weight": gate, f"{layer}.mlp.up_proj.weight": up}
    return {f"{layer}.{_IN_A_LAYER[part]}": weight}


def split_qkv(weight: Tensor, model: ModelConfig) -> Dict[str, Tensor]:
    """The rows of linear_qkv by purpose.

    Args:
        weight: [ng * (np/ng + 2) * hn, D]: in each group its queries, key and value; with an output gate
            [ng * (2 np/ng + 2) * hn, D]: queries, their gates, key and value.
        model: The architecture.

    Returns:
        q [np * hn, D], g (the gate, if any) like q, k and v [ng * hn, D].
    """
    heads = {"q": model.num_attention_heads // model.query_groups}
    if model.attention_output_gate:
        heads["g"] = heads["q"]
    heads.update(k=1, v=1)
    grouped = weight.view(model.query_groups, sum(heads.values()), model.head_size, -1)
    parts = grouped.split(list(heads.values()), dim=1)
    return {letter: part.flatten(0, 2) for letter, part in zip(heads, parts, strict=True)}


def parse_dtype(name: str) -> torch.dtype:
    """fp32, bf16 or fp16 -> torch.dtype."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def _vocabulary(weights: Mapping[str, Tensor]) -> int:
    embedding = weights.get("embedding.word_embeddings.weight")
    return 0 if embedding is None else embedding.shape[0]


def _some(names: List[str]) -> str:
    """At most three names, and how many more there are."""
    if not names:
        return "none"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
