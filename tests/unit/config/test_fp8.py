"""What FP8 asks of the rest of the configuration: each refusal has field, value, numbers and remedy."""

import pytest

from megatron_fbt.config.checks import validate_config
from megatron_fbt.config.feedback import PassPhase
from megatron_fbt.config.fp8 import fp8_dimensions
from megatron_fbt.config.precision import PrecisionConfig
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.errors import ConfigError


def make(**values):
    """A valid configuration with emulated FP8 and `section__field` set."""
    config = PretrainConfig()
    config.training.train_steps = 100
    config.model.vocab_size = 1003
    for name, value in {"precision__fp8": "hybrid", "precision__fp8_emulated": True, **values}.items():
        section, field = name.split("__")
        setattr(getattr(config, section), field, value)
    return config


def on_gpu(**values):
    """The same with Transformer Engine's FP8."""
    return make(precision__fp8_emulated=False, **values)


def tensor(size, **values):
    return {"parallel__tensor_model_parallel_size": size, **values}


def recipe(name, **values):
    return {"precision__fp8_recipe": name, **values}


LOW_WEIGHTS = {"precision__fp8_param_gather": True, "optimizer__sharding": "megatron"}
DELAYED = recipe("delayed", feedback__schedule=[PassPhase(0.0, {2: 1.0})])


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (
            make(data__sequence_length=24, training__micro_batch_size=1),
            ["tokens is 24", "sequence_length 24 x", "16, but", "8 too many"],
        ),
        (
            make(data__sequence_length=48, training__micro_batch_size=1, **tensor(2, parallel__sequence_parallel=True)),
            ["tokens is 24", "training.micro_batch_size 1 / tensor_model_parallel_size 2"],
        ),
        (make(model__hidden_size=136), ["the hidden size is 136", "16, but", "8 too many"]),
        (make(model__ffn_hidden_size=344), ["the MLP's width is 344", "8 too many"]),
        (
            make(model__ffn_hidden_size=352, **tensor(4)),
            ["the MLP's width is 88", "model.ffn_hidden_size 352 / tensor_model_parallel_size 4"],
        ),
        (make(model__kv_channels=18), ["attention's width is 72", "heads 4 x 18"]),
        (make(model__num_query_groups=1, model__kv_channels=4), ["queries, keys and values is 24"]),
        (
            make(**recipe("mxfp8"), model__hidden_size=144),
            ["'mxfp8'", "32, but the hidden size is 144", "16 too many", "tensorwise"],
        ),
        (
            make(**recipe("blockwise"), model__ffn_hidden_size=320),
            ["'blockwise'", "128, but the MLP's width is 320", "64 too many"],
        ),
        (
            make(precision__fp8_fusion=True, **tensor(2), model__hidden_size=144),
            ["the fusion layer's width is 72", "144 / tensor"],
        ),
        (
            make(precision__fp8_head=True, model__make_vocab_size_divisible_by=1),
            ["the head's width is 1,003", "padded vocabulary 1,003", "11 too many"],
        ),
        (
            make(precision__fp8_head=True, model__make_vocab_size_divisible_by=8, model__vocab_size=None),
            ["the head's width is 8", "model.make_vocab_size_divisible_by 8"],
        ),
        (
            make(model__transformer_impl="transformer_engine"),
            ["fp8_emulated = true", "'transformer_engine'", "torch or auto"],
        ),
        (on_gpu(model__transformer_impl="torch"), ["precision.fp8 = 'hybrid'", "'torch'", "fp8_emulated to true"]),
        (on_gpu(precision__fp8_head=True), ["precision.fp8_head = true", "set it to false"]),
        (on_gpu(optimizer__sharding="zero3"), ["precision.fp8 = 'hybrid'", "'zero3'", "to megatron"]),
        (
            make(precision__num_layers_at_start_in_bf16=3, precision__num_layers_at_end_in_bf16=1),
            ["num_layers_at_start_in_bf16 = 3", "num_layers_at_end_in_bf16 = 1", "4 layers"],
        ),
        (
            on_gpu(precision__num_layers_at_end_in_bf16=2, parallel__pipeline_model_parallel_size=4),
            ["num_layers_at_end_in_bf16 = 2", "model.num_layers 4 / parallel.pipeline_model_parallel_size 4 = 1"],
        ),
        (
            on_gpu(**DELAYED, precision__fp8_amax_compute_algo="most_recent"),
            ["'most_recent'", "2 passes", "set it to max"],
        ),
        (
            on_gpu(**DELAYED, precision__fp8_amax_history_len=7, training__global_batch_size=8),
            ["fp8_amax_history_len = 7", "at least 16", "2 passes of 8 micro-batches"],
        ),
        (
            make(optimizer__sharding="zero2", precision__gradient_accumulation_fusion=True),
            ["precision.gradient_accumulation_fusion = true", "'zero2'", "set it to false"],
        ),
        (
            make(precision__fp8_param_gather=True, optimizer__sharding="megatron"),
            ["fp8_param_gather = true", "fp8_emulated = true", "set it to false, or precision.fp8_emulated to false"],
        ),
        *(
            (
                on_gpu(precision__fp8_param_gather=True, optimizer__sharding=sharding),
                ["fp8_param_gather = true", f"optimizer.sharding = '{sharding}'", "set it to false", "to megatron"],
            )
            for sharding in ("none", "zero1", "zero2")
        ),
        (
            make(precision__fp8_head=True, memory__chunked_loss=True),
            ["memory.chunked_loss = true", "precision.fp8_head = true", "set it to null or false, or"],
        ),
        (on_gpu(**DELAYED, memory__recompute="full"), ["memory.recompute = 'full'", "last first", "selective"]),
    ],
)
def test_impossible_choices_are_refused(config, parts):
    with pytest.raises(ConfigError) as caught:
        validate_config(config)
    for part in [*parts, ";"]:
        assert part in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"fp8_recipe": "mxfp8"}, ["fp8_recipe = 'mxfp8'", "precision.fp8 is null", "leave it out (tensorwise)"]),
        ({"fp8_emulated": True}, ["fp8_emulated = true", "changes nothing"]),
        ({"num_layers_at_end_in_bf16": 1}, ["num_layers_at_end_in_bf16 = 1", "changes nothing"]),
        ({"fp8_head": True}, ["fp8_head = true", "changes nothing"]),
        ({"fp8_param_gather": True}, ["fp8_param_gather = true", "changes nothing"]),
        ({"fp8_fusion": True}, ["fp8_fusion = true", "changes nothing"]),
        ({"fp8": "e4m3", "fp8_amax_history_len": 3}, ["fp8_amax_history_len = 3", "fp8_recipe is not delayed"]),
        ({"fp8": "e4m3", "fp8_amax_compute_algo": "most_recent"}, ["'most_recent'", "fp8_recipe is not delayed"]),
        ({"fp8": "e4m3", "dtype": "fp32"}, ["precision.dtype = 'fp32'", "set it to bf16, or precision.fp8 to null"]),
        (
            {"fp8": "e4m3", "fp8_recipe": "delayed", "num_layers_at_start_in_bf16": 1},
            ["num_layers_at_start_in_bf16 = 1", "covers every layer", "tensorwise"],
        ),
    ],
)
def test_what_would_change_nothing_is_refused(values, parts):
    (problem,) = PrecisionConfig(**values).problems()
    for part in [*parts, ";"]:
        assert part in problem


@pytest.mark.parametrize(
    "config",
    [
        make(),
        make(precision__dtype="fp32"),
        make(precision__fp8="e4m3", precision__fp8_head=True, precision__fp8_fusion=True, **tensor(4)),
        make(**recipe("mxfp8"), model__ffn_hidden_size=352),
        make(**recipe("blockwise"), model__ffn_hidden_size=384),
        make(**DELAYED, precision__fp8_amax_compute_algo="most_recent", memory__recompute="full"),
        make(optimizer__sharding="zero3", precision__num_layers_at_end_in_bf16=1),
        on_gpu(),
        on_gpu(**DELAYED),
        *(
            on_gpu(**recipe(name), **LOW_WEIGHTS, model__ffn_hidden_size=384, feedback__schedule="standard")
            for name in ("tensorwise", "delayed", "blockwise", "mxfp8")
        ),
        make(precision__fp8_head=True, memory__chunked_loss=False),
        on_gpu(**recipe("delayed"), feedback__schedule="standard", memory__recompute="full"),
        on_gpu(optimizer__sharding="zero1", memory__recompute="full", precision__fp8_fusion=True),
    ],
)
def test_possible_choices(config):
    validate_config(config)


def test_which_layers_are_in_fp8():
    precision = PrecisionConfig(fp8="e4m3", num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2)
    assert [precision.in_fp8(layer, 6) for layer in range(6)] == [False, True, True, True, False, False]
    assert not any(PrecisionConfig().in_fp8(layer, 6) for layer in range(6))


def test_the_head_counts_padded_rows_alone_on_each_rank():
    sizes = {what: value for what, value, _ in fp8_dimensions(make(precision__fp8_head=True, **tensor(2)))}
    assert sizes["the head's width"] == 512
