"""The network and its parallel passes, against an independent implementation and the method's invariants."""

import pytest
import torch
import torch.nn.functional as F

from tests.unit.hf.exports import make_model
from tests.unit.hf.reference import Reference, random_weights, tiny_config

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def built():
    config = tiny_config()
    weights = random_weights(config)
    return make_model(weights, config), Reference(weights, config)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(1))


def largest_difference(left, right):
    return (left.double() - right.double()).abs().max().item()


@torch.no_grad()
@pytest.mark.parametrize("passes", [1, 2, 3, 12])
def test_parallel_passes_equal_the_formulas(built, ids, passes):
    model, reference = built
    logits = model(ids, passes=passes).logits
    for row, row_logits in zip(ids, logits, strict=True):
        assert largest_difference(row_logits, reference.logits(reference.passes(row, passes)[-1])) < TOLERANCE


@torch.no_grad()
def test_as_many_passes_as_tokens_equal_the_recurrence(built, ids):
    model, _ = built
    recurrence = model(ids, regime="recurrent").logits
    for passes in range(1, 13):
        logits = model(ids, passes=passes).logits
        assert largest_difference(logits[:, :passes], recurrence[:, :passes]) < TOLERANCE
        if passes < 12:  # and no sooner: the rest is still on its way
            assert largest_difference(logits[:, passes:], recurrence[:, passes:]) > 1e-3


@torch.no_grad()
def test_with_a_plain_prompt_more_positions_are_final(built, ids):
    model, reference = built
    prompt = 4
    starts = (torch.arange(12) < prompt)[None].expand(2, -1)
    for passes in (1, 2, 5, 9):
        logits = model(ids, passes=passes, document_starts=starts).logits
        soft = torch.stack([reference.logits(reference.regime(row, "soft", prompt)) for row in ids])
        final = prompt + passes - 1
        assert largest_difference(logits[:, :final], soft[:, :final]) < TOLERANCE


@torch.no_grad()
def test_document_starts_stay_plain(built, ids):
    model, reference = built
    starts = torch.zeros(2, 12, dtype=torch.bool)
    starts[:, 5] = True
    logits = model(ids, passes=3, document_starts=starts).logits
    expected = reference.passes(ids[0], 3, plain=lambda t: t in (0, 5))[-1]
    assert largest_difference(logits[0], reference.logits(expected)) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("passes", [1, 3])
def test_a_token_changes_nothing_before_it(built, ids, passes):
    model, _ = built
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 50
    before, after = model(ids, passes=passes).logits, model(changed, passes=passes).logits
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7], after[:, 7])


def nll(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@torch.no_grad()
def test_loss_is_first_pass_plus_mean_of_the_others(built, ids):
    model, reference = built
    labels = ids.clone()
    labels[0, :5] = -100
    output = model(ids, labels=labels, passes=3)
    states = [[reference.passes(row, 3)[k] for row in ids] for k in range(3)]
    expected = [nll(reference.logits(torch.stack(rows)), labels) for rows in states]
    assert largest_difference(output.loss, expected[0] + (expected[1] + expected[2]) / 2) < TOLERANCE
    assert largest_difference(output.pass_losses, torch.stack(expected)) < TOLERANCE
    assert largest_difference(model(ids, labels=labels, passes=1).loss, expected[0]) < TOLERANCE
    shared = model(ids, labels=labels, passes=3, num_items_in_batch=100)
    assert largest_difference(shared.loss, output.loss * (labels[:, 1:] != -100).sum() / 100) < TOLERANCE
    assert model(ids, labels=torch.full_like(ids, -100), passes=2).loss == 0


def test_gradient_reaches_pass_one_and_every_weight(ids):
    config = tiny_config(share_embeddings_and_output_weights=False, qk_layernorm=True)
    model = make_model(random_weights(config), config).train()
    model(ids, labels=ids, passes=2).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    gradients = []
    for passes in (1, 2):
        model.zero_grad()
        model(ids, labels=ids, passes=passes).pass_losses[-1].backward()
        gradients.append(model.model.layers[0].mlp.up_proj.weight.grad.clone())
    assert not torch.allclose(gradients[0], gradients[1])


@torch.no_grad()
def test_passes_default_to_the_configuration(built, ids):
    model, _ = built
    assert model.config.passes == 3
    assert torch.equal(model(ids).logits, model(ids, passes=3).logits)


@torch.no_grad()
def test_logits_to_keep(built, ids):
    model, _ = built
    assert largest_difference(model(ids, passes=2, logits_to_keep=3).logits, model(ids, passes=2).logits[:, -3:]) < 1e-6


def test_impossible_arguments_are_refused(built, ids):
    model, _ = built
    with pytest.raises(ValueError, match="passes=0"):
        model(ids, passes=0)
    with pytest.raises(ValueError, match="leave out passes"):
        model(ids, passes=2, regime="soft")
    with pytest.raises(ValueError, match="regime='hard'"):
        model(ids, regime="hard")
    with pytest.raises(TypeError, match="output_attentions"):
        model(ids, output_attentions=True)
    with pytest.raises(ValueError, match="must be an FBTCache"):
        model(ids, past_key_values=[])


def test_initial_weights_follow_the_recipe():
    config = tiny_config(hidden_size=240, ffn_hidden_size=240, init_method_std=0.05, num_layers=8)
    from megatron_fbt.hf.export import hf_config
    from megatron_fbt.hf.modeling_fbt import FBTForCausalLM

    torch.manual_seed(0)
    model = FBTForCausalLM(hf_config(config, 500, 499, torch.float32))
    layer = model.model.layers[3]
    assert layer.mlp.up_proj.weight.std().item() == pytest.approx(0.05, rel=0.05)
    assert layer.mlp.down_proj.weight.std().item() == pytest.approx(0.05 / 4, rel=0.05)
    assert layer.self_attn.o_proj.weight.std().item() == pytest.approx(0.05 / 4, rel=0.05)
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.05, rel=0.05)
    for projection in (model.model.fusion.state_proj, model.model.fusion.token_gate):
        assert projection.weight.std().item() == pytest.approx(240**-0.5, rel=0.05)
        assert projection.weight.abs().max() <= (3 / 240) ** 0.5
