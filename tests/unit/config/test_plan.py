"""Derived quantities against numbers worked out by hand."""

import dataclasses
import functools
import json

import pytest

from megatron_fbt.config.dry_run import check_vocab_size, planned_vocab_size
from megatron_fbt.config.feedback import PassPhase
from megatron_fbt.config.model import ModelConfig
from megatron_fbt.config.parameter_count import count_parameters, largest_rank_parameters, padded_vocab_size
from megatron_fbt.config.plan import make_plan
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.errors import ConfigError

SMALL = ModelConfig(
    num_layers=4,
    hidden_size=8,
    ffn_hidden_size=20,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=6,
    qk_layernorm=True,
)


def small_config():
    config = PretrainConfig(model=dataclasses.replace(SMALL))
    config.data.sequence_length = 16
    config.training.train_steps = 100
    return config


def test_parameters_by_hand():
    # qkv: (4 + 2 + 2) heads x 6 x 8 = 384; proj: 8 x 24 = 192; q and k norms: 12; two norms: 16;
    # fc1: 2 x 20 x 8 = 320; fc2: 8 x 20 = 160. One layer: 1084.
    count = count_parameters(SMALL, vocab_size=11)
    assert count.layers == 4 * 1084
    assert (count.embedding, count.final_norm, count.output, count.fusion) == (88, 8, 0, 128)
    assert count.total == 4336 + 88 + 8 + 128
    untied = dataclasses.replace(SMALL, share_embeddings_and_output_weights=False)
    assert count_parameters(untied, vocab_size=11).total == 4560 + 88


def test_parameters_of_the_default_head_and_ffn_sizes():
    # D 12, 2 heads of 6, ffn ceil(8 * 12 / 3 / 64) * 64 = 64: 4 * 144 + 3 * 64 * 12 + 24 = 2904.
    model = ModelConfig(num_layers=1, hidden_size=12, num_attention_heads=2)
    assert count_parameters(model, vocab_size=10).total == 2904 + 120 + 12 + 288


def test_fullest_rank_by_hand():
    parallel = PretrainConfig().parallel
    model = dataclasses.replace(SMALL, make_vocab_size_divisible_by=4)
    assert largest_rank_parameters(model, parallel, 11) == 4336 + 12 * 8 + 128 + 8
    parallel.tensor_model_parallel_size = parallel.pipeline_model_parallel_size = 2
    # A layer: (384 + 192 + 320 + 160) / 2 + 28 = 556, two of them. First stage: 16 / 2 x 8 + 128 / 2 = 128.
    assert largest_rank_parameters(model, parallel, 11) == 2 * 556 + 128


@pytest.mark.parametrize(
    ("vocab", "divisible_by", "tensor", "padded"),
    [(1003, 128, 1, 1024), (1003, 128, 2, 1024), (1003, 128, 4, 1024), (1003, 128, 16, 2048), (1024, 128, 8, 1024)]
    + [(7, 1, 1, 7), (7, 1, 2, 8), (1, 128, 1, 128)],
)
def test_padded_vocab_size(vocab, divisible_by, tensor, padded):
    assert padded_vocab_size(vocab, divisible_by, tensor) == padded


def test_default_schedule_is_75_22_3():
    plan = make_plan(small_config(), world_size=2, vocab_size=11)
    assert plan.pass_shares == pytest.approx({1: 0.75, 2: 0.22, 3: 0.03})
    assert plan.expected_passes == pytest.approx(1.28)
    assert plan.token_equivalents == pytest.approx(1.28 * plan.train_tokens)
    assert plan.phase_start_steps == (0, 75)
    assert (plan.max_passes, plan.validation_passes) == (3, 3)


@pytest.mark.parametrize(
    ("schedule", "shares", "mean"),
    [
        ("standard", {1: 1.0}, 1.0),
        ("progressive", {1: 0.75, 2: 0.22, 3: 0.03}, 1.28),
        ("two_phase_75_25", {1: 0.75, 3: 0.25}, 1.5),
        ("full", {3: 1.0}, 3.0),
        ([PassPhase(0.0, {1: 0.5, 16: 0.5})], {1: 0.5, 16: 0.5}, 8.5),
    ],
)
def test_shares_of_a_schedule(schedule, shares, mean):
    config = small_config()
    config.feedback.schedule = schedule
    plan = make_plan(config, world_size=1, vocab_size=11)
    assert plan.pass_shares == pytest.approx(shares) and plan.expected_passes == pytest.approx(mean)
    assert plan.token_equivalents == pytest.approx(mean * plan.train_tokens)
    assert plan.max_passes == plan.validation_passes == max(shares)
    for count, share in shares.items():
        assert f"{count}: {share:.2%}" in plan.describe()


def test_a_resumed_run_plans_with_the_phases_it_has():
    config = small_config()
    assert make_plan(config, 1, 11, [0, 50]).pass_shares == pytest.approx({1: 0.5, 2: 0.44, 3: 0.06})
    beyond = make_plan(config, 1, 11, [0, 150])
    assert beyond.pass_shares == {1: 1.0} and beyond.token_equivalents == beyond.train_tokens
    assert beyond.phase_start_steps == (0, 150)


def test_sizes():
    config = small_config()
    config.parallel.tensor_model_parallel_size = 2
    config.parallel.pipeline_model_parallel_size = 2
    config.training.micro_batch_size = 2
    config.training.global_batch_size = 24
    plan = make_plan(config, world_size=12, vocab_size=1003)
    assert (plan.data_parallel_size, plan.layers_per_stage, plan.num_microbatches) == (3, (2, 2), 4)
    assert (plan.train_steps, plan.train_samples, plan.train_tokens) == (100, 2400, 2400 * 16)
    assert (plan.tokens_per_step, plan.padded_vocab_size) == (384, 1024)


def test_token_equivalents_follow_the_ramp_up():
    config = small_config()
    config.training.train_steps = 4
    config.training.global_batch_size = 8
    config.training.rampup_batch_size = [2, 6, 4]  # 2, 2, 8, 8 rows
    config.feedback.schedule = [PassPhase(0.0, {3: 1.0}), PassPhase(0.75, {1: 1.0})]
    plan = make_plan(config, world_size=1, vocab_size=11)
    assert plan.train_samples == 20
    assert plan.token_equivalents == 16 * (12 * 3 + 8)
    assert plan.expected_passes == 2.5


def test_phase_that_is_never_reached_has_no_share():
    config = small_config()
    config.training.train_steps = 2
    config.feedback.schedule = [PassPhase(0.0, {1: 1.0}), PassPhase(0.9, {2: 1.0})]
    assert make_plan(config, 1, 11).pass_shares == {1: 1.0}


@pytest.mark.parametrize(
    ("dtype", "sharding", "bytes_each"),
    [("fp32", "none", 16), ("bf16", "none", 18), ("fp32", "megatron", 10), ("bf16", "megatron", 9)],
)
def test_state_bytes(dtype, sharding, bytes_each):
    config = small_config()
    config.precision.dtype, config.optimizer.sharding = dtype, sharding
    plan = make_plan(config, world_size=4, vocab_size=11)
    assert plan.memory[sharding].states == bytes_each * plan.largest_rank_parameters


def test_state_bytes_of_muon_have_one_state_for_each_hidden_matrix():
    config = small_config()
    config.optimizer.type, config.precision.dtype = "muon", "bf16"
    model, plan = config.model, make_plan(config, world_size=2, vocab_size=11)
    rows = 2 * (model.num_attention_heads + model.query_groups) * model.head_size + 3 * model.ffn_size
    matrices = (model.num_layers * rows + 2 * model.hidden_size) * model.hidden_size
    assert plan.memory["none"].states == 18 * plan.largest_rank_parameters - 4 * matrices


def test_description_is_an_aligned_table():
    plan = make_plan(small_config(), world_size=1, vocab_size=11)
    rows = plan.describe().partition("\n\n")[0].splitlines()
    starts = {len(line) - len(line.split("  ", 1)[1].lstrip()) for line in rows}
    assert len(starts) == 1
    assert f"{plan.parameters:,} (fusion 128)" in plan.describe()


def test_json_has_all_fields():
    plan = make_plan(small_config(), world_size=1, vocab_size=11)
    read = json.loads(json.dumps(plan.as_dict()))
    assert set(read) == {field.name for field in dataclasses.fields(plan)}
    assert read["pass_shares"]["1"] == 0.75


@pytest.mark.parametrize(
    ("norm", "scale", "noted"),
    [("rms", 1.0, 0), ("none", 1.0, 1), ("none", 0.02, 0), ("rms", 0.5, 1), ("rms", None, 0), ("none", None, 0)],
)
def test_note_on_the_input_scale(norm, scale, noted):
    config = small_config()
    config.model.input_norm, config.feedback.input_scale = norm, scale
    notes = make_plan(config, 1, 11).notes
    assert sum("input_scale" in note for note in notes) == noted


def test_vocabulary_of_a_plan():
    config = small_config()
    with pytest.raises(ConfigError, match=r"model\.vocab_size = null.*data\.tokenizer\.path"):
        planned_vocab_size(config)
    config.model.vocab_size = 99
    assert planned_vocab_size(config) == 99
    config.data.tokenizer.path = "no/such/file.model"
    assert planned_vocab_size(config) == 99


def test_vocabulary_not_smaller_than_the_tokenizers():
    config = small_config()
    assert check_vocab_size(config, 50) == 50
    config.model.vocab_size = 64
    assert check_vocab_size(config, 64) == 64
    with pytest.raises(ConfigError, match=r"model\.vocab_size = 64.*65"):
        check_vocab_size(config, 65)


@pytest.mark.parametrize(
    ("optimizer", "phases", "noted"),
    [
        ("muon", [{1: 1.0}, {1: 0.5, 3: 0.5}], 1),
        ("muon", [{2: 1.0}, {1: 1.0}], 1),
        ("muon", [{1: 1.0}, {2: 0.5, 3: 0.5}], 0),
        ("muon", [{1: 1.0}], 0),
        ("adamw", [{1: 1.0}, {1: 0.5, 3: 0.5}], 0),
    ],
)
def test_note_on_muon_and_one_pass_batches_after_the_first_multi_pass_one(optimizer, phases, noted):
    config = small_config()
    config.optimizer.type = optimizer
    config.feedback.schedule = [PassPhase(number / 2, passes) for number, passes in enumerate(phases)]
    notes = make_plan(config, 1, 11).notes
    assert sum("muon" in note for note in notes) == noted


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"feedback.schedule": "progressive", "training.train_steps": 2}, ["phase 2", "passes 2, 3", "after step 2"]),
        (
            {"feedback.schedule": [(0.0, 1), (0.51, 2), (0.55, 3)], "training.train_steps": 8},
            ["phase 2", "starts there"],
        ),
        ({"training.z_loss.coefficient": 1e-4, "training.z_loss.from_fraction": 0.999}, ["training.z_loss is never"]),
        ({"model.sliding_window": 16}, ["model.sliding_window = 16 changes nothing in rows of 16 tokens"]),
        ({"feedback.schedule": "standard"}, ["the fusion layer is never trained"]),
        (
            {"memory.chunked_loss": False, "memory.loss_chunk_mib": 8.0},
            ["memory.loss_chunk_mib = 8 is unused", "memory.chunked_loss"],
        ),
        ({"memory.recompute_passes": "early"}, ["memory.recompute_passes", "memory.recompute is none"]),
    ],
)
def test_note_on_what_is_never_reached_or_changes_nothing(values, parts):
    config = small_config()
    for name, value in values.items():
        section, attribute = name.rsplit(".", 1)
        if isinstance(value, list):
            value = [PassPhase(begin, {passes: 1.0}) for begin, passes in value]
        setattr(functools.reduce(getattr, section.split("."), config), attribute, value)
    before = set(make_plan(small_config(), 1, 11).notes)
    (note,) = set(make_plan(config, 1, 11).notes) - before
    assert [part for part in parts if part not in note] == [], note


def test_a_later_phase_starts_of_a_resumed_run_are_in_the_notes():
    config = small_config()
    config.feedback.schedule, config.training.train_steps = "progressive", 12
    notes = make_plan(config, 1, 11, phase_start_steps=[0, 15]).notes
    assert any("phase 2" in note and "starts after step 15" in note for note in notes)
