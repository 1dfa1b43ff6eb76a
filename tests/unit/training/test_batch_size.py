"""The ramp-up is a pure function of consumed samples, and its closed forms agree with stepping through it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fbt.config.training import TrainingConfig
from megatron_fbt.training.batch_size import BatchSizeSchedule, run_length


def schedule(batch=32, rampup=None, micro=1, ranks=1):
    training = TrainingConfig(global_batch_size=batch, rampup_batch_size=rampup, micro_batch_size=micro)
    return BatchSizeSchedule(training, ranks)


def test_constant():
    batches = schedule(batch=12, micro=2, ranks=3)
    assert [batches.global_batch_size(0), batches.num_microbatches(10**13)] == [12, 2]
    assert [batches.total_steps(n) for n in (0, 1, 11, 12, 13)] == [0, 1, 1, 1, 2]
    assert batches.samples_after(10) == 120


def test_rampup_by_hand():
    # Three increments over 1000 samples: one after each 333 1/3 samples.
    batches = schedule(batch=32, rampup=[8, 8, 1000], micro=2, ranks=2)
    sizes = {0: 8, 333: 8, 334: 16, 666: 16, 667: 24, 999: 24, 1000: 32, 10**12: 32}
    assert {samples: batches.global_batch_size(samples) for samples in sizes} == sizes
    assert batches.num_microbatches(334) == 4
    assert [level.first_step for level in batches.levels()] == [0, 42, 63, 77]
    assert [level.first_sample for level in batches.levels()] == [0, 336, 672, 1008]


def test_steps_may_jump_over_a_level():
    batches = schedule(batch=16, rampup=[8, 1, 16])  # an increment after each 2 samples
    assert [level.global_batch_size for level in batches.levels()] == [8, 12, 16]


@pytest.mark.parametrize("consumed", [2**31 - 1, 2**31, 2**32 + 1, 3 * 10**12])
def test_large_counts_are_exact(consumed):
    batches = schedule(batch=3000, rampup=[1000, 1, 6 * 10**12])
    assert batches.global_batch_size(consumed) == 1000 + consumed * 2000 // (6 * 10**12)
    steps = batches.total_steps(consumed)
    assert batches.samples_after(steps - 1) < consumed <= batches.samples_after(steps)


@settings(max_examples=60, deadline=None)
@given(start=st.integers(1, 8), increment=st.integers(1, 5), increments=st.integers(0, 5), samples=st.integers(1, 300))
def test_closed_forms_agree_with_stepping(start, increment, increments, samples):
    rampup = [start, increment, samples] if increments else None
    batches = schedule(batch=start + increment * increments, rampup=rampup)
    consumed = 0
    for step in range(80):
        assert batches.samples_after(step) == consumed
        assert batches.total_steps(consumed) == step
        assert batches.total_steps(consumed + 1) == step + 1
        consumed += batches.global_batch_size(consumed)


def test_run_length_rounds_up():
    lengths = {"train_steps": 5, "train_samples": 33, "train_tokens": 32 * 128 + 1}
    found = {
        name: run_length(TrainingConfig(global_batch_size=8, **{name: value}), 128) for name, value in lengths.items()
    }
    assert found == {"train_steps": (5, 40), "train_samples": (5, 40), "train_tokens": (5, 40)}


def test_run_length_with_rampup():
    training = TrainingConfig(global_batch_size=32, rampup_batch_size=[8, 8, 1000], train_steps=80)
    assert run_length(training, 128) == (80, 1008 + 3 * 32)


@pytest.mark.parametrize("length", [{"train_steps": 40}, {"train_samples": 333}, {"train_tokens": 33_333}])
@pytest.mark.parametrize("rampup", [None, [8, 8, 100]])
def test_a_run_that_goes_on_unchanged_has_the_length_that_it_had(length, rampup):
    training = TrainingConfig(global_batch_size=32, rampup_batch_size=rampup, **length)
    batches, whole, consumed = schedule(rampup=rampup), run_length(training, 64), 0
    for step in range(whole[0] + 1):
        assert run_length(training, 64, (step, consumed)) == whole
        consumed += batches.global_batch_size(consumed)


def test_after_a_change_only_what_remains_follows_from_the_new_values():
    done = (6, 48)
    for changed, expected in (
        ({"train_samples": 96}, (9, 96)),
        ({"train_samples": 97}, (10, 112)),
        ({"train_samples": 40}, done),
        ({"train_steps": 10}, (10, 112)),
        ({"train_steps": 3}, (3, 48)),
        ({"train_samples": 96, "rampup_batch_size": [8, 8, 64]}, (10, 96)),
    ):
        training = TrainingConfig(global_batch_size=16, **changed)
        assert run_length(training, 128, done) == expected, changed
