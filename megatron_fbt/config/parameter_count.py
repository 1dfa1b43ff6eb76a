"""Number of parameters from the configuration alone."""

import math
from dataclasses import dataclass
from typing import List

from megatron_fbt.config.model import ModelConfig
from megatron_fbt.config.parallel import ParallelConfig
from megatron_fbt.config.pipeline_split import stage_layers


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """Rows of the embedding: the vocabulary rounded up to a multiple of divisible_by * tensor_parallel_size."""
    multiple = divisible_by * tensor_parallel_size
    return math.ceil(vocab_size / multiple) * multiple


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by place; padded vocabulary rows are not counted."""

    embedding: int
    layers: int
    final_norm: int
    output: int
    """0 where embedding and output head are one matrix."""
    fusion: int

    @property
    def total(self) -> int:
        """All parameters of the model."""
        return self.embedding + self.layers + self.final_norm + self.output + self.fusion


def qkv_rows(model: ModelConfig) -> int:
    """Rows of the matrix that gives queries (and their gates), keys and values."""
    query_like = 2 if model.attention_output_gate else 1
    return (query_like * model.num_attention_heads + 2 * model.query_groups) * model.head_size


def layer_matrices(model: ModelConfig, tensor_parallel_size: int = 1) -> int:
    """Parameters in the matrices of one transformer layer on one tensor-parallel rank."""
    output_columns = model.num_attention_heads * model.head_size
    return (qkv_rows(model) + output_columns + 3 * model.ffn_size) * model.hidden_size // tensor_parallel_size


def layer_parameters(model: ModelConfig, tensor_parallel_size: int = 1) -> int:
    """Parameters of one transformer layer on one tensor-parallel rank: matrices and biases are split, norms are not."""
    norms = 2 * model.hidden_size + (2 * model.head_size if model.qk_layernorm else 0)
    biases = qkv_rows(model) // tensor_parallel_size if model.add_qkv_bias else 0
    return layer_matrices(model, tensor_parallel_size) + norms + biases


def fusion_parameters(model: ModelConfig) -> int:
    """Parameters of the fusion layer: two [D, D] matrices in every variant."""
    return 2 * model.hidden_size**2


def count_parameters(model: ModelConfig, vocab_size: int) -> ParameterCount:
    """Count the parameters of the whole model, the fusion layer included."""
    table = vocab_size * model.hidden_size
    return ParameterCount(
        embedding=table,
        layers=model.num_layers * layer_parameters(model),
        final_norm=model.hidden_size,
        output=0 if model.share_embeddings_and_output_weights else table,
        fusion=fusion_parameters(model),
    )


@dataclass(frozen=True)
class StageCount:
    """Parameters that each process of a pipeline stage holds, padding and a copy of a tied embedding included."""

    total: int
    hidden_matrices: int
    """Of these, in the matrices of layers and fusion: all but embedding, output head and norms."""


def stage_parameters(model: ModelConfig, parallel: ParallelConfig, vocab_size: int) -> List[StageCount]:
    """Parameters of each stage's processes, in the order of the stages."""
    tensor, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    padded = padded_vocab_size(vocab_size, model.make_vocab_size_divisible_by, tensor)
    table = padded // tensor * model.hidden_size
    layers = stage_layers(parallel, model.num_layers)
    hidden = [count * layer_matrices(model, tensor) for count in layers]
    held = [count * layer_parameters(model, tensor) for count in layers]
    fusion = fusion_parameters(model) // tensor
    hidden[0] += fusion
    held[0] += table + fusion
    held[-1] += model.hidden_size
    if stages > 1 or not model.share_embeddings_and_output_weights:
        held[-1] += table
    return [StageCount(*counts) for counts in zip(held, hidden)]


def largest_rank_parameters(model: ModelConfig, parallel: ParallelConfig, vocab_size: int) -> int:
    """Parameters that the fullest process holds, padding and the last stage's copy of a tied embedding included."""
    return max(stage.total for stage in stage_parameters(model, parallel, vocab_size))
