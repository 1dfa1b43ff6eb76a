"""FP8 products on any machine: operands rounded to 8 bits and back, the product itself in float32.

The scaling is that of Transformer Engine's recipes, in forward, input gradient and weight gradient. Shapes: n tokens,
i inputs, o outputs of a layer.
"""

from dataclasses import dataclass
from typing import Callable, Optional, Tuple

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Block = Optional[Tuple[int, int]]
"""Rows and columns that share a scale; None = the whole tensor does."""


@dataclass(frozen=True)
class Scaling:
    """How a recipe scales its operands.

    Attributes:
        activations: Block along the sum of a product, of inputs and output gradients.
        weights: Block of weights.
        power_of_two: Scales are powers of two: rounded so that nothing overflows.
        delayed: The scale comes from the largest values of earlier steps, so that values may saturate.
    """

    activations: Block = None
    weights: Block = None
    power_of_two: bool = False
    delayed: bool = False


SCALINGS = {
    "tensorwise": Scaling(),
    "delayed": Scaling(delayed=True),
    "blockwise": Scaling((1, 128), (128, 128), power_of_two=True),
    "mxfp8": Scaling((1, 32), (1, 32), power_of_two=True),
}


def formats(fp8: str) -> Tuple[torch.dtype, torch.dtype]:
    """Types of (inputs and weights, output gradients) under precision.fp8."""
    return E4M3, (E5M2 if fp8 == "hybrid" else E4M3)


@dataclass(frozen=True)
class Quantised:
    """A matrix in 8 bits."""

    data: torch.Tensor
    """float8, the shape of the matrix."""
    step: torch.Tensor
    """float32, what the data are multiplied by: a scalar, or [rows / block, 1, columns / block, 1]."""
    block: Block

    def float(self) -> torch.Tensor:
        """float32; NaN everywhere in a block whose values were not all finite."""
        if self.block is None:
            return self.data.float() * self.step
        return (_blocks(self.data.float(), self.block) * self.step).view(self.data.shape)


def _blocks(x: torch.Tensor, block: Tuple[int, int]) -> torch.Tensor:
    rows, columns = block
    assert x.size(0) % rows == 0 and x.size(1) % columns == 0, f"{tuple(x.shape)} in blocks of {block}"
    return x.reshape(x.size(0) // rows, rows, x.size(1) // columns, columns)


def largest(x: torch.Tensor, block: Block = None) -> torch.Tensor:
    """Largest magnitude of a matrix, or of each of its blocks, float32; NaN where one is NaN."""
    if block is None:
        return x.abs().amax().float()
    return _blocks(x, block).abs().amax(dim=(1, 3), keepdim=True).float()


def scale_of(amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool = False) -> torch.Tensor:
    """What values up to amax are multiplied by to fill the format: 1 for amax 0, NaN for one that is not finite."""
    scale = torch.full_like(amax, torch.finfo(dtype).max) / amax  # a number divided by a tensor is rounded twice
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    if power_of_two:
        exponent = torch.frexp(scale)[1] - 1  # rounded down
        scale = torch.ldexp(torch.ones_like(scale), exponent.clamp(-126, 127))
    scale = torch.where(amax == 0, 1.0, scale)
    return torch.where(torch.isfinite(amax), scale, torch.nan)


def quantise(
    x: torch.Tensor, dtype: torch.dtype, block: Block, power_of_two: bool = False, scale: Optional[torch.Tensor] = None
) -> Quantised:
    """Round a matrix to 8 bits.

    Conversions saturate, as a GPU's do. A conversion alone would hide an infinity, so a block with a value that is not
    finite becomes NaN as a whole, and with it the step's loss.

    Args:
        x: [rows, columns].
        dtype: a float8 type.
        block: values that share a scale.
        power_of_two: see Scaling.
        scale: of the whole matrix, from earlier steps; None = from x.
    """
    if scale is None:
        scale = scale_of(largest(x, block), dtype, power_of_two)
    else:
        scale = torch.where(torch.isfinite(largest(x)), scale, torch.nan)
    limit = torch.finfo(dtype).max
    scaled = x.float() * scale if block is None else (_blocks(x.float(), block) * scale).view(x.shape)
    return Quantised(scaled.clamp(-limit, limit).to(dtype), scale.reciprocal(), block)


class Operand:
    """One of the three matrices of a layer's products: inputs, weight or output gradient.

    Args:
        dtype: a float8 type.
        block: values that share a scale when the columns are summed over.
        scaling: of the recipe.
    """

    def __init__(self, dtype: torch.dtype, block: Block, scaling: Scaling):
        self.dtype, self.block, self.scaling = dtype, block, scaling
        self.scale: Optional[torch.Tensor] = None
        """From earlier steps, float32 scalar; delayed scaling alone has it."""
        self.seen: Optional[torch.Tensor] = None
        """Largest magnitude in this step so far, float32 scalar, where it is to be remembered."""

    def __call__(self, x: torch.Tensor, remember: bool) -> Tuple[Quantised, Quantised]:
        """The matrix for products that sum over its columns, and for those that sum over its rows.

        Args:
            x: [rows, columns].
            remember: whether its largest value counts for the scales of later steps.
        """
        if self.scaling.delayed:
            if remember:
                self.seen = torch.maximum(self.seen, largest(x))
            one = quantise(x, self.dtype, None, scale=self.scale)
            return one, one
        by_columns = quantise(x, self.dtype, self.block, self.scaling.power_of_two)
        if self.block is None or self.block[0] == self.block[1]:
            return by_columns, by_columns
        return by_columns, quantise(x, self.dtype, self.block[::-1], self.scaling.power_of_two)


class QuantisedProduct(torch.autograd.Function):
    """y = x w^T with all three products of a layer on 8-bit operands."""

    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        weight: torch.Tensor,
        quantised: Tuple[Quantised, Quantised],
        inputs: Callable[[torch.Tensor], Tuple[Quantised, Quantised]],
        gradients: Callable[[torch.Tensor], Tuple[Quantised, Quantised]],
    ) -> torch.Tensor:
        """The output [n, o] in the type of x.

        Args:
            ctx: of autograd.
            x: [n, i].
            weight: [o, i], the parameter that gets the gradient; its values are not read.
            quantised: the weight, see Operand.
            inputs: quantises [n, i].
            gradients: quantises [n, o].
        """
        by_inputs, by_tokens = inputs(x)
        ctx.save_for_backward(by_tokens.data, by_tokens.step)
        ctx.block, ctx.quantised, ctx.gradients = by_tokens.block, quantised, gradients
        ctx.types = x.dtype, weight.dtype
        return (by_inputs.float() @ quantised[0].float().t()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        """Gradients of x and of the weight, in their types."""
        by_outputs, by_tokens = ctx.gradients(grad)
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = (by_outputs.float() @ ctx.quantised[1].float()).to(ctx.types[0])
        if ctx.needs_input_grad[1]:
            kept = Quantised(*ctx.saved_tensors, ctx.block)
            weight_grad = (by_tokens.float().t() @ kept.float()).to(ctx.types[1])
        return x_grad, weight_grad, None, None, None
