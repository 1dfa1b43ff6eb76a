"""The 1B configurations have the paper's published numbers; an FBT differs from its baseline by the schedule alone."""

import dataclasses
import functools
import re
from pathlib import Path

import pytest

from megatron_fbt.config.checks import validate_config
from megatron_fbt.config.load import load_yaml
from megatron_fbt.config.parameter_count import layer_matrices
from megatron_fbt.config.plan import make_plan
from megatron_fbt.training.lr_schedule import LearningRate

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "configs"
LENGTHS = {"100b": 10**11, "200b": 2 * 10**11, "400b": 4 * 10**11, "1t": 10**12}
MIXES = {"100b": {1: 0.75, 3: 0.25}, **dict.fromkeys(("200b", "400b", "1t"), {1: 0.75, 2: 0.22, 3: 0.03})}
NAMES = [f"{kind}_{length}" for kind in ("fbt_1b_paper", "standard_1b") for length in LENGTHS]


@functools.cache
def plan_of(name):
    config = load_yaml(str(FOLDER / f"{name}.yaml"))
    validate_config(config)
    return config, make_plan(config, config.parallel.world_size or 1, config.model.vocab_size)


@pytest.mark.parametrize("name", NAMES)
def test_size_and_recipe_are_the_published_ones(name):
    config, plan = plan_of(name)
    length = name.rpartition("_")[2]
    standard = plan.parameters - plan.fusion_parameters
    assert round(plan.parameters / 1e9, 2) == round(standard / 1e9, 2) == 1.06
    assert round(100 * plan.fusion_parameters / standard, 3) == 0.445
    assert config.model.head_size == 96
    windows = [config.model.window_of(layer) for layer in range(1, 25)]
    assert windows == [2048, 2048, 2048, 2048, 2048, None] * 4
    assert plan.sequence_length == 8192 and round(plan.tokens_per_step, -4) == 290_000
    assert LENGTHS[length] <= plan.train_tokens < LENGTHS[length] + plan.tokens_per_step
    mix = MIXES[length] if name.startswith("fbt") else {1: 1.0}
    assert plan.pass_shares == pytest.approx(mix, abs=1e-5)
    assert plan.token_equivalents / plan.train_tokens == pytest.approx(sum(k * p for k, p in mix.items()), abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_learning_rates_warm_up_in_200_steps_and_fall_to_zero_in_the_last_quarter(name):
    config, plan = plan_of(name)
    rows = plan.global_batch_size
    schedule = LearningRate(config.optimizer, config.optimizer.lr_warmup_steps * rows, plan.train_samples)
    shares = {0: 0.0, 100: 0.5, 200: 1.0, int(0.74 * plan.train_steps): 1.0, plan.train_steps: 0.0}
    assert {step: schedule.at(step * rows) / 5e-4 for step in shares} == pytest.approx(shares)
    assert schedule.at(7 * plan.train_samples // 8) / 5e-4 == pytest.approx(0.5, abs=1e-4)
    assert (config.optimizer.type, config.optimizer.muon_lr) == ("muon", 1e-2)
    z_loss = [
        config.training.z_loss.coefficient_at(int(share * plan.train_steps), plan.train_steps)
        for share in (0, 0.74, 0.76)
    ]
    assert z_loss == [0, 0, 1e-5]


def flat(section, prefix=""):
    found = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        found |= (
            flat(value, f"{prefix}{field.name}.") if dataclasses.is_dataclass(value) else {prefix + field.name: value}
        )
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_models_differ_in_schedule_length_and_folder_alone(name):
    first, other = (flat(plan_of(n)[0]) for n in (NAMES[0], name))
    differing = {field for field in first if first[field] != other[field]}
    assert differing <= {"feedback.schedule", "training.train_tokens", "run.dir"}
    length = name.rpartition("_")[2]
    assert other["run.dir"] == f"runs/{name}" and other["training.train_tokens"] == LENGTHS[length]


@pytest.mark.parametrize("name", NAMES)
def test_every_unpublished_number_is_marked(name):
    published = (
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels qk_layernorm "
        "sliding_window window_attn_skip_freq vocab_size share_embeddings_and_output_weights schedule muon_lr lr "
        "lr_decay_style lr_warmup_steps lr_decay_fraction min_lr sequence_length train_tokens global_batch_size "
        "coefficient from_fraction"
    ).split()
    lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    settings = [match for match in map(re.compile(r" +(\w+): [^#]+(#.*)?$").match, lines) if match]
    assert len(settings) > 30
    unmarked = {match[1] for match in settings if "our choice" not in (match[2] or "")}
    assert unmarked <= set(published)
    assert ("schedule" in unmarked) == (name != "fbt_1b_paper_1t")


@pytest.mark.parametrize(("name", "size", "layers"), [("fbt_8b", 8.06, (17, 15)), ("fbt_70b", 69.83, (*[10] * 7, 9))])
def test_the_last_stage_of_a_large_model_has_fewer_layers_for_its_output_head(name, size, layers):
    config, plan = plan_of(name)
    assert round(plan.parameters / 1e9, 2) == size and plan.layers_per_stage == layers
    head = config.model.vocab_size * config.model.hidden_size / layer_matrices(config.model)
    work = [*layers[:-1], layers[-1] + head]
    assert max(work) < config.model.num_layers / len(layers) + head
    assert max(work) / (sum(work) / len(work)) < 1.03
