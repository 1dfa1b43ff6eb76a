"""Parameter counts of the model's options, of uneven stages and of the paper's 1B model."""

from dataclasses import replace

import pytest

from megatron_fbt.config.model import ModelConfig
from megatron_fbt.config.parallel import ParallelConfig
from megatron_fbt.config.parameter_count import count_parameters, largest_rank_parameters
from megatron_fbt.config.pipeline_split import stage_layers

SMALL = ModelConfig(num_layers=6, hidden_size=8, ffn_hidden_size=16, num_attention_heads=2, num_query_groups=1)


def test_an_output_gate_adds_a_matrix_of_the_queries_shape_to_each_layer():
    gated = replace(SMALL, attention_output_gate=True)
    assert count_parameters(gated, 11).total - count_parameters(SMALL, 11).total == 6 * 8 * 8


def test_biases_are_counted_on_queries_their_gates_keys_and_values():
    plain = replace(SMALL, attention_output_gate=True)
    biased = replace(plain, add_qkv_bias=True)
    assert count_parameters(biased, 11).total - count_parameters(plain, 11).total == 6 * (8 + 8 + 4 + 4)
    halves = [
        largest_rank_parameters(model, ParallelConfig(tensor_model_parallel_size=2), 128) for model in (biased, plain)
    ]
    assert halves[0] - halves[1] == 6 * (8 + 8 + 4 + 4) // 2


def test_the_papers_model_has_the_published_size():
    paper = ModelConfig(
        num_layers=24,
        hidden_size=1536,
        ffn_hidden_size=6656,
        num_attention_heads=16,
        num_query_groups=8,
        kv_channels=96,
        qk_layernorm=True,
    )
    count = count_parameters(paper, 100_352)
    layer = 1536 * (16 + 8 + 8 + 16) * 96 + 3 * 1536 * 6656 + 2 * 1536 + 2 * 96
    assert count.layers == 24 * layer and count.embedding == 100_352 * 1536 and count.fusion == 2 * 1536**2
    assert count.total == 1_064_908_800  # published: about 1.06 B
    standard = count.total - count.fusion
    for head_wise_gate in (0, 24 * 1536 * 16):  # the paper's, D x heads in each layer
        assert round(100 * count.fusion / (standard + head_wise_gate), 3) == 0.445  # published, of the standard model


@pytest.mark.parametrize(
    ("stages", "first", "last", "expected"),
    [
        (1, None, None, [6]),
        (3, None, None, [2, 2, 2]),
        (3, 4, None, [4, 1, 1]),
        (3, None, 2, [2, 2, 2]),
        (3, 1, 1, [1, 4, 1]),
        (2, 4, 2, [4, 2]),
    ],
)
def test_stages_may_be_uneven(stages, first, last, expected):
    parallel = ParallelConfig(
        pipeline_model_parallel_size=stages,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
    )
    assert stage_layers(parallel, SMALL.num_layers) == expected


def test_the_fullest_rank_of_uneven_stages():
    layer = 8 * (2 * 8 + 2 * 4) + 3 * 8 * 16 + 16
    ends = {"pipeline_model_parallel_size": 3, "num_layers_in_last_pipeline_stage": 1}
    table = 128 * 8
    for first, expected in (
        (1, 4 * layer),
        (3, 3 * layer + table + 2 * 64),
    ):
        parallel = ParallelConfig(**ends, num_layers_in_first_pipeline_stage=first)
        assert largest_rank_parameters(SMALL, parallel, 11) == expected
