"""Emulated FP8 equals PyTorch's own conversion and its own product of 8-bit matrices, bit for bit."""

import math

import pytest
import torch

from megatron_fbt.model.fp8 import E4M3, E5M2, SCALINGS, Operand, QuantisedProduct, Scaling, formats, quantise, scale_of

NAN, INF = math.nan, math.inf
LIMITS = {E4M3: 448.0, E5M2: 57344.0}


def matrix(rows=256, columns=384, seed=0, spread=2.0):
    """Values over many magnitudes, so that blocks have different scales."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    return values * torch.exp(spread * torch.randn(rows, columns, generator=generator))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_tensorwise_is_one_scale_and_torchs_conversion(dtype):
    x = matrix()
    found = quantise(x, dtype, None)
    scale = torch.tensor(LIMITS[dtype]) / x.abs().max()
    assert torch.equal(found.data.view(torch.uint8), (x * scale).to(dtype).view(torch.uint8))
    assert torch.equal(found.float(), (x * scale).to(dtype).float() * (1 / scale))
    assert found.data.float().abs().max() == LIMITS[dtype]


@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128), (1, 32), (32, 1)])
def test_blocks_have_scales_of_their_own(block):
    x = matrix()
    found = quantise(x, E4M3, block, power_of_two=True)
    for top in range(0, 256, 128):
        for left in range(0, 384, 128):
            rows, columns = slice(top, top + block[0]), slice(left, left + block[1])
            part = x[rows, columns]
            exponent = math.floor(math.log2(448.0 / part.abs().max().item()))
            expected = (part * 2.0**exponent).to(E4M3)
            assert torch.equal(found.data[rows, columns].view(torch.uint8), expected.view(torch.uint8))
            assert torch.equal(found.float()[rows, columns], expected.float() * 2.0**-exponent)
            assert 224 < expected.float().abs().max() <= 448, "the format is filled, and nothing saturates"


@pytest.mark.parametrize(
    "amax, dtype, expected",
    [(0.0, E4M3, 1.0), (448.0, E4M3, 1.0), (7.0, E4M3, 64.0), (7.0, E5M2, 8192.0), (1e-38, E5M2, 3.4028234663852886e38)]
    + [(value, dtype, NAN) for value in (INF, NAN) for dtype in (E4M3, E5M2)],
)
def test_scales(amax, dtype, expected):
    assert scale_of(torch.tensor(amax), dtype).item() == pytest.approx(expected, nan_ok=True, rel=1e-7)


@pytest.mark.parametrize(
    "amax, expected", [(448.0, 1.0), (449.0, 0.5), (447.0, 1.0), (224.1, 1.0), (224.0, 2.0), (0, 1)]
)
def test_powers_of_two_are_rounded_so_that_nothing_overflows(amax, expected):
    assert scale_of(torch.tensor(float(amax)), E4M3, power_of_two=True).item() == expected


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_what_is_not_finite_is_not_hidden_by_the_conversion(dtype, bad):
    x = matrix()
    x[3, 130] = bad
    assert quantise(x, dtype, None).float().isnan().all()
    blocks = quantise(x, dtype, (1, 128), power_of_two=True).float()
    assert blocks[3, 128:256].isnan().all() and blocks[3, :128].isfinite().all() and blocks[4].isfinite().all()
    assert quantise(x, dtype, None, scale=torch.tensor(2.0)).float().isnan().all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_zeros_stay_zeros_and_old_scales_saturate(dtype):
    assert torch.equal(quantise(torch.zeros(4, 4), dtype, None).float(), torch.zeros(4, 4))
    found = quantise(torch.tensor([[1e9, -1e9, 1.0]]), dtype, None, scale=torch.tensor(1.0)).float()
    assert found.tolist() == [[LIMITS[dtype], -LIMITS[dtype], 1.0]]


def test_a_block_that_does_not_divide_is_refused():
    with pytest.raises(AssertionError, match="blocks"):
        quantise(torch.zeros(4, 100), E4M3, (1, 32))


def layer(recipe: str, fp8: str):
    """Operands of a layer under a recipe: inputs, weight, gradients."""
    scaling = SCALINGS[recipe]
    low, high = formats(fp8)
    operands = [
        Operand(low, scaling.activations, scaling),
        Operand(low, scaling.weights, scaling),
        Operand(high, scaling.activations, scaling),
    ]
    for operand, scale in zip(operands, (20.0, 5.0, 30.0)):
        operand.scale, operand.seen = torch.tensor(scale), torch.zeros(())
    return operands


def scaled_product(a, b, dtypes):
    """a b^T by PyTorch's own product of scaled 8-bit matrices."""
    scales = [torch.tensor(LIMITS[dtype]) / x.abs().max() for x, dtype in zip((a, b), dtypes)]
    low = [(x * scale).to(dtype) for x, scale, dtype in zip((a, b), scales, dtypes)]
    return torch._scaled_mm(low[0], low[1].t(), 1 / scales[0], 1 / scales[1], out_dtype=torch.float32)


@pytest.mark.parametrize("fp8", ["e4m3", "hybrid"])
def test_all_three_products_equal_torchs_scaled_product(fp8):
    x, weight, grad = matrix(64, 96, 1), matrix(128, 96, 2), matrix(64, 128, 3)
    x.requires_grad_(), weight.requires_grad_()
    inputs, weights, gradients = layer("tensorwise", fp8)
    low, high = formats(fp8)
    quantised = weights(weight.detach(), True)
    y = QuantisedProduct.apply(x, weight, quantised, lambda m: inputs(m, True), lambda m: gradients(m, True))
    y.backward(grad)
    x, w = x.detach(), weight.detach()
    assert torch.equal(y, scaled_product(x, w, (low, low)))
    assert torch.equal(weight.grad, scaled_product(grad.t().contiguous(), x.t().contiguous(), (high, low)))


def test_input_gradient_equals_torchs_scaled_product():
    x, weight, grad = matrix(64, 96, 1).requires_grad_(), matrix(128, 96, 2), matrix(64, 128, 3)
    inputs, weights, gradients = layer("tensorwise", "hybrid")
    quantised = weights(weight, True)
    QuantisedProduct.apply(x, weight, quantised, lambda m: inputs(m, True), lambda m: gradients(m, True)).backward(grad)
    assert torch.equal(x.grad, scaled_product(grad, weight.t().contiguous(), (E5M2, E4M3)))
    assert weight.grad is None


def dequantised(x, dtype, block, scaling: Scaling, scale):
    """Element by element, in Python's floats."""
    rows, columns = block or x.shape
    result = torch.empty_like(x)
    for top in range(0, x.size(0), rows):
        for left in range(0, x.size(1), columns):
            part = x[top : top + rows, left : left + columns]
            factor = scale if scaling.delayed else LIMITS[dtype] / part.abs().max().item()
            if scaling.power_of_two:
                factor = 2.0 ** math.floor(math.log2(factor))
            low = (part * factor).clamp(-LIMITS[dtype], LIMITS[dtype]).to(dtype)
            result[top : top + rows, left : left + columns] = low.float() / factor
    return result


@pytest.mark.parametrize("fp8", ["e4m3", "hybrid"])
@pytest.mark.parametrize("recipe", list(SCALINGS))
def test_products_of_every_recipe_equal_a_plain_reference(recipe, fp8):
    x, weight, grad = matrix(128, 256, 1), matrix(128, 256, 2), matrix(128, 128, 3)
    x.requires_grad_(), weight.requires_grad_()
    scaling, (low, high) = SCALINGS[recipe], formats(fp8)
    inputs, weights, gradients = layer(recipe, fp8)
    quantised = weights(weight.detach(), True)
    y = QuantisedProduct.apply(x, weight, quantised, lambda m: inputs(m, True), lambda m: gradients(m, True))
    y.backward(grad)
    along, across = scaling.activations, scaling.activations and scaling.activations[::-1]
    weight_across = scaling.weights and scaling.weights[::-1]
    w = weight.detach()
    expected = (
        dequantised(x.detach(), low, along, scaling, 20.0) @ dequantised(w, low, scaling.weights, scaling, 5.0).t(),
        dequantised(grad, high, along, scaling, 30.0) @ dequantised(w, low, weight_across, scaling, 5.0),
        dequantised(grad, high, across, scaling, 30.0).t() @ dequantised(x.detach(), low, across, scaling, 20.0),
    )
    for found, wanted in zip((y, x.grad, weight.grad), expected, strict=True):
        assert (found - wanted).norm() <= 1e-6 * wanted.norm()
    if scaling.delayed:
        seen = [operand.seen for operand in (inputs, weights, gradients)]
        assert seen == [m.abs().max() for m in (x, weight, grad)]
