"""Layers are dealt out completely, as Megatron-Core deals them out."""

import itertools

import pytest
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fbt.config.parallel import ParallelConfig
from megatron_fbt.config.pipeline_split import split_problems, stage_layers

SPLITS = [
    (
        layers,
        ParallelConfig(
            pipeline_model_parallel_size=size,
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=last,
        ),
    )
    for layers, size, first, last in itertools.product((6, 7, 10), (1, 2, 3, 4), (None, 1, 3), (None, 1, 2))
]


def megatron_layers(layers: int, parallel: ParallelConfig):
    """What Megatron-Core builds on each stage; None if it refuses."""
    try:
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
            num_layers_in_first_pipeline_stage=parallel.num_layers_in_first_pipeline_stage,
            num_layers_in_last_pipeline_stage=parallel.num_layers_in_last_pipeline_stage,
            pipeline_dtype="float32",
        )
        return [get_num_layers_to_build(config, pp_rank=rank) for rank in range(config.pipeline_model_parallel_size)]
    except (AssertionError, ValueError):
        return None


@pytest.mark.parametrize(("layers", "parallel"), SPLITS)
def test_every_layer_is_built_once_or_the_split_is_refused(layers, parallel):
    if split_problems(parallel, layers):
        built = megatron_layers(layers, parallel)
        ends = parallel.num_layers_in_first_pipeline_stage or parallel.num_layers_in_last_pipeline_stage
        useless = parallel.pipeline_model_parallel_size == 1 and ends
        assert useless or built is None or sum(built) != layers or min(built) < 1
        return
    assert stage_layers(parallel, layers) == megatron_layers(layers, parallel)
    assert sum(stage_layers(parallel, layers)) == layers and min(stage_layers(parallel, layers)) > 0


def test_both_kinds_of_split_occur():
    refused = [bool(split_problems(parallel, layers)) for layers, parallel in SPLITS]
    assert 20 < sum(refused) < len(refused) - 20
