"""Loss of one pass: weights, padded vocabulary, gradients; and the loss that joins a backward on its way."""

import pytest
import torch
import torch.nn.functional as F

from megatron_fbt.config.feedback import LossWeightsConfig
from megatron_fbt.model.loss import AttachLoss, pass_loss_weights, token_losses, token_losses_and_normalizers
from tests.distributed.launch import run_distributed

VOCAB, S, B = 10, 6, 3
PADDED = {1: [10, 11, 12, 16, 64], 2: [10, 12, 16, 20, 40]}
"""Rows by tensor-parallel size; with 20 and 40 of them the second of two ranks has padding alone."""
KINDS = {"ordinary": (1.0, torch.float32), "bf16": (1.0, torch.bfloat16), "large": (3e4, torch.float32)}
Z_LOSS = 0.05
DEVIATION = {"ordinary": 2e-6, "bf16": 2e-6, "large": 1e-2}


@pytest.mark.parametrize(
    ("config", "passes", "expected"),
    [
        (LossWeightsConfig(), 1, [1.0]),
        (LossWeightsConfig(), 2, [1.0, 1.0]),
        (LossWeightsConfig(), 4, [1.0, 1 / 3, 1 / 3, 1 / 3]),
        (LossWeightsConfig(first_pass=0.0, extra_passes=0.6), 3, [0.0, 0.3, 0.3]),
        (LossWeightsConfig(2.0, 3.0, [1.0, 2.0, 5.0]), 1, [2.0]),
        (LossWeightsConfig(2.0, 3.0, [1.0, 2.0, 5.0]), 2, [2.0, 3.0]),
        (LossWeightsConfig(2.0, 3.0, [1.0, 2.0, 5.0]), 3, [2.0, 1.0, 2.0]),
        (LossWeightsConfig(2.0, 3.0, [1.0, 2.0, 5.0]), 4, [2.0, 3 / 8, 6 / 8, 15 / 8]),
        (LossWeightsConfig(extra_passes=0.0), 3, [1.0, 0.0, 0.0]),
        (LossWeightsConfig(per_pass=[0.0, 1.0]), 3, [1.0, 0.0, 1.0]),
    ],
)
def test_pass_loss_weights(config, passes, expected):
    assert pass_loss_weights(config, passes) == pytest.approx(expected, rel=1e-15)


def inputs(kind):
    """Logits [s, b, VOCAB] in their type, labels [b, s], a mask [s, b] with zeros."""
    scale, dtype = KINDS[kind]
    generator = torch.Generator().manual_seed(3)
    logits = (2 * scale * torch.randn(S, B, VOCAB, generator=generator)).to(dtype)
    labels = torch.randint(0, VOCAB, (B, S), generator=generator)
    labels[0, :2] = torch.tensor([0, VOCAB - 1])
    mask = (torch.rand(S, B, generator=generator) < 0.7).float() * torch.rand(S, B, generator=generator)
    return logits, labels, mask


def measure(rank, world_size):
    """{kind: {padded: (losses, gradient of the masked sum, both and log sum exp with a z-loss)}} on this rank."""
    from tests.distributed.model_case import Grid, start

    start(Grid(tensor=world_size))
    found = {}
    for kind in KINDS:
        logits, labels, mask = inputs(kind)
        for padded in PADDED[world_size]:
            whole = torch.full((S, B, padded), 1e5, dtype=logits.dtype)  # would dominate any soft-max
            whole[..., :VOCAB] = logits
            leaf = whole.chunk(world_size, dim=-1)[rank].clone().requires_grad_()
            losses = token_losses(leaf * 1.0, labels, VOCAB, rank, world_size)
            (losses * mask).sum().backward()
            z_leaf = leaf.detach().clone().requires_grad_()
            with_z, normalizers = token_losses_and_normalizers(z_leaf * 1.0, labels, VOCAB, rank, world_size)
            ((with_z + Z_LOSS * normalizers.square()) * mask).sum().backward()
            z_results = (with_z.detach(), normalizers.detach(), z_leaf.grad)
            found.setdefault(kind, {})[padded] = (losses.detach(), leaf.grad, *z_results)
    return found


@pytest.fixture(scope="module")
def measured():
    return {size: run_distributed(measure, size) for size in PADDED}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "padded"), [(size, padded) for size in PADDED for padded in PADDED[size]])
def test_token_losses_are_the_cross_entropy_over_the_real_vocabulary(measured, kind, size, padded):
    logits, labels, mask = inputs(kind)
    leaf = logits.double().requires_grad_()
    expected = F.cross_entropy(leaf.permute(0, 2, 1), labels.t(), reduction="none")
    (expected * mask).sum().backward()
    losses = [rank[kind][padded][0] for rank in measured[size]]
    assert losses[0].dtype == torch.float32 and losses[0].shape == (S, B)
    assert all(torch.equal(losses[0], other) for other in losses)
    assert (losses[0] - expected).abs().max() <= DEVIATION[kind]
    gradient = torch.cat([rank[kind][padded][1] for rank in measured[size]], dim=-1)
    assert gradient.dtype == logits.dtype
    assert not gradient[..., VOCAB:].any(), "padded rows take no part"
    assert not gradient[mask == 0].any() and gradient[mask > 0].any()
    rounding = 1 / 128 if kind == "bf16" else 1e-6
    assert ((gradient[..., :VOCAB] - leaf.grad).abs() <= rounding * leaf.grad.abs() + 1e-6).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "padded"), [(size, padded) for size in PADDED for padded in PADDED[size]])
def test_a_z_loss_adds_the_square_of_the_dense_log_sum_exp(measured, kind, size, padded):
    logits, labels, mask = inputs(kind)
    leaf = logits.double().requires_grad_()
    normalizers = torch.logsumexp(leaf, dim=-1)
    losses = F.cross_entropy(leaf.permute(0, 2, 1), labels.t(), reduction="none")
    ((losses + Z_LOSS * normalizers.square()) * mask).sum().backward()
    ranks = [rank[kind][padded] for rank in measured[size]]
    assert torch.equal(ranks[0][2], ranks[0][0]), "the losses are those without a z-loss"
    found = ranks[0][3]
    assert found.dtype == torch.float32 and all(torch.equal(found, other[3]) for other in ranks)
    assert ((found - normalizers).abs() <= 2e-6 + 2e-7 * normalizers).all()  # the second term: fp32 rounding
    gradient = torch.cat([rank[4] for rank in ranks], dim=-1)
    assert not gradient[..., VOCAB:].any() and not gradient[mask == 0].any()
    plain = torch.cat([rank[1] for rank in ranks], dim=-1)[..., :VOCAB]
    assert (plain - leaf.grad).norm() > 0.1 * plain.norm(), "the z-loss has a gradient of its own"
    rounding, largest = 1 / 64 if kind == "bf16" else 2e-6, leaf.grad.abs().max()
    assert ((gradient[..., :VOCAB] - leaf.grad).abs() <= rounding * leaf.grad.abs() + 2e-6 * largest).all()


@pytest.mark.parametrize("kind", KINDS)
def test_padding_does_not_change_the_loss(measured, kind):
    for size, ranks in measured.items():
        in_one_shard = [padded for padded in PADDED[size] if padded // size >= VOCAB]
        first, *others = (ranks[0][kind][padded][0] for padded in in_one_shard)
        assert others and all((first - other).abs().max() <= 1e-6 * first.abs().max() for other in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attached_loss_adds_its_gradient_to_that_of_the_states(dtype):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, 2, 8, generator=generator).to(dtype)
    gradients = {}
    for way in ("attached", "sum"):
        x, head = start.clone().requires_grad_(), torch.linspace(-1, 1, 8).requires_grad_()
        states = x * 2
        loss = (states.float() @ head).square().mean() * 0.3
        if way == "attached":
            later = AttachLoss.apply(states, loss)
            assert torch.equal(later, states) and later.dtype == dtype
            later.float().pow(3).sum().backward()
        else:
            (states.float().pow(3).sum() + loss).backward()
        gradients[way] = (x.grad.float(), head.grad)
    torch.testing.assert_close(
        gradients["attached"], gradients["sum"], rtol=1e-2 if dtype.itemsize == 2 else 1e-6, atol=1e-6
    )
    assert gradients["attached"][1].abs().min() > 0


def test_attached_loss_counts_once_whatever_the_gradient_of_the_states_is():
    for factor in (0.0, 1.0, -7.5, 1e6):
        states, weight = torch.ones(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
        (AttachLoss.apply(states * 1, weight * 5).sum() * factor).backward()
        assert weight.grad.item() == 5 and states.grad.tolist() == [factor] * 3


def test_attached_losses_of_several_passes_all_join():
    weight = torch.tensor(1.0, requires_grad=True)
    states = weight * torch.ones(2)
    for power in (2, 3):
        states = AttachLoss.apply(states, states.pow(power).sum()) * weight
    states.sum().backward()
    # loss = sum of w^2, (w^2)^3 and w^3 over two elements; the derivatives at 1 are 2, 6 and 3
    assert weight.grad.item() == 2 * (2 + 6 + 3)
