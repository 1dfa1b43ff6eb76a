"""Names and layouts of weights: canonical (as in training) and Hugging Face (as in an export)."""

from dataclasses import dataclass
from typing import Dict, Iterator, List, Mapping, Optional, Tuple

import torch
from torch import Tensor

from megatron_fbt.config.model import ModelConfig
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.errors import CheckpointError

# Shape legend: V vocabulary, D hidden size, F inner width, np query heads, ng key/value heads, hn head size.


@dataclass(frozen=True)
class RowMap:
    """Where an exported tensor comes from: rows of one canonical tensor, each of them in one exported tensor at most.

    Attributes:
        name: In the export.
        source: Canonical name.
        rows: Row ranges [start, stop) of the source, in the order in which the export has them.
        columns: Size of a row; () for a vector, whose rows are its elements.
        unit_rms: Epsilon of the norm N that each row goes through first; None = rows as they are.
        factor: What every element is multiplied by.
    """

    name: str
    source: str
    rows: Tuple[Tuple[int, int], ...]
    columns: Tuple[int, ...]
    unit_rms: Optional[float] = None
    factor: float = 1.0

    @property
    def shape(self) -> Tuple[int, ...]:
        """Shape of the exported tensor."""
        return (sum(stop - start for start, stop in self.rows), *self.columns)

    def apply(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the source in the form and number format of the export; computed in float32."""
        if self.unit_rms is None and self.factor == 1:
            return rows.to(dtype)
        wide = rows.float()
        if self.unit_rms is not None:
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.unit_rms)
        return (wide * self.factor).to(dtype)


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
    embedding = weights.get(EMBEDDING)
    vocab_size = 0 if embedding is None else embedding.shape[0]
    check_shapes({name: tuple(weight.shape) for name, weight in weights.items()}, config, vocab_size)
    return {
        row_map.name: torch.cat([weights[row_map.source][start:stop] for start, stop in row_map.rows])
        for row_map in hf_tensors(config, vocab_size)
    }


def check_shapes(found: Mapping[str, Tuple[int, ...]], config: PretrainConfig, vocab_size: int) -> None:
    """See that these are the weights of the configuration.

    Raises:
        CheckpointError: A weight is missing, unknown or of another shape than the configuration says.
    """
    expected = dict(canonical_shapes(config, vocab_size))
    missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    remedy = "Use the config.yaml that was saved with the checkpoint."
    if missing or unknown:
        raise CheckpointError(
            f"weights do not match the configuration: missing {_some(missing)}; not expected {_some(unknown)}. {remedy}"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise CheckpointError(f"{name}: shape {found[name]}, the configuration says {shape}. {remedy}")


def hf_tensors(config: PretrainConfig, vocab_size: int) -> Iterator[RowMap]:
    """What an export consists of, in the order of the model; every canonical row occurs once."""
    for name, shape in canonical_shapes(config, vocab_size):
        for exported, rows in _convert(name, shape[0], config.model).items():
            yield RowMap(exported, name, rows, shape[1:])


EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
VOCABULARY_TABLES = (EMBEDDING, HEAD)
"""Their rows are the entries of the vocabulary; a checkpoint has padding behind them."""
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
    yield EMBEDDING, (vocab_size, hidden)
    for matrix in FUSION_MATRICES[config.feedback.fusion]:
        yield f"fusion.{matrix}.weight", (hidden, hidden)
    for index in range(model.num_layers):
        layer = f"decoder.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        rows = queries + (queries if model.attention_output_gate else 0) + 2 * groups
        yield f"{layer}.self_attention.linear_qkv.weight", (rows, hidden)
        if model.add_qkv_bias:
            yield f"{layer}.self_attention.linear_qkv.bias", (rows,)
        if model.qk_layernorm:
            yield f"{layer}.self_attention.q_layernorm.weight", (head,)
            yield f"{layer}.self_attention.k_layernorm.weight", (head,)
        yield f"{layer}.self_attention.linear_proj.weight", (hidden, queries)
        yield f"{layer}.pre_mlp_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.linear_fc1.weight", (2 * model.ffn_size, hidden)
        yield f"{layer}.mlp.linear_fc2.weight", (hidden, model.ffn_size)
    yield "decoder.final_layernorm.weight", (hidden,)
    if not model.share_embeddings_and_output_weights:
        yield HEAD, (vocab_size, hidden)


_WHOLE_MODEL = {
    EMBEDDING: "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    HEAD: "lm_head.weight",
}
_IN_A_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}


def _convert(name: str, count: int, model: ModelConfig) -> Dict[str, Tuple[Tuple[int, int], ...]]:
    """The one to four Hugging Face weights of a canonical one of so many rows, and the rows of each."""
    everything = ((0, count),)
    if name.startswith("fusion."):
        return {f"model.{name}": everything}
    if name in _WHOLE_MODEL:
        return {_WHOLE_MODEL[name]: everything}
    index, part = name.removeprefix("decoder.layers.").split(".", 1)
    layer = f"model.layers.{index}"
    if part.startswith("self_attention.linear_qkv."):
        kind = part.rpartition(".")[2]
        return {f"{layer}.self_attn.{letter}_proj.{kind}": rows for letter, rows in qkv_rows(model).items()}
    if part == "mlp.linear_fc1.weight":
        half = count // 2
        return {f"{layer}.mlp.gate_proj.weight": ((0, half),), f"{layer}.mlp.up_proj.weight": ((half, count),)}
    return {f"{layer}.{_IN_A_LAYER[part]}": everything}


def qkv_rows(model: ModelConfig) -> Dict[str, Tuple[Tuple[int, int], ...]]:
    """The rows of linear_qkv by purpose.

    linear_qkv [ng * (np/ng + 2) * hn, D] has in each group its queries, key and value; with an output gate
    [ng * (2 np/ng + 2) * hn, D]: queries, their gates, key and value.

    Returns:
        Row ranges of q (np * hn rows in all), g (the gate, if any) like q, k and v (ng * hn rows each).
    """
    heads = {"q": model.num_attention_heads // model.query_groups}
    if model.attention_output_gate:
        heads["g"] = heads["q"]
    heads.update(k=1, v=1)
    found: Dict[str, List[Tuple[int, int]]] = {letter: [] for letter in heads}
    start = 0
    for _ in range(model.query_groups):
        for letter, count in heads.items():
            found[letter].append((start, start + count * model.head_size))
            start += count * model.head_size
    return {letter: tuple(rows) for letter, rows in found.items()}


def split_qkv(tensor: Tensor, model: ModelConfig) -> Dict[str, Tensor]:
    """Weight or bias of linear_qkv by purpose, see qkv_rows."""
    return {letter: torch.cat([tensor[start:stop] for start, stop in rows]) for letter, rows in qkv_rows(model).items()}


def parse_dtype(name: str) -> torch.dtype:
    """fp32, bf16 or fp16 -> torch.dtype."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def _some(names: List[str]) -> str:
    """At most three names, and how many more there are."""
    if not names:
        return "none"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
