"""The iterated map against parallel_passes, the recurrence and plain sums."""

import pytest
import torch
import torch.nn.functional as F

from megatron_fbt.analysis import fixed_point
from megatron_fbt.analysis.fixed_point import iterate, pass_states
from tests.unit.hf.exports import make_model
from tests.unit.hf.reference import random_weights, tiny_config

T = 12


@pytest.fixture(scope="module")
def model():
    config = tiny_config()
    return make_model(random_weights(config), config)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 50, (3, T), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def test_every_number_equals_the_one_of_parallel_passes(model, ids):
    labels = ids.clone()
    labels[0, :5] = -100
    labels[1, 9:] = -100
    series = iterate(model, ids, labels, passes=14, batch=2)
    states = model.model.parallel_passes(ids, 14)
    assert (series.length, series.scored) == (T, 3 * (T - 1) - 4 - 3)
    for k in range(1, 15):
        h, before = states[k - 1].double(), states[k - 2].double()
        nll, squares, update, values, count = 0.0, 0.0, 0.0, 0.0, 0
        for b in range(3):
            for t in range(T - 1):
                if labels[b, t + 1] == -100:
                    continue
                logits = model.lm_head(states[k - 1][b, t]).double()
                nll -= logits.log_softmax(-1)[labels[b, t + 1]].item()
                values += h[b, t].square().sum().item()
                if t >= k:
                    count += 1
                    update += (h[b, t] - before[b, t]).square().sum().item()
                    squares += h[b, t].square().sum().item()
        assert series.losses[k - 1] == pytest.approx(nll / series.scored, rel=1e-6)
        assert series.state_rms[k - 1] == pytest.approx((values / series.scored / 48) ** 0.5, rel=1e-6)
        assert series.open_shares[k - 1] == count / series.scored
        if k == 1 or count == 0:
            assert series.update_norms[k - 1] is None
        else:
            assert series.update_norms[k - 1] == pytest.approx((update / squares) ** 0.5, rel=1e-4)
    assert [norm is None for norm in series.update_norms] == [True] + [False] * 9 + [True] * 4
    pass_losses = model(ids, labels=labels, passes=14).pass_losses.tolist()
    assert series.losses == pytest.approx(pass_losses, rel=1e-6)


@torch.no_grad()
def test_as_many_passes_as_positions_have_the_loss_of_the_recurrence(model, ids):
    series = iterate(model, ids, passes=T + 3)
    logits = model(ids, regime="recurrent").logits
    recurrence = F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten()).item()
    assert series.losses[T - 1 :] == pytest.approx([recurrence] * 4, abs=1e-6)
    assert abs(series.losses[1] - recurrence) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("fields", [{}, {"reset_attention_mask": True, "reset_position_ids": True}])
def test_documents_are_treated_as_by_the_model(ids, fields):
    config = tiny_config()
    for name, value in fields.items():
        setattr(config.data, name, value)
    model = make_model(random_weights(config), config)
    starts = torch.zeros_like(ids, dtype=torch.bool)
    starts[0, 5] = starts[1, 3] = starts[1, 8] = True
    for mine, theirs in zip(pass_states(model, ids, 4, starts), model.model.parallel_passes(ids, 4, None, starts)):
        assert torch.equal(mine, theirs)
    expected = model(ids, labels=ids, passes=4, document_starts=starts).pass_losses.tolist()
    assert iterate(model, ids, passes=4, document_starts=starts, batch=2).losses == pytest.approx(expected, rel=1e-6)


def test_logits_are_computed_in_parts(model, ids, monkeypatch):
    whole = iterate(model, ids, passes=2).losses
    monkeypatch.setattr(fixed_point, "LOGITS_AT_ONCE", 50 * 4)
    sizes = []
    handle = model.lm_head.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    assert iterate(model, ids, passes=2).losses == pytest.approx(whole, rel=1e-6)
    handle.remove()
    assert max(sizes) == 4 and sum(sizes) == 2 * 3 * (T - 1)


def test_no_gradient_and_a_call_for_each_pass_of_a_batch(model, ids):
    calls = []
    iterate(model, ids, passes=5, batch=2, on_pass=lambda: calls.append(torch.is_grad_enabled()))
    assert calls == [False] * 10


@pytest.mark.parametrize("arguments", [{"passes": 0}, {"batch": 0}, {"labels": torch.full((3, T), -100)}])
def test_what_cannot_be_measured_is_refused(model, ids, arguments):
    with pytest.raises(ValueError, match="must be at least 1|no position has a loss"):
        iterate(model, ids, **arguments)
