"""memory.budget_gib: what is computed again so that a run fits."""

import copy
import json
import re

import pytest

from megatron_fbt.config.checks import validate_config
from megatron_fbt.config.load import dump_yaml
from megatron_fbt.config.memory import MemoryConfig, RecomputePolicy
from megatron_fbt.config.plan import make_plan
from megatron_fbt.config.recompute_choice import POLICIES, choose, option_table, recompute_options, with_policy
from megatron_fbt.errors import ConfigError
from tests.unit.config.test_reuse import config_of

SHARES = {1: 0.75, 2: 0.22, 3: 0.03}


def options_of(shares=None, **fields):
    config = config_of(**fields)
    return config, recompute_options(config, shares or SHARES, 1, 1000)


def test_options_stand_in_the_order_of_what_they_compute_again():
    _, options = options_of({3: 1.0})
    assert [option.policy for option in options] == list(POLICIES)
    repeated = [option.repeated for option in options]
    assert repeated == sorted(repeated) and repeated[0] == 0.0 and len(set(repeated)) == len(POLICIES)
    _, mostly_one_pass = options_of()
    names = [str(option.policy) for option in mostly_one_pass]
    assert names.index("full, early passes") < names.index("selective, all passes")


def test_the_repeated_share_by_hand():
    fields = {"feedback.prefix_reuse": False, "model.num_layers": 1, "model.hidden_size": 8, "model.ffn_hidden_size": 8}
    fields |= {"model.num_attention_heads": 1, "model.num_query_groups": 1, "data.sequence_length": 3}
    _, options = options_of({2: 1.0}, **fields)
    attention, layer, head, fusion = 4 * 8 * 2, 2 * 8 * 24 + 2 * 8 * 8 + 6 * 8 * 8, 2 * 8 * 1000, 2 * 2 * 8 * 8
    step = 3 * (2 * (layer + attention + head) + fusion)
    again = {
        ("none", "all"): 0,
        ("selective", "early"): attention,
        ("selective", "all"): 2 * attention,
        ("full", "early"): layer + attention,
        ("full", "all"): 2 * (layer + attention),
    }
    assert {tuple(vars(option.policy).values()): option.repeated for option in options} == pytest.approx(
        {policy: count / step for policy, count in again.items()}
    )


def test_with_one_pass_the_early_ones_are_none():
    _, options = options_of({1: 1.0}, **{"feedback.schedule": "standard"})
    assert [str(option.policy) for option in options] == ["none", "selective, all passes", "full, all passes"]


def test_what_a_number_format_forbids_is_no_option():
    delayed = {"precision.fp8": "hybrid", "precision.fp8_recipe": "delayed", "precision.fp8_amax_history_len": 4096}
    _, options = options_of(**delayed, **{"model.hidden_size": 768})
    assert {option.policy.recompute for option in options} == {"none", "selective"}


def test_the_cheapest_that_fits_is_taken():
    config, options = options_of()
    for index, option in enumerate(options):
        config.memory.budget_gib = option.total / 2**30
        cheaper = [other.policy for other in options[:index] if other.total <= option.total]
        assert choose(config.memory, options) == (cheaper or [option.policy])[0]
        plan = make_plan(config, 1, 1000)
        assert plan.memory[plan.sharding].total <= option.total
    assert choose(MemoryConfig(recompute="full"), options) == RecomputePolicy("full", "all")


def test_a_budget_that_nothing_fits_names_the_smallest_estimate():
    config, options = options_of()
    least = min(options, key=lambda option: option.total)
    config.memory.budget_gib = least.total / 2**30 - 0.001
    with pytest.raises(ConfigError, match="memory.budget_gib = .* GiB with recompute full") as refused:
        make_plan(config, 1, 1000)
    config.memory.budget_gib = float(re.search(r"needs ([0-9.]+) GiB", str(refused.value))[1])
    assert choose(config.memory, options) == least.policy, "what it asks for is enough"


@pytest.mark.parametrize("field, value", [("recompute", "full"), ("recompute_passes", "early")])
def test_a_budget_beside_a_policy_is_refused(field, value):
    config = config_of(**{"memory.budget_gib": 30.0, f"memory.{field}": value})
    with pytest.raises(
        ConfigError, match=f"memory.{field} = '{value}': memory.budget_gib = 30.0 chooses it; set it to"
    ):
        validate_config(config)


def test_a_choice_stays_with_its_configuration_and_out_of_its_file():
    config = config_of(**{"memory.budget_gib": 500.0})
    before = dump_yaml(config)
    with pytest.raises(AssertionError, match="not been resolved"):
        assert config.memory.policy
    config.memory.chosen = make_plan(config, 1, 1000).recompute
    assert config.memory.policy == RecomputePolicy() == copy.deepcopy(config).memory.policy
    assert dump_yaml(config) == before and MemoryConfig().chosen is None
    validate_config(config)


def test_passes_of_a_policy():
    early = RecomputePolicy("full", "early")
    assert (early.of_pass(last=False), early.of_pass(last=True)) == ("full", "none")
    assert RecomputePolicy("selective", "all").of_pass(last=True) == "selective"
    assert with_policy(config_of(**{"memory.budget_gib": 1.0}), early).memory.policy == early


def test_the_plan_shows_choice_and_estimates():
    config = config_of(**{"memory.budget_gib": 500.0})
    plan = make_plan(config, 1, 1000)
    lines = option_table(plan.recompute_options, plan.recompute, 500.0)
    assert all(line in plan.describe() for line in lines) and len(lines) == 1 + len(POLICIES)
    assert [line for line in lines if "this run" in line] == [lines[1]] and len({len(line) for line in lines}) == 1
    shown = json.loads(json.dumps(plan.as_dict()))
    assert shown["recompute"] == {"recompute": "none", "recompute_passes": "all"}
    assert shown["recompute_options"][4]["total"] == plan.recompute_options[4].total
    config.memory.budget_gib = None
    assert "computed again" not in make_plan(config, 1, 1000).describe()
