"""Bytes on each process, by hand."""

import pytest

from megatron_fbt.config.activation_memory import InFlight, layer_elements, passes_in_flight, peak_activations
from megatron_fbt.config.memory_report import memory_report, memory_table, rank_memory
from megatron_fbt.config.parameter_count import StageCount, stage_parameters
from megatron_fbt.config.pretrain import PretrainConfig


def config_of(dtype="bf16", **parallel) -> PretrainConfig:
    config = PretrainConfig()
    config.precision.dtype, config.model.vocab_size = dtype, 1000
    for name, value in parallel.items():
        setattr(config.parallel, name, value)
    return config


HELD = StageCount(total=1000, hidden_matrices=600)
STATES = {
    ("bf16", "none"): (2000, 4000, 4000, 8000),
    ("bf16", "megatron"): (2000, 4000, 1000, 2000),
    ("bf16", "zero1"): (2000, 4000, 1000, 2000),
    ("bf16", "zero2"): (2000, 1000, 1000, 2000),
    ("bf16", "zero3"): (500, 1000, 1000, 2000),
    ("fp32", "none"): (4000, 4000, 0, 8000),
    ("fp32", "megatron"): (4000, 4000, 0, 2000),
    ("fp32", "zero3"): (1000, 1000, 1000, 2000),
}


@pytest.mark.parametrize("dtype, sharding", STATES)
def test_states_of_a_thousand_parameters_over_four_ranks(dtype, sharding):
    memory = rank_memory(config_of(dtype), 0, HELD, sharding, 4, 1000)
    found = (memory.weights, memory.gradients, memory.master_weights, memory.moments)
    assert found == STATES[dtype, sharding] and memory.states == sum(found)


def test_muon_has_one_moment_of_the_hidden_matrices():
    config = config_of()
    config.optimizer.type = "muon"
    assert rank_memory(config, 0, HELD, "none", 4, 1000).moments == 8 * 1000 - 4 * 600
    assert list(memory_report(config, 4, 1000)) == ["none"]


def test_pipeline_stages_leave_out_what_they_do_not_allow():
    assert list(memory_report(config_of(), 2, 1000)) == ["none", "megatron", "zero1", "zero2", "zero3"]
    assert list(memory_report(config_of(pipeline_model_parallel_size=2), 2, 1000)) == ["none", "megatron", "zero1"]


def test_shardings_that_are_refused_have_no_row():
    config = config_of()
    config.memory.chunked_loss = True
    assert list(memory_report(config, 2, 1000)) == ["none", "megatron", "zero1", "zero2"]


def test_passes_in_flight():
    config = config_of(pipeline_model_parallel_size=4)
    config.feedback.schedule = "full"
    assert [passes_in_flight(config, stage).total for stage in range(4)] == [15, 13, 11, 9]
    assert [passes_in_flight(config, stage) for stage in (0, 3)] == [InFlight(7, 4, 4), InFlight(4, 4, 1)]
    config.feedback.schedule = "standard"
    assert [passes_in_flight(config, stage).total for stage in range(4)] == [4, 3, 2, 1]
    assert passes_in_flight(config_of(), 0) == InFlight(1, 1, 1)


def test_logits_are_on_the_last_stage_alone():
    config = config_of(pipeline_model_parallel_size=2)
    first, last = (rank_memory(config, stage, HELD, "none", 1, 1000) for stage in (0, 1))
    assert first.logits == 0 and last.logits > 0


def test_the_table_marks_the_run():
    lines = memory_table(memory_report(config_of(), 2, 1000), "zero2")
    assert len(lines) == 6 and [line for line in lines if "this run" in line] == [lines[4]]
    assert lines[0].split()[-1] == "total" and all(len(line) == len(lines[0]) for line in lines)
    assert "master weights" in lines[0]


def test_a_layer_keeps_by_hand():
    config = config_of()
    config.model.hidden_size, config.model.num_attention_heads, config.model.num_query_groups = 64, 4, 2
    config.model.ffn_hidden_size = 100
    assert layer_elements(config, "full") == 64
    assert layer_elements(config, "none") == 6 * 64 + 5 * 100 + 4 * 64
    assert layer_elements(config, "selective") == 6 * 64 + 5 * 100 + 2 * 64 + 2 * 32


def test_more_computed_again_needs_no_more_and_more_passes_need_no_less():
    config, found = config_of(), {}
    for schedule in ("standard", "full"):
        for policy in (("none", "all"), ("full", "early"), ("full", "all")):
            config.feedback.schedule = schedule
            config.memory.recompute, config.memory.recompute_passes = policy
            found[schedule, policy[0], policy[1]] = sum(peak_activations(config, 0, 1000))
    for schedule in ("standard", "full"):
        none, early, whole = (found[key] for key in found if key[0] == schedule)
        assert none >= early > whole
    assert all(found[("full", *key[1:])] > size for key, size in found.items() if key[0] == "standard")


def test_one_backward_through_all_passes_keeps_their_weights_gradients():
    config = config_of("fp32")
    config.feedback.prefix_reuse, config.memory.chunked_loss = False, False
    config.memory.recompute, config.data.sequence_length = "full", 64
    apart, together = (rank_memory(config, 0, HELD, sharding, 1, 1000).activations for sharding in ("none", "zero1"))
    weights = 4 * stage_parameters(config.model, config.parallel, 1000)[0].total
    assert 0.5 * weights < together - apart <= weights
