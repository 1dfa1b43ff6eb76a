"""Stages and shares of a mixture as arithmetic: by hand, at any size, across stops, whatever the batches."""

import pytest

from megatron_fbt.config.checks import validate_config
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.config.sources import SourceConfig, StageConfig
from megatron_fbt.data.mixture import first_samples, make_mixture
from megatron_fbt.data.sampler import micro_batch_sample_ids
from megatron_fbt.errors import ConfigError
from megatron_fbt.training.batch_size import BatchSizeSchedule, run_length

HUGE = [2**31 - 1, 2**31, 2**32 + 1, 3 * 10**12]


def source(name, weight=None, **fields):
    return SourceConfig(name, [f"data/{name}"], weight, **fields)


def mixed(sources, stages=(), **training):
    config = PretrainConfig()
    config.data.sequence_length = 8
    config.data.sources = sources
    config.data.stages = [StageConfig(first_step, weights) for first_step, weights in stages]
    for name, value in {"train_steps": 100, "global_batch_size": 4, **training}.items():
        setattr(config.training, name, value)
    return config


def mixture_of(config):
    validate_config(config)
    return make_mixture(config, run_length(config.training, config.data.sequence_length)[1])


def test_stages_by_hand():
    stages = [(0, None), (10, {"b": 1, "c": 1}), (20, {"a": 3, "c": 1}), (200, {"a": 1})]
    mixture = mixture_of(mixed([source("a", 3), source("b", 1), source("c", 4)], stages, train_steps=30))
    bounds = [(stage.first_step, stage.first_sample, stage.end_sample) for stage in mixture.stages]
    assert bounds == [(0, 0, 40), (10, 40, 80), (20, 80, 120)]  # the last is never reached
    assert [stage.order.quotas for stage in mixture.stages] == [[15, 5, 20], [0, 20, 20], [30, 0, 10]]
    assert mixture.rows == [45, 25, 50] and mixture.samples == 120
    assert mixture.rows_before(40) == [15, 5, 20] and mixture.rows_before(80) == [15, 25, 40]
    with pytest.raises(IndexError, match="sample 120 is not one of 120"):
        mixture.place(120)


def test_rows_of_a_source_go_on_across_stages():
    stages = [(0, None), (7, {"b": 1, "c": 2}), (13, None), (21, {"a": 1})]
    mixture = mixture_of(mixed([source("a", 0.5), source("b", 0.3), source("c", 0.2)], stages, train_steps=40))
    taken = [0, 0, 0]
    for sample in range(mixture.samples):
        assert mixture.rows_before(sample) == taken
        item, row = mixture.place(sample)
        assert row == taken[item]
        taken[item] += 1
    assert taken == mixture.rows


def test_stages_begin_at_their_steps_during_the_ramp_up():
    config = mixed(
        [source("a", 1), source("b", 1)],
        [(0, {"a": 1}), (3, {"b": 1}), (5, None)],
        train_steps=12,
        global_batch_size=8,
        rampup_batch_size=[2, 2, 30],
    )
    mixture, schedule, consumed = mixture_of(config), BatchSizeSchedule(config.training, 1), 0
    for step in range(12):
        size = schedule.global_batch_size(consumed)
        used = {mixture.place(sample)[0] for sample in range(consumed, consumed + size)}
        assert used == ({0} if step < 3 else {1} if step < 5 else {0, 1}), step
        consumed += size
    assert consumed == mixture.samples


@pytest.mark.parametrize("stop", [1, 3, 4, 9, 10, 11, 25, 39])
def test_a_resume_with_other_batches_keeps_the_stages_that_it_has_met(stop):
    config = mixed([source("a", 1), source("b", 1)], [(0, {"a": 1}), (4, {"b": 1}), (10, {"a": 1}), (30, {"b": 2})])
    before = first_samples(config)
    assert before == [0, 16, 40, 120]
    config.training.global_batch_size = 6
    met = [sample for sample, stage in zip(before, config.data.stages, strict=True) if stage.first_step <= stop]
    after = first_samples(config, met, (stop, 4 * stop))
    assert after[: len(met)] == met
    steps = [stage.first_step for stage in config.data.stages]
    assert after[len(met) :] == [4 * stop + 6 * (step - stop) for step in steps[len(met) :]]


@pytest.mark.parametrize("done", [(9, 36), (100, 400)])
def test_without_stages_a_resumed_run_goes_on_in_its_sources(done):
    config = mixed([source("a", 1), source("b", tokens=800.0)])
    assert first_samples(config, [], done) == [0]
    config.data.stages = [StageConfig(0), StageConfig(200, {"a": 1})]
    assert first_samples(config, [], done)[0] == 0 and mixture_of(config).stages[0].first_sample == 0


def test_budgets_and_weights_share_the_run():
    # 400 rows of 8 tokens: 800 tokens are 100 rows; the rest is shared 3 : 1.
    sources = [source("a", tokens=800.0), source("b", 3), source("c", 1), source("d", tokens=80.0)]
    assert mixture_of(mixed(sources)).rows == [100, 218, 72, 10]  # 290 x 3/4 = 217.5
    # Budgets are spent in the stages that have no weights of their own: steps 0 to 49 and 75 to 99.
    stages = [(0, None), (50, {"b": 1}), (75, None)]
    mixture = mixture_of(mixed(sources, stages))
    assert [sum(stage.order.quotas) for stage in mixture.stages] == [200, 100, 100]
    assert mixture.rows[0] in (99, 100, 101) and mixture.rows[3] in (9, 10, 11)
    assert [stage.order.quotas[0] for stage in mixture.stages] == [67, 0, 33]


def test_budgets_that_do_not_fit_are_refused_with_the_numbers():
    too_many = mixed([source("a", tokens=3.0e3), source("b", tokens=300), source("c", 1)])
    with pytest.raises(ConfigError, match=r"budgets of 3,300 tokens in all, and the run has 3,200; lower"):
        validate_config(too_many)
    too_few = mixed([source("a", tokens=3.0e3), source("b", tokens=100)])
    with pytest.raises(ConfigError, match=r"budgets of 3,100 tokens in all, and the run has 3,200; raise"):
        validate_config(too_few)
    # Less than a global batch is what rounding a run's length up to whole batches does.
    assert mixture_of(mixed([source("a", tokens=3.0e3), source("b", tokens=190)])).rows == [376, 24]
    elsewhere = mixed([source("a", tokens=3.0e3), source("b", 1)], [(0, {"b": 1}), (50, None)])
    with pytest.raises(
        ConfigError, match="3,000 tokens in all, and the stages without weights of their own have 1,600"
    ):
        validate_config(elsewhere)
    never = mixed([source("a", tokens=3.0e3), source("b", 1)], [(0, {"b": 1}), (150, None)])
    with pytest.raises(ConfigError, match="3,000 tokens in all, and the stages without weights of their own have 0"):
        validate_config(never)


@pytest.mark.parametrize("spread", [0, 3, 12])
def test_300_sources_have_their_shares(spread):
    weights = [10.0 ** -(i * spread / 299) * (1 + (i * 7919) % 13) for i in range(300)]
    for steps in (1, 7, 500):
        mixture = mixture_of(mixed([source(f"s{i}", w) for i, w in enumerate(weights)], train_steps=steps))
        samples = 4 * steps
        found = [0] * 300
        for sample in range(samples):
            found[mixture.place(sample)[0]] += 1
        exact = [w / sum(weights) for w in weights]
        assert found == mixture.rows
        assert max(abs(f / samples - e) for f, e in zip(found, exact, strict=True)) < 1 / samples


@pytest.mark.parametrize("samples", HUGE)
def test_samples_beyond_32_bits_have_their_places_in_every_rank_and_stage(samples):
    batch = 3 * 2**10
    steps = -(-samples // batch)
    stages = [(0, None), (steps // 3, {"a": 1, "b": 2}), (steps // 2, {"c": 1, "a": 1e-9})]
    config = mixed(
        [source("a", 0.7), source("b", 0.3), source("c", 1e-12)],
        stages,
        train_steps=steps,
        global_batch_size=batch,
        micro_batch_size=4,
    )
    mixture = mixture_of(config)
    assert mixture.samples == sum(mixture.rows) == steps * batch >= samples
    assert mixture.stages[1].first_sample == steps // 3 * batch
    schedule = BatchSizeSchedule(config.training, 3)
    for step in (0, steps // 3 - 1, steps // 3, steps // 2, steps - 1):
        consumed = schedule.samples_after(step)
        assert consumed == step * batch
        ids = [
            number
            for rank in range(3)
            for numbers in micro_batch_sample_ids(consumed, batch, 4, rank, 3)
            for number in numbers
        ]
        places = {mixture.place(number) for number in ids}
        assert sorted(ids) == list(range(consumed, consumed + batch)) and len(places) == batch
        before, after = mixture.rows_before(consumed), mixture.rows_before(consumed + batch)
        expected = {(item, row) for item in range(3) for row in range(before[item], after[item])}
        assert places == expected


@pytest.mark.parametrize("tokens", HUGE)
def test_lengths_in_tokens_beyond_32_bits(tokens):
    config = mixed([source("a", 1)], train_steps=None, train_tokens=tokens, rampup_batch_size=[2, 2, 1000])
    steps, samples = run_length(config.training, 8)
    assert 0 <= samples - -(-tokens // 8) < 4 and mixture_of(config).rows == [samples]
    schedule = BatchSizeSchedule(config.training, 1)
    assert schedule.samples_after(steps) == samples and schedule.samples_after(steps - 1) == samples - 4
