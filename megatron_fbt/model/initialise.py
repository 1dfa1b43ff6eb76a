"""Initial weights: a counter-based function of (seed, global parameter name, global element) (method section 5).

Each rank evaluates only the elements that it holds, so that every layout starts from the same model.
"""

import math
import zlib
from typing import Dict

import torch

from megatron_fbt.config.model import ModelConfig
from megatron_fbt.feedback.counter import INITIAL_WEIGHT, counter_hash, normal, uniform

CHUNK = 1 << 22
"""Elements evaluated at a time; bounds the memory of the int64 intermediates."""


def global_name(name: str, first_layer: int, tied: bool) -> str:
    """Name of a stage's parameter in the whole model.

    Args:
        name: name in the stage.
        first_layer: index of the stage's first layer in the whole model.
        tied: the last stage's copy of a tied embedding carries the embedding's name.
    """
    if tied and name == "output_layer.weight":
        return "embedding.word_embeddings.weight"
    if not name.startswith("decoder.layers."):
        return name
    local, rest = name.removeprefix("decoder.layers.").split(".", 1)
    return f"decoder.layers.{int(local) + first_layer}.{rest}"


def global_elements(name: str, param: torch.nn.Parameter, tensor_rank: int, tensor_size: int) -> torch.Tensor:
    """Row-major index in the whole matrix of each element of this rank's shard, as (row ids [rows], column ids [cols]).

    A gated MLP's first matrix holds this rank's gate rows, then its up rows; the whole matrix has all gate rows first.
    """
    rows, cols = param.shape
    row_ids, col_ids = torch.arange(rows), torch.arange(cols)
    split = param.partition_dim if getattr(param, "tensor_model_parallel", False) else None
    if split == 0 and name.endswith("linear_fc1.weight"):
        half = rows // 2
        up = (row_ids >= half).long()
        row_ids = up * half * tensor_size + tensor_rank * half + row_ids - up * half
    elif split == 0:
        row_ids = row_ids + tensor_rank * rows
    elif split == 1:
        col_ids = col_ids + tensor_rank * cols
        cols *= tensor_size
    return row_ids[:, None] * cols + col_ids


def weight_std(name: str, config: ModelConfig) -> float:
    """Standard deviation of a normal initial weight; `scaled_init` divides residual outputs' by sqrt(2 num_layers)."""
    if config.scaled_init and name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return config.init_method_std / math.sqrt(2 * config.num_layers)
    return config.init_method_std


def fusion_bound(name: str, config: ModelConfig) -> float:
    """Bound of a fusion matrix's uniform values: their standard deviation is 1 / sqrt(inputs of the sum).

    The two halves of the `concat` variant's W_C make up one product with 2 D inputs. The method gives 1 / sqrt(D) for
    W_U and W_G; the values for `concat` and for W_T of `add` (1 / sqrt(D)) are this project's choice.
    """
    inputs = config.hidden_size * (2 if name.startswith("fusion.concat_") else 1)
    return math.sqrt(3 / inputs)


def initial_values(name: str, elements: torch.Tensor, config: ModelConfig, seed: int) -> torch.Tensor:
    """float64 initial values of the elements of one matrix, by their global row-major index."""
    bits = counter_hash(seed, INITIAL_WEIGHT, zlib.crc32(name.encode()), elements)
    if name.startswith("fusion."):
        return (2 * uniform(bits) - 1) * fusion_bound(name, config)
    return normal(bits) * weight_std(name, config)


@torch.no_grad()
def initialise_parameters(
    parameters: Dict[str, torch.nn.Parameter],
    config: ModelConfig,
    vocab_size: int,
    seed: int,
    tensor_rank: int,
    tensor_size: int,
) -> None:
    """Set every parameter of a stage to its initial value.

    Args:
        parameters: by global name; norm weights and biases are the one-dimensional ones.
        config: model section.
        vocab_size: entries without padding; padded rows of embedding and head are zero.
        seed: run.seed.
        tensor_rank: rank in the tensor-parallel group.
        tensor_size: size of that group.
    """
    for name, param in parameters.items():
        if param.dim() == 1:
            param.fill_(0.0 if name.endswith(".bias") else 1.0)
            continue
        elements = global_elements(name, param, tensor_rank, tensor_size).flatten()
        flat = torch.empty(elements.numel(), dtype=torch.float32)
        for begin in range(0, elements.numel(), CHUNK):
            part = elements[begin : begin + CHUNK]
            flat[begin : begin + CHUNK] = initial_values(name, part, config, seed).float()
        values = flat.view(param.shape)
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            values[max(vocab_size - tensor_rank * param.size(0), 0) :] = 0.0
        _fill(param, values.to(param.device, param.dtype))


def _fill(param: torch.nn.Parameter, values: torch.Tensor) -> None:
    """Set a weight, and what Transformer Engine holds beside one in 8 bits for its master to begin with."""
    if hasattr(param, "get_high_precision_init_val"):
        param.get_high_precision_init_val().copy_(values)
    param.copy_(values)
