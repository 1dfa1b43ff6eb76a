"""Rules across sections: each impossible combination is one error with its numbers."""

import pytest

from megatron_fbt.config.checks import resolve_world_size, validate_config, validate_for_training
from megatron_fbt.config.feedback import PassPhase, SequentialEvalConfig
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.errors import ConfigError


def make(**values):
    """A valid configuration with `section__field` set."""
    config = PretrainConfig()
    config.training.train_steps = 100
    for name, value in values.items():
        section, field = name.split("__")
        setattr(getattr(config, section), field, value)
    return config


MULTI_PASS = [PassPhase(0.0, {2: 1.0})]
ONE_PASS = [PassPhase(0.0, {1: 1.0})]


@pytest.mark.parametrize(
    ("world_size", "values", "parts"),
    [
        (6, {"parallel__tensor_model_parallel_size": 4}, ["parallel.world_size = 6", "tensor 4", "= 4"]),
        (
            6,
            {"parallel__tensor_model_parallel_size": 2, "parallel__pipeline_model_parallel_size": 2},
            ["parallel.world_size = 6", "tensor 2 x pipeline 2"],
        ),
        (
            4,
            {"parallel__tensor_model_parallel_size": 4, "parallel__sequence_parallel": True}
            | {"data__sequence_length": 1022},
            ["data.sequence_length = 1022", "parallel.tensor_model_parallel_size = 4"],
        ),
        (8, {"parallel__tensor_model_parallel_size": 8}, ["model.num_attention_heads = 4", "= 8"]),
        (
            4,
            {"parallel__tensor_model_parallel_size": 4, "optimizer__type": "muon"},
            ["parallel.tensor_model_parallel_size = 4", "optimizer.type = 'muon'", "shard of a matrix", "set it to 1"],
        ),
        (
            2,
            {"optimizer__sharding": "megatron", "optimizer__type": "muon"},
            ["optimizer.sharding = 'megatron'", "optimizer.type = 'muon'", "part of a matrix", "set it to none"],
        ),
        (
            4,
            {"parallel__tensor_model_parallel_size": 4, "model__num_query_groups": 2},
            ["model.num_query_groups = 2"],
        ),
        (
            4,
            {"parallel__tensor_model_parallel_size": 4, "model__ffn_hidden_size": 342},
            ["model.ffn_hidden_size = 342"],
        ),
        (
            4,
            {"parallel__tensor_model_parallel_size": 4, "model__hidden_size": 130, "model__kv_channels": 32},
            ["model.hidden_size = 130"],
        ),
        (
            3,
            {"parallel__pipeline_model_parallel_size": 3},
            ["model.num_layers = 4", "pipeline_model_parallel_size = 3"],
        ),
        (
            2,
            {"parallel__pipeline_model_parallel_size": 2, "parallel__num_layers_in_last_pipeline_stage": 4},
            ["num_layers_in_last_pipeline_stage = 4: leaves 0 of model.num_layers = 4 for 1 other"],
        ),
        (
            4,
            {"parallel__pipeline_model_parallel_size": 4, "parallel__num_layers_in_first_pipeline_stage": 2},
            ["num_layers_in_first_pipeline_stage = 2: leaves 2 of model.num_layers = 4 for 3 other"],
        ),
        (
            2,
            {"parallel__pipeline_model_parallel_size": 2, "parallel__num_layers_in_first_pipeline_stage": 2}
            | {"parallel__num_layers_in_last_pipeline_stage": 1},
            ["first_pipeline_stage = 2 and parallel.num_layers_in_last_pipeline_stage = 1: add up to 3", "= 4; "],
        ),
        (1, {"parallel__num_layers_in_first_pipeline_stage": 2}, ["first_pipeline_stage = 2: there is one"]),
        (3, {}, ["training.global_batch_size = 8", "data-parallel size 3", "= 3"]),
        (2, {"training__rampup_batch_size": [4, 1, 100]}, ["training.rampup_batch_size = [4, 1, 100]", "5 rows"]),
        (
            2,
            {"parallel__pipeline_model_parallel_size": 2, "training__global_batch_size": 3},
            ["training.global_batch_size = 3", "3 micro-batches", "2 pipeline stages"],
        ),
        (
            4,
            {"parallel__pipeline_model_parallel_size": 4, "training__global_batch_size": 2},
            ["training.global_batch_size = 2", "2 micro-batches", "at least 4"],
        ),
        (
            1,
            {"feedback__sequential_eval": SequentialEvalConfig(passes=3)},
            ["sequential_eval.passes = 3: no more", "4"],
        ),
        (
            1,
            {"feedback__sequential_eval": SequentialEvalConfig(passes=5, fused_passes=4)},
            ["sequential_eval.fused_passes = 4: leaves none", "at most 3"],
        ),
        (1, {"optimizer__lr_warmup_steps": 100}, ["optimizer.lr_warmup_steps = 100"]),
        (1, {"optimizer__lr_warmup_steps": 80}, ["optimizer.lr_warmup_steps = 80"]),
    ],
)
def test_refused_with_its_numbers(world_size, values, parts):
    config = make(**values)
    with pytest.raises(ConfigError) as caught:
        validate_config(config, world_size)
    message = str(caught.value)
    assert [part for part in parts if part not in message] == [], message
    assert ";" in message


@pytest.mark.parametrize(
    ("world_size", "values"),
    [
        (1, {}),
        (8, {}),
        (8, {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True}),
        (8, {"parallel__tensor_model_parallel_size": 2, "parallel__pipeline_model_parallel_size": 2}),
        (4, {"parallel__pipeline_model_parallel_size": 4}),
        (2, {"parallel__pipeline_model_parallel_size": 2, "parallel__num_layers_in_last_pipeline_stage": 1}),
        (1, {"optimizer__lr_warmup_steps": 75}),
        (1, {"optimizer__lr_warmup_steps": 80, "optimizer__lr_decay_style": "cosine"}),
        (2, {"training__rampup_batch_size": [4, 2, 100]}),
    ],
)
def test_accepted(world_size, values):
    validate_config(make(**values), world_size)


def test_one_pass_runs_have_no_micro_batch_rule():
    values = {"parallel__pipeline_model_parallel_size": 4, "training__global_batch_size": 3}
    validate_config(make(feedback__schedule=ONE_PASS, **values), 4)
    with pytest.raises(ConfigError, match="3 micro-batches"):
        validate_config(make(feedback__schedule=ONE_PASS, feedback__eval_passes=2, **values), 4)
    validate_config(make(feedback__schedule=ONE_PASS, feedback__eval_passes=2, training__eval_iters=0, **values), 4)


def test_micro_batch_rule_counts_only_batches_that_can_have_several_passes():
    ramp = {"parallel__pipeline_model_parallel_size": 4, "training__rampup_batch_size": [2, 2, 100]}
    validate_config(make(**ramp), 4)  # multi-pass from step 75 on, long after the ramp-up
    with pytest.raises(ConfigError) as caught:
        validate_config(make(feedback__schedule=MULTI_PASS, **ramp), 4)
    assert "global_batch_size = 2:" in str(caught.value)
    assert "global_batch_size = 6:" in str(caught.value)
    assert "global_batch_size = 4:" not in str(caught.value)


def test_micro_batch_rule_on_the_step_where_both_meet():
    # Batches of 2, 4, 6, 8 rows from steps 0, 17, 26, 31 on.
    ramp = {"parallel__pipeline_model_parallel_size": 4, "training__rampup_batch_size": [2, 2, 100]}
    for fraction, fails in ((0.31, False), (0.30, True)):
        schedule = [PassPhase(0.0, {1: 1.0}), PassPhase(fraction, {2: 1.0})]
        config = make(feedback__schedule=schedule, **ramp)
        if fails:
            with pytest.raises(ConfigError, match="global_batch_size = 6:"):
                validate_config(config, 4)
        else:
            validate_config(config, 4)


def test_world_size_of_the_configuration_is_used():
    with pytest.raises(ConfigError, match="world_size = 6"):
        validate_config(make(parallel__world_size=6, parallel__tensor_model_parallel_size=4))
    validate_config(make(parallel__tensor_model_parallel_size=4))


def test_all_problems_of_the_layout_at_once():
    config = make(parallel__tensor_model_parallel_size=8, parallel__pipeline_model_parallel_size=3)
    with pytest.raises(ConfigError) as caught:
        validate_config(config, 25)
    for part in ("num_attention_heads", "num_query_groups", "num_layers", "world_size = 25"):
        assert part in str(caught.value)


def test_training_needs_data_and_tokenizer():
    with pytest.raises(ConfigError) as caught:
        validate_for_training(make())
    assert "data.paths" in str(caught.value) and "data.tokenizer.path" in str(caught.value)
    config = make(data__paths=["a"])
    config.data.tokenizer.path = "t.model"
    validate_for_training(config)


def test_resolve_world_size():
    layout = make(parallel__tensor_model_parallel_size=2, parallel__pipeline_model_parallel_size=2)
    assert resolve_world_size(layout, {}, dry_run=True) == 4
    assert resolve_world_size(layout, {"WORLD_SIZE": "8"}, dry_run=True) == 8
    assert resolve_world_size(layout, {"WORLD_SIZE": "8"}, dry_run=False) == 8
    assert resolve_world_size(layout, {}, dry_run=False) == 1
    cluster = make(parallel__world_size=1024)
    assert resolve_world_size(cluster, {"WORLD_SIZE": "8"}, dry_run=True) == 1024
    with pytest.raises(ConfigError, match=r"parallel\.world_size = 1024.*8 processes"):
        resolve_world_size(cluster, {"WORLD_SIZE": "8"}, dry_run=False)


def test_the_micro_batch_rule_knows_where_a_resumed_run_starts_its_phases():
    ramp = {"parallel__pipeline_model_parallel_size": 4, "training__rampup_batch_size": [2, 2, 100]}
    validate_config(make(**ramp), 4, phase_start_steps=[0, 31])
    with pytest.raises(ConfigError, match="global_batch_size = 6:"):
        validate_config(make(**ramp), 4, phase_start_steps=[0, 30])


def test_a_boundary_at_the_prompts_end_needs_data_with_prompts():
    config = make()
    config.feedback.prefix.granularity = "prompt"
    with pytest.raises(
        ConfigError, match=r"prefix\.granularity = 'prompt': data\.format = 'indexed' marks no prompts; "
    ):
        validate_config(config)
    config.data.format = "conversations"
    config.data.paths = ["chats.jsonl"]
    validate_config(config)
