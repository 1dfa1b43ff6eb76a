"""Every field refuses what makes no sense, with its name, the value and a remedy."""

import dataclasses
import math

import pytest

from megatron_fbt.config.data import DataConfig, TokenizerConfig, parse_split
from megatron_fbt.config.feedback import (
    FeedbackConfig,
    LossWeightsConfig,
    PassPhase,
    PrefixConfig,
    resolved_input_scale,
)
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.config.training import TrainingConfig, ZLossConfig
from megatron_fbt.errors import ConfigError


def default_section(name):
    config = PretrainConfig(training=TrainingConfig(train_steps=10))
    section = config
    for part in name.split("."):
        section = getattr(section, part)
    return section


NAN, INF = math.nan, math.inf
POSITIVE_INTEGERS = {
    "model": "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size "
    "make_vocab_size_divisible_by sliding_window window_attn_skip_freq",
    "parallel": "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size world_size "
    "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage",
    "feedback": "eval_passes",
    "optimizer": "muon_ns_steps",
    "data": "sequence_length",
    "training": "train_steps train_samples train_tokens micro_batch_size global_batch_size eval_interval max_bad_steps",
    "training.spikes": "window",
    "checkpoint": "save_interval keep_last keep_every",
    "logging": "log_interval diagnostics_interval straggler_interval",
    "precision": "fp8_amax_history_len loss_scale_window hysteresis",
}
NUMBERS_ABOVE_ZERO = {
    "model": "layernorm_epsilon rotary_base init_method_std residual_multiplier",
    "feedback.prefix": "exponent",
    "parallel": "collective_timeout_s data_timeout_s load_timeout_s save_timeout_s",
    "checkpoint": "lease_seconds",
    "optimizer": "lr muon_lr adam_eps",
    "memory": "loss_chunk_mib",
}
NUMBERS_FROM_ZERO = {
    "feedback.loss_weights": "first_pass extra_passes",
    "feedback.jitter": "scale",
    "feedback.sequential_eval": "margin",
    "optimizer": "min_lr weight_decay muon_weight_decay clip_grad",
}
FRACTIONS_BELOW_ONE = {
    "model": "attention_dropout hidden_dropout",
    "optimizer": "adam_beta1 adam_beta2 muon_momentum",
}
SWITCHES = {
    "model": "qk_layernorm add_qkv_bias share_embeddings_and_output_weights attention_output_gate scaled_init",
    "parallel": "sequence_parallel overlap_grad_reduce",
    "memory": "deallocate_pipeline_outputs",
    "optimizer": "offload",
    "data": "mmap eod_mask_loss reset_attention_mask reset_position_ids",
    "checkpoint": "keep_best async_save verify_on_load",
    "logging": "tensorboard",
    "precision": "fp8_emulated fp8_fusion fp8_head fp8_param_gather",
}
CHOICES = {
    "model": "input_norm transformer_impl",
    "memory": "recompute recompute_passes",
    "feedback": "fusion",
    "feedback.prefix": "granularity",
    "precision": "dtype fp8_recipe fp8_amax_compute_algo",
    "optimizer": "type sharding lr_decay_style muon_adjust_lr_fn",
    "data": "format",
    "data.tokenizer": "type",
    "checkpoint": "resume async_failure",
}


def cases(table, *values):
    return [(section, field, value) for section, names in table.items() for field in names.split() for value in values]


REFUSED = [
    *cases(POSITIVE_INTEGERS, 0, -1, 1.5, "4", True, NAN),
    *cases(NUMBERS_ABOVE_ZERO, 0.0, -1.0, NAN, INF, -INF, "1", True, None),
    *cases(NUMBERS_FROM_ZERO, -1e-9, NAN, INF, -INF, "1", False, None),
    *cases(FRACTIONS_BELOW_ONE, -0.1, 1.0, NAN, INF, "0.1", None),
    *cases(SWITCHES, 1, "true", None),
    *cases({"memory": "chunked_loss", "feedback": "prefix_reuse"}, 1, "true"),
    *cases(CHOICES, "other", None, 1),
    *cases({"optimizer": "lr_warmup_steps", "training": "eval_iters max_rewinds", "run": "seed"}, -1, 0.5, NAN, None),
    *cases({"data": "num_workers"}, -1, 0.5, NAN, "1", True),
    *cases({"precision": "loss_scale"}, 0.0, -1.0, NAN, INF, "1", True),
    *cases({"precision": "initial_loss_scale min_loss_scale"}, 0.0, -1.0, NAN, INF, "1", True, None),
    *cases({"optimizer": "lr_decay_fraction"}, -0.1, 1.1, NAN, None),
    *cases({"feedback.prefix": "probability low high"}, -0.1, 1.1, NAN, INF, "1", True, None),
    *cases({"training.z_loss": "coefficient from_fraction to_fraction"}, -1e-9, NAN, INF, "1", True, None),
    *cases({"precision": "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16"}, -1, 0.5, NAN, None),
    *cases({"precision": "fp8"}, "other", True, 1),
    *cases({"precision": "gradient_accumulation_fusion"}, "other", 1),
    ("training.z_loss", "from_fraction", 1.0),
    ("training.z_loss", "to_fraction", 0.0),
    ("training.z_loss", "to_fraction", 1.1),
    *cases({"feedback": "input_scale"}, 0.0, -1.0, NAN, INF, "1", True),
    *cases({"feedback.loss_weights": "warmup_steps"}, -1, 0.5, NAN, None),
    *cases({"training": "wall_clock_limit_s"}, 0.0, -1.0, NAN, INF, "1", True),
    *cases({"memory": "budget_gib"}, 0.0, -1.0, NAN, INF, "1", True),
    *cases({"logging": "straggler_factor"}, 0.9, -1.0, NAN, INF, "2", True, None),
    *cases({"training.spikes": "loss_factor grad_norm_factor"}, 1.0, 0.0, -1.0, NAN, INF, "2", True),
    *cases({"run": "dir"}, "", "  ", 3, None),
    ("run", "seed", 2**32),
    ("feedback", "eval_passes", 17),
    ("model", "num_query_groups", 3),
    ("model", "hidden_size", 130),
    ("model", "hidden_size", 12),
    ("model", "kv_channels", 33),
    ("optimizer", "min_lr", 1.0),
    ("optimizer", "muon_ns_steps", 100),
    ("parallel", "context_parallel_size", 2),
    ("parallel", "sequence_parallel", True),
    ("parallel", "overlap_param_gather", True),
    ("parallel", "virtual_pipeline_model_parallel_size", 2),
    ("feedback.sequential_eval", "passes", -1),
    ("feedback.sequential_eval", "passes", 2.5),
    ("feedback.sequential_eval", "fused_passes", -1),
    ("feedback.sequential_eval", "fused_passes", None),
    ("model", "window_attn_skip_freq", 1),
    ("training", "micro_batch_size", 3),
    ("training", "rampup_batch_size", []),
    ("training", "rampup_batch_size", [4, 2]),
    ("training", "rampup_batch_size", [0, 2, 100]),
    ("training", "rampup_batch_size", [4, -2, 100]),
    ("training", "rampup_batch_size", [4, 2, 0]),
    ("training", "rampup_batch_size", [8, 2, 100]),
    ("training", "rampup_batch_size", [16, 2, 100]),
    ("training", "rampup_batch_size", [4, 3, 100]),
    ("training", "rampup_batch_size", [4, 2.0, 100]),
    ("data", "reset_position_ids", True),
    ("data", "paths", ["a", ""]),
    ("data", "paths", ["a", "b", "./a"]),
    ("data", "paths", "a"),
    ("data", "split", "0,1,1"),
    ("data", "chat_template", "chat.jinja"),
    ("data.tokenizer", "path", ""),
    ("checkpoint", "init_from", " "),
    ("checkpoint", "keep_every", 5),
    ("checkpoint", "keep_best", True),
    ("checkpoint", "allow_changes", ["data.path"]),
    ("checkpoint", "allow_changes", "data.paths"),
    ("feedback", "schedule", "Full"),
    ("feedback", "schedule", None),
    ("feedback", "schedule", []),
    ("feedback", "schedule", [PassPhase(0.5, {1: 1.0})]),
    ("feedback", "schedule", [PassPhase(0.0, {1: 1.0}), PassPhase(0.0, {2: 1.0})]),
    ("feedback", "schedule", [PassPhase(0.0, {1: 1.0}), PassPhase(0.8, {2: 1.0}), PassPhase(0.5, {3: 1.0})]),
    ("feedback", "schedule", [{"from_fraction": 0.0}]),
]


@pytest.mark.parametrize(("section_name", "field", "value"), REFUSED)
def test_refused_by_name(section_name, field, value):
    section = dataclasses.replace(default_section(section_name), **{field: value})
    with pytest.raises(ConfigError) as caught:
        section.validate()
    message = str(caught.value)
    relatives = {"micro_batch_size": "global_batch_size"}  # the rule names the larger of the two
    fields = {field, relatives.get(field, field)}
    assert any(f"{section_name}.{name} = " in message for name in fields), message
    assert ";" in message, "no remedy"
    assert caught.value.exit_code == 2


def test_every_number_field_is_in_the_tables():
    tables = (POSITIVE_INTEGERS, NUMBERS_ABOVE_ZERO, NUMBERS_FROM_ZERO, FRACTIONS_BELOW_ONE, SWITCHES, CHOICES)
    covered = {f"{section}.{field}" for section, field, _ in REFUSED}
    assert all(f"{section}.{field}" in covered for table in tables for section, field, _ in cases(table, 0))
    accepted_as_they_are = {
        "data.weights",
        "data.sources",
        "data.stages",
        "data.cache_dir",
        "feedback.loss_weights.per_pass",
    } | {"optimizer.deepspeed_config"}
    assert leaf_fields(PretrainConfig(), "") - covered == accepted_as_they_are


def leaf_fields(section, prefix):
    found = set()
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            found |= leaf_fields(value, f"{prefix}{field.name}.")
        else:
            found.add(prefix + field.name)
    return found


@pytest.mark.parametrize(
    ("section_name", "field", "value"),
    [
        *cases(FRACTIONS_BELOW_ONE, 0, 0.0, 0.999),
        *cases(NUMBERS_FROM_ZERO, 0),
        *cases(NUMBERS_ABOVE_ZERO, 1, 1e-4),
        *cases({"feedback.prefix": "probability high"}, 0, 1, 0.25),
        *cases({"feedback": "schedule"}, "standard", "progressive", "two_phase_75_25", "full"),
        ("feedback", "input_scale", 0.02),
        ("feedback", "eval_passes", 16),
        ("run", "seed", 2**32 - 1),
        ("training", "rampup_batch_size", [2, 2, 100]),
        ("training", "eval_iters", 0),
        ("model", "kv_channels", 12),
        ("optimizer", "lr_decay_fraction", 1),
    ],
)
def test_edges_are_accepted(section_name, field, value):
    if field == "lr":
        assert dataclasses.replace(default_section("optimizer"), lr=value, min_lr=0.0).problems() == []
        return
    assert dataclasses.replace(default_section(section_name), **{field: value}).problems() == []


@pytest.mark.parametrize(
    "length", [{}, {"train_steps": 1, "train_tokens": 9}, {"train_steps": 1, "train_samples": 1, "train_tokens": 1}]
)
def test_exactly_one_length(length):
    with pytest.raises(ConfigError, match="exactly one"):
        TrainingConfig(**length).validate()


@pytest.mark.parametrize("passes", [{}, {0: 1.0}, {17: 1.0}, {1: 0.5}, {1: 0.6, 2: 0.6}, {1: 1.0, 2: 0.0}])
@pytest.mark.parametrize("index", [0, 1])
def test_wrong_distribution_names_its_phase(passes, index):
    schedule = [PassPhase(0.0, {1: 1.0}), PassPhase(0.5, {2: 1.0})]
    schedule[index].passes = passes
    with pytest.raises(ConfigError, match=rf"feedback\.schedule\[{index}\]\.passes = "):
        FeedbackConfig(schedule=schedule).validate()


@pytest.mark.parametrize("share", [NAN, INF, -0.5, "1", None])
def test_wrong_probability(share):
    with pytest.raises(ConfigError, match=r"feedback\.schedule\[0\]\.passes"):
        FeedbackConfig(schedule=[PassPhase(0.0, {1: share, 2: 1.5})]).validate()


@pytest.mark.parametrize("fraction", [NAN, -0.1, 1.0, "0", None])
def test_wrong_fraction(fraction):
    with pytest.raises(ConfigError, match=r"feedback\.schedule\[0\]\.from_fraction"):
        FeedbackConfig(schedule=[PassPhase(fraction, {1: 1.0})]).validate()


@pytest.mark.parametrize(
    "weights", [[], [1.0], [0.0, 1.0], [0.0, 0.0], [-1.0, 1.0], [NAN, 1.0], [INF, 1.0], ["1", 1.0]]
)
def test_wrong_weights_of_passes(weights):
    feedback = FeedbackConfig(loss_weights=LossWeightsConfig(per_pass=weights))
    with pytest.raises(ConfigError, match=r"feedback\.loss_weights\.per_pass"):
        feedback.validate()


def test_weights_of_passes_cover_the_schedule():
    FeedbackConfig(loss_weights=LossWeightsConfig(per_pass=[1.0, 0.0])).validate()
    only_three = [PassPhase(0.0, {3: 1.0})]
    FeedbackConfig(schedule=only_three, loss_weights=LossWeightsConfig(per_pass=[0.0, 2.0])).validate()


def test_the_shares_of_a_mix_in_are_in_order():
    PrefixConfig(low=0.5, high=0.5).validate()
    with pytest.raises(ConfigError, match=r"feedback\.prefix\.low = 0\.6: above feedback\.prefix\.high = 0\.5"):
        PrefixConfig(low=0.6, high=0.5).validate()


def test_no_pass_in_the_loss():
    FeedbackConfig([PassPhase(0.0, {2: 1.0})], LossWeightsConfig(first_pass=0.0)).validate()
    with pytest.raises(ConfigError, match="one-pass batches"):
        FeedbackConfig(loss_weights=LossWeightsConfig(first_pass=0.0)).validate()
    with pytest.raises(ConfigError, match="first_pass"):
        FeedbackConfig(loss_weights=LossWeightsConfig(first_pass=0.0, extra_passes=0.0)).validate()


@pytest.mark.parametrize(
    "text", ["-1,1,0", "90,abc5,5", "0,0,0", "nan,1,1", "inf,1,1", "1,1,1,1", "1,1", "", ",,", "a"]
)
def test_split_refused_with_its_text(text):
    with pytest.raises(ConfigError) as caught:
        parse_split(text)
    assert repr(text) in str(caught.value)
    with pytest.raises(ConfigError, match="data.split"):
        DataConfig(split=text).validate()


@pytest.mark.parametrize(
    ("text", "parts"),
    [("969, 30, 1", (969, 30, 1)), ("100,0,0", (100, 0, 0)), ("0,1,1", (0, 1, 1)), ("0.9,0.1,0", (0.9, 0.1, 0))],
)
def test_split_accepted(text, parts):
    assert parse_split(text) == parts


@pytest.mark.parametrize("weights", [(0.001, 0.999), (3, 7), (1e-12, 1.0)])
def test_weights_accepted(weights):
    DataConfig(paths=["a", "b"], weights=list(weights)).validate()


@pytest.mark.parametrize("weights", [(0, 1), (-1.0, 1.0), (NAN, 1.0), (INF, 1.0), (1.0,), (1.0, 1.0, 1.0), ()])
def test_weights_refused(weights):
    with pytest.raises(ConfigError, match=r"data\.weights"):
        DataConfig(paths=["a", "b"], weights=list(weights)).validate()


def test_nested_section_is_checked():
    with pytest.raises(ConfigError, match=r"data\.tokenizer\.path"):
        DataConfig(tokenizer=TokenizerConfig(path=" ")).validate()


def test_all_problems_at_once():
    section = dataclasses.replace(default_section("model"), num_layers=0, rotary_base=NAN, vocab_size=-5)
    with pytest.raises(ConfigError) as caught:
        section.validate()
    assert [name in str(caught.value) for name in ("num_layers = 0", "rotary_base = nan", "vocab_size = -5")] == [
        True
    ] * 3


@pytest.mark.parametrize(
    ("fraction", "steps", "start"), [(0.75, 1000, 750), (0.07, 100, 7), (0.5, 3, 2), (1e-9, 10, 1), (0.0, 9, 0)]
)
def test_phase_start_steps(fraction, steps, start):
    feedback = FeedbackConfig(schedule=[PassPhase(0.0, {1: 1.0}), PassPhase(fraction, {2: 1.0})])
    assert feedback.phase_start_steps(steps) == [0, start]


@pytest.mark.parametrize(
    ("name", "phases"),
    [
        ("standard", [(0.0, {1: 1.0})]),
        ("progressive", [(0.0, {1: 1.0}), (0.75, {2: 0.88, 3: 0.12})]),
        ("two_phase_75_25", [(0.0, {1: 1.0}), (0.75, {3: 1.0})]),
        ("full", [(0.0, {3: 1.0})]),
    ],
)
def test_phases_of_the_presets(name, phases):
    feedback = FeedbackConfig(schedule=name)
    assert [(phase.from_fraction, phase.passes) for phase in feedback.phases] == phases
    assert feedback.max_passes == max(max(passes) for _, passes in phases)


@pytest.mark.parametrize(
    ("norm", "scale", "resolved"), [("rms", None, 1.0), ("none", None, 0.03), ("rms", 0.5, 0.5), ("none", 1.5, 1.5)]
)
def test_the_input_scale_follows_the_plain_inputs(norm, scale, resolved):
    config = PretrainConfig()
    config.model.input_norm, config.model.init_method_std, config.feedback.input_scale = norm, 0.03, scale
    assert resolved_input_scale(config) == resolved


@pytest.mark.parametrize(
    ("warmup_steps", "switch_on_step", "factors"),
    [(0, 3, [1.0] * 6), (1, 3, [1.0] * 6), (4, 2, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]), (4, None, [1.0] * 6)],
)
def test_warm_up_of_the_extra_passes(warmup_steps, switch_on_step, factors):
    weights, first = LossWeightsConfig(warmup_steps=warmup_steps), switch_on_step or 0
    assert [weights.extra_factor(first + n, switch_on_step) for n in range(6)] == factors


def test_the_window_of_a_z_loss():
    z_loss = ZLossConfig(coefficient=1e-5, from_fraction=0.75, to_fraction=0.9)
    assert [step for step in range(21) if z_loss.coefficient_at(step, 20) == 1e-5] == [15, 16, 17]
    assert all(ZLossConfig(coefficient=1e-5).coefficient_at(step, 20) == 1e-5 for step in range(20))
    assert not any(ZLossConfig().coefficient_at(step, 20) for step in range(20))
    with pytest.raises(ConfigError, match=r"training\.z_loss\.to_fraction = 0\.7: not above from_fraction = 0\.75"):
        ZLossConfig(from_fraction=0.75, to_fraction=0.7).validate()
