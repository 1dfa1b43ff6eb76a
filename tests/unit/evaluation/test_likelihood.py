"""Log-likelihoods against the independent model: sums over its own token-by-token or pass-by-pass states."""

import pytest
import torch

from megatron_fbt.errors import BadNumbersError
from megatron_fbt.evaluation.likelihood import Passes, ScoredRow, log_likelihoods
from tests.unit.evaluation.models import text_config, text_reference, text_weights
from tests.unit.hf.exports import make_model

REGIMES = ["standard", "soft", "fused", "recurrent"]


@pytest.fixture(scope="module")
def model():
    return make_model(text_weights(text_config()), text_config())


def rows(seed=0):
    """Rows with prompts and continuations of different lengths; in some, not all of the continuation counts."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for prompt, length, skipped in ((5, 4, 0), (1, 9, 0), (12, 1, 0), (3, 12, 5)):
        ids = torch.randint(97, (prompt + length,), generator=generator).tolist()
        made.append(ScoredRow(ids, prompt, prompt + skipped))
    return made


def summed(states, row):
    """Sum of log-probabilities by a plain loop over the states of one row; and whether greedy decoding gives it."""
    logits = text_reference().logits(states)
    total, greedy = 0.0, True
    for place in range(row.first, len(row.ids)):
        scores = logits[place - 1] - torch.logsumexp(logits[place - 1], 0)
        total += scores[row.ids[place]].item()
        greedy = greedy and scores.argmax().item() == row.ids[place]
    return total, greedy


def check(found, expected):
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=3e-4)


@pytest.mark.parametrize("regime", REGIMES)
def test_exact_is_the_recurrence(model, regime):
    reference = text_reference()
    found = log_likelihoods(model, rows(), Passes(regime, 2, None))
    states = [reference.regime(torch.tensor(row.ids), regime, row.prompt, 2) for row in rows()]
    check(found, [summed(one, row) for one, row in zip(states, rows())])


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("passes", [1, 2, 4])
def test_parallel_passes_over_the_continuation(model, regime, passes):
    """Each pass in double precision, with the prompt's inputs as the regime leaves them."""
    reference = text_reference()
    expected = []
    for row in rows():
        ids = torch.tensor(row.ids)
        if regime == "recurrent":
            states = reference.passes(ids, passes)[-1]
        elif regime == "standard":
            states = reference.passes(ids, 1)[-1]
        else:
            prompt_passes = 3 if regime == "fused" else 1
            head = reference.pass_inputs(ids[: row.prompt], prompt_passes)[-1]
            states = reference.stack(torch.cat([head, reference.plain(ids[row.prompt :])]))
            for _ in range(passes - 1):
                tail = [reference.fuse(ids[t], states[t - 1]) for t in range(row.prompt, len(ids))]
                states = reference.stack(torch.cat([head, torch.stack(tail)]))
        expected.append(summed(states, row))
    check(log_likelihoods(model, rows(), Passes(regime, 2, passes)), expected)


@pytest.mark.parametrize("regime", ["soft", "fused"])
def test_first_tokens_are_exact_after_as_many_passes(model, regime):
    """K passes give the first K tokens their recurrent likelihood, and no more of them."""
    ids = rows()[1].ids
    for count in (1, 3, 4, 9):
        row = [ScoredRow(ids[: 1 + count], 1, 1)]
        (exact, _), (found, _) = (log_likelihoods(model, row, Passes(regime, 1, passes))[0] for passes in (None, 3))
        assert (abs(exact - found) < 2e-5) == (count <= 3), count


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("passes", [None, 3])
def test_rows_do_not_depend_on_the_batch(model, regime, passes):
    how = Passes(regime, 1, passes)
    alone = [log_likelihoods(model, [row], how)[0] for row in rows()]
    check(log_likelihoods(model, rows(), how), alone)


def test_greedy_continuations_are_recognised(model):
    reference = text_reference()
    prompt = rows()[0].ids[:5]
    for regime in REGIMES:
        ids = prompt + reference.greedy(torch.tensor(prompt), regime, 6)
        changed = [*ids[:-1], (ids[-1] + 1) % 97]
        found = log_likelihoods(model, [ScoredRow(ids, 5, 5), ScoredRow(changed, 5, 5)], Passes(regime, 1, None))
        assert [greedy for _, greedy in found] == [True, False]


def test_numbers_that_are_not_finite_are_an_error():
    model = make_model(text_weights(text_config()), text_config())
    model.model.norm.weight.data[0] = float("nan")
    with pytest.raises(BadNumbersError, match="not finite in the soft regime"):
        log_likelihoods(model, rows(), Passes("soft"))
