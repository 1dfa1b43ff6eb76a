"""The layers that Megatron-Core's local spec lacks, against plain formulas."""

from types import SimpleNamespace

import pytest
import torch

from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.model.attention_mask import attention_masks, document_positions
from megatron_fbt.model.layers import SDPAttention, rms_normalize
from tests.distributed.launch import run_distributed

S, B, HN = 7, 2, 6


def attention(dropout=0.0, scale=None, window=None):
    """A core attention layer as Megatron-Core builds it."""
    from megatron.core.transformer.enums import AttnMaskType

    config = SimpleNamespace(window_size=window and (window - 1, 0), window_attn_skip_freq=None)
    return SDPAttention(config, 1, AttnMaskType.causal, "self", attention_dropout=dropout, softmax_scale=scale)


def by_definition(query, key, value, scale, window=S, first_seen=lambda b, t: 0):
    """Head by head and position by position: [s, b, np * hn]."""
    out = torch.empty(S, B, query.size(2), HN, dtype=query.dtype)
    share = query.size(2) // key.size(2)
    for b in range(B):
        for head in range(query.size(2)):
            keys, values = key[:, b, head // share], value[:, b, head // share]
            for t in range(S):
                seen = slice(max(first_seen(b, t), t + 1 - window), t + 1)
                weights = torch.softmax(keys[seen] @ query[t, b, head] * scale, dim=0)
                out[t, b, head] = weights @ values[seen]
    return out.view(S, B, -1)


def heads(queries, groups, dtype=torch.float64):
    generator = torch.Generator().manual_seed(queries)
    return [torch.randn(S, B, n, HN, generator=generator).to(dtype).requires_grad_() for n in (queries, groups, groups)]


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("queries", "groups"), [(4, 4), (6, 2), (4, 1), (1, 1)])
def test_attention_is_causal_softmax_with_shared_key_heads(queries, groups, scale):
    tensors = heads(queries, groups)
    found = attention(scale=scale)(*tensors, attention_mask=None)
    expected = by_definition(*tensors, scale or HN**-0.5)
    assert found.shape == (S, B, queries * HN)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    ours = torch.autograd.grad((found * weights).sum(), tensors)
    theirs = torch.autograd.grad((expected * weights).sum(), tensors)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


STARTS = {0: [0, 3, 4], 1: [0, 5]}
"""Document starts of the two rows."""


@pytest.mark.parametrize("within_documents", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_masked_attention_sees_the_window_and_the_document(window, within_documents):
    starts = torch.zeros(B, S, dtype=torch.bool)
    for row, positions in STARTS.items():
        starts[row, positions] = True
    masks = attention_masks(starts, within_documents, window, torch.float64)
    assert (masks is None) == (window is None and not within_documents)
    tensors = heads(4, 2)
    found = attention(window=window)(*tensors, attention_mask=masks)

    def first_seen(row, t):
        return max(start for start in STARTS[row] if start <= t) if within_documents else 0

    expected = by_definition(*tensors, HN**-0.5, window or S, first_seen)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_positions_in_documents():
    starts = torch.tensor([[True, False, False, True, True, False, False]])
    assert document_positions(starts).tolist() == [[0, 1, 2, 0, 0, 1, 2]]


def test_a_layer_with_a_window_wants_its_mask():
    with pytest.raises(AssertionError, match="needs its mask"):
        attention(window=3)(*heads(2, 2), attention_mask=None)


@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_normalisation_has_epsilon_under_the_root(eps):
    x = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0)) * 0.7
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
    torch.testing.assert_close(rms_normalize(x, eps).double(), expected, rtol=1e-6, atol=1e-7)


def test_normalisation_of_nothing_is_nothing_with_a_finite_gradient():
    x = torch.zeros(2, 8, requires_grad=True)
    out = rms_normalize(x, 1e-5)
    out.sum().backward()
    assert not out.any() and x.grad.isfinite().all()


def measure(rank, world_size):
    """What needs Megatron-Core's configuration and generators, with two tensor-parallel ranks."""
    from megatron_fbt.core.parallel import seed_dropout
    from megatron_fbt.core.specs import transformer_config
    from megatron_fbt.model.layers import RMSNorm
    from tests.distributed.model_case import Grid, start

    start(Grid(tensor=2))
    config = PretrainConfig()
    found = {}
    for dtype, parallel in (("fp32", False), ("bf16", True)):
        config.precision.dtype, config.parallel.sequence_parallel = dtype, parallel
        config.parallel.tensor_model_parallel_size = 2
        layer = RMSNorm(transformer_config(config), 16, eps=3e-2)
        number_format = layer.weight.dtype
        plain = torch.nn.RMSNorm(16, eps=3e-2, dtype=number_format)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for module in (layer, plain):
                assert module.weight.eq(1).all()
                module.weight.copy_(torch.linspace(0.5, 2, 16))
        x = torch.randn(4, 3, 16, generator=generator).to(number_format)
        results = []
        for module in (layer, plain):
            leaf = x.clone().requires_grad_()
            out = module(leaf)
            (out * torch.linspace(-1, 1, 16)).sum().backward()
            results.append((out.detach(), leaf.grad, module.weight.grad))
        found[dtype] = (number_format, layer.weight.sequence_parallel, results)
    layer = attention(dropout=0.5).train()
    tensors = [x.detach() for x in heads(2, 2, torch.float32)]
    draws = []
    for step in (0, 1, 0):
        seed_dropout(7, step)
        draws.append(layer(*tensors, attention_mask=None))
    found["dropout"] = draws
    found["evaluation"] = layer.eval()(*tensors, attention_mask=None)
    return found


@pytest.fixture(scope="module")
def measured():
    return run_distributed(measure, 2)


@pytest.mark.parametrize(("dtype", "expected"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_rms_norm_is_torchs(measured, dtype, expected):
    for rank in measured:
        number_format, sequence_parallel, (ours, theirs) = rank[dtype]
        assert number_format == expected and sequence_parallel == (dtype == "bf16")
        for a, b in zip(ours, theirs):
            assert a.dtype == expected and torch.equal(a, b)


def test_dropout_follows_the_step_and_the_tensor_parallel_rank(measured):
    (first, second, again), other = measured[0]["dropout"], measured[1]["dropout"][0]
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert not torch.equal(first, other), "other heads, other masks"
    expected = by_definition(*heads(2, 2, torch.float32), HN**-0.5)
    torch.testing.assert_close(measured[0]["evaluation"], expected.detach(), rtol=1e-5, atol=1e-6)
