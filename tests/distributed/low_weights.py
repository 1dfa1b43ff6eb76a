"""Weights in 8 bits without a GPU: stand-ins for Transformer Engine's quantised tensors and what works on them.

They keep to what it documents: a tensor of a nominal type over bytes and a scale, which is read dequantised and written
quantised, has no views, and is made where a layer is built in a context for it; beside it there is the value that it
was made from, for a master to begin with.
"""

import contextlib
from types import MethodType
from typing import Any, List, Optional, Type

import torch
import torch.distributed as dist
from megatron.core import fp8_utils, tensor_parallel
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.extensions import transformer_engine as extension

from megatron_fbt.model.fp8 import E4M3, largest, quantise, scale_of
from tests.distributed.engine import replace_engine

aten = torch.ops.aten


class LowTensor(torch.Tensor):
    """A bf16 tensor of [rows, columns] to whoever asks, kept as e4m3 bytes and a factor.

    Args:
        raw: uint8.
        factor: float32 scalar that the bytes' values are multiplied by.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: torch.Tensor, factor: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, raw.shape, dtype=torch.bfloat16, device=raw.device)

    def __init__(self, raw: torch.Tensor, factor: torch.Tensor):
        self.raw, self.factor = raw, factor

    @classmethod
    def of(cls, values: torch.Tensor) -> "LowTensor":
        """Quantise with a scale of their own."""
        low = quantise(values, E4M3, None)
        return cls(low.data.view(torch.uint8), low.step)

    def dequantize(self) -> torch.Tensor:
        """A plain bf16 tensor."""
        return (self.raw.view(E4M3).float() * self.factor).bfloat16()

    def float(self) -> torch.Tensor:
        """A plain float32 tensor."""
        return self.dequantize().float()

    def expand_as(self, other: torch.Tensor) -> torch.Tensor:
        """Megatron-Core asks for it to find what adds up the gradient."""
        assert other is self
        return Dequantised.apply(self)

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        first = args[0]
        if func is aten.detach.default:
            return cls(first.raw, first.factor)
        if func is aten.copy_.default and isinstance(first, cls):
            new = cls.of(args[1])
            first.raw.copy_(new.raw)
            first.factor.copy_(new.factor)
            return first
        raise NotImplementedError(f"{func} of a quantised tensor")


class BlockTensor(LowTensor):
    """One that the mxfp8 recipe makes; it cannot lie in a buffer."""


class Dequantised(torch.autograd.Function):
    """A weight as products read it; the gradient is that of the weight."""

    @staticmethod
    def forward(ctx, weight: torch.Tensor) -> torch.Tensor:
        """Values of a quantised tensor, or rounded as one would be."""
        return (weight if isinstance(weight, LowTensor) else LowTensor.of(weight)).dequantize()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        """See above."""
        return grad


class LowLayer:
    """Goes before Megatron-Core's parallel linear layers in the list of bases."""

    building: Optional[Type[LowTensor]] = None
    """What the weight of a layer that is built now becomes."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if LowLayer.building is None:
            return
        torch.nn.init.constant_(self.weight, 7.0)  # not the initial value of any weight
        first = self.weight.detach().clone()
        weight = torch.nn.Parameter(LowLayer.building.of(first))
        weight.__dict__.update({k: v for k, v in self.weight.__dict__.items() if k not in weight.__dict__})
        weight.first = first
        weight.get_high_precision_init_val = MethodType(lambda param: param.first, weight)
        weight.clear_high_precision_init_val = MethodType(lambda param: setattr(param, "first", None), weight)
        self.weight = weight

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super()._forward_impl(input, Dequantised.apply(weight), *args, **kwargs)


class LowColumn(LowLayer, tensor_parallel.ColumnParallelLinear):
    """Rounds its weight, or has it rounded."""


class LowRow(LowLayer, tensor_parallel.RowParallelLinear):
    """Rounds its weight, or has it rounded."""


@contextlib.contextmanager
def building_low(recipe: str):
    """Stands in for fp8_model_init."""
    LowLayer.building = BlockTensor if recipe == "mxfp8" else LowTensor
    try:
        yield
    finally:
        LowLayer.building = None


def get_fp8_context(config: Any, layer_no: int = -1, is_init: bool = False) -> Any:
    """Stands in for Megatron-Core's function; products need no context here."""
    low = not (config.first_last_layers_bf16 and fp8_utils.is_first_last_bf16_layer(config, layer_no))
    return building_low(config.fp8_recipe) if is_init and config.fp8_param and low else contextlib.nullcontext()


def replace_storage(weight: LowTensor, raw: torch.Tensor) -> None:
    """Stands in for Transformer Engine's replace_raw_data."""
    assert not isinstance(weight, BlockTensor)
    raw.copy_(weight.raw)
    weight.raw = raw


def cast_masters(
    weights: List[LowTensor],
    masters: List[Optional[torch.Tensor]],
    begins: List[Optional[int]],
    group: dist.ProcessGroup,
    *unused: Any,
) -> None:
    """Stands in for Transformer Engine's cast_master_weights_to_fp8: each rank its range, one scale for all."""
    if not weights:
        return
    rounded = [None if master is None else master.bfloat16() for master in masters]
    found = torch.stack([torch.zeros(()) if values is None else largest(values) for values in rounded])
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    for weight, values, begin, amax in zip(weights, rounded, begins, found, strict=True):
        assert not isinstance(weight, BlockTensor)
        scale = scale_of(amax, E4M3)
        weight.factor.copy_(scale.reciprocal())
        if values is not None:
            low = quantise(values.view(1, -1), E4M3, None, scale=scale).data.view(torch.uint8)
            weight.raw.view(-1)[begin : begin + values.numel()] = low.view(-1)


def install() -> None:
    """Replace what needs a GPU, in this process."""
    replace_engine(LowColumn, LowRow, get_fp8_context)
    extension.TEColumnParallelLinear = lambda *args, skip_bias_add, is_expert, **kwargs: LowColumn(*args, **kwargs)
    fp8_utils.HAVE_TE_FP8_TENSOR_CLASS, fp8_utils.FP8_TENSOR_CLASS = True, LowTensor
    fp8_utils.HAVE_TE_MXFP8TENSOR, fp8_utils.MXFP8Tensor = True, BlockTensor
    fp8_utils._modify_underlying_storage_impl = replace_storage
    fp8_utils._quantize_param_shard_impl = cast_masters
    # In one call gloo would gather bytes and bf16 as one type; without this Megatron-Core makes one for each bucket.
    param_and_grad_buffer._coalescing_manager = lambda *args, **kwargs: contextlib.nullcontext()
