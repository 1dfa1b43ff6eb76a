"""Accuracy by passes and of free writing, against the model's own recurrence and against answers set by hand."""

import pytest
import torch

from megatron_fbt.analysis.accuracy import accuracy_by_passes, generation_accuracy
from megatron_fbt.analysis.tasks import TASKS, TaskRows
from megatron_fbt.hf.generation_fbt import FBTCache
from tests.unit.hf.exports import make_model
from tests.unit.hf.reference import random_weights, tiny_config

T = 8


@pytest.fixture(scope="module")
def model():
    config = tiny_config()
    return make_model(random_weights(config, vocab_size=8), config)


def rows_of(labels, feedback=None):
    ids = torch.randint(0, 8, labels.shape, generator=torch.Generator().manual_seed(3))
    return TaskRows(ids, labels, feedback)


@torch.no_grad()
def test_all_passes_are_the_recurrence_and_one_is_the_plain_model(model):
    rows = rows_of(torch.zeros(40, T, dtype=torch.int64))
    recurrent = model.lm_head(model.model.token_by_token(rows.input_ids, None, FBTCache())).argmax(-1)
    plain = model(rows.input_ids, passes=1).logits.argmax(-1)
    assert not torch.equal(recurrent, plain)
    for truth, passes in ((recurrent, T), (plain, 1)):
        found = accuracy_by_passes(model, TaskRows(rows.input_ids, truth), [1, T])
        assert found[passes].tokens == found[passes].whole == 1.0 and found[T + 1 - passes].tokens < 1
        assert found[passes].by_position == [1.0] * T


@torch.no_grad()
def test_what_is_not_fed_back_stays_plain_and_what_has_no_label_does_not_count(model):
    region = torch.arange(T) > 4
    labels = torch.full((40, T), -100)
    labels[:, 4:] = 1
    rows = rows_of(labels, region)
    (states,) = model.model.parallel_passes(rows.input_ids, T, document_starts=~region.expand(40, T))[-1:]
    guesses = model.lm_head(states).argmax(-1)
    found = accuracy_by_passes(model, rows, [T])[T]
    assert found.tokens == pytest.approx((guesses[:, 4:] == 1).double().mean().item())
    assert len(found.by_position) == T - 4
    labels[:, 4:] = guesses[:, 4:]
    labels[::2, 6] = 7 - guesses[::2, 6]  # one mistake in every second row
    found = accuracy_by_passes(model, TaskRows(rows.input_ids, labels, region), [T])[T]
    assert (found.tokens, found.whole, found.by_position) == (0.875, 0.5, [1.0, 1.0, 0.5, 1.0])


@pytest.mark.parametrize("regime", ["standard", "soft"])
def test_written_answers_are_those_of_generate(model, regime):
    rows = TASKS["cot5"].rows(12, T, torch.Generator().manual_seed(1))
    prompt = rows.input_ids[:, :5]
    assert (prompt[:, -1] == 5).all()
    written = [model.generate(row[None], regime=regime, max_new_tokens=4, do_sample=False)[0, 5:] for row in prompt]
    truth = torch.full((12, T), -100)
    truth[:, 4:] = torch.stack(written)
    truth[0, 7] = 7 - truth[0, 7]
    found = generation_accuracy(model, TaskRows(rows.input_ids, truth, rows.feedback), regime)
    assert found.tokens == pytest.approx(47 / 48) and found.whole == pytest.approx(11 / 12)
    assert found.by_position[:3] == [1.0] * 3
