"""FP8 in a stage: emulated layers, the start of a step, and the delayed recipe's memory of earlier steps.

Where Transformer Engine scales a shard by itself, so do the emulated layers: each tensor-parallel rank's weight, its
part of a row-parallel input and of a column-parallel output gradient. What is gathered for a product (sequence
parallel inputs, and output gradients of row-parallel layers) has one scale, as there. The delayed recipe's scales are
the same on all tensor- and data-parallel ranks of a stage.
"""

from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_fbt.config.precision import PrecisionConfig
from megatron_fbt.core.pieces import Piece
from megatron_fbt.model.fp8 import SCALINGS, Operand, Quantised, QuantisedProduct, formats, scale_of
from megatron_fbt.model.initialise import global_name

OPERANDS = ("inputs", "weights", "gradients")
EXTRA_STATE = "optimizer._extra_state."
"""Before the names of tensors in a checkpoint that the delayed recipe alone reads; exports leave out "optimizer."."""


class EmulatedProducts:
    """Replaces the products of Megatron-Core's parallel linear layers; goes before them in the list of bases.

    `is_first_microbatch` is Transformer Engine's: the weight is quantised when it is set, and then kept.
    """

    is_first_microbatch = True
    _quantised: Optional[Tuple[Quantised, Quantised]] = None

    def emulate(self, precision: PrecisionConfig) -> None:
        """Set the formats and the recipe."""
        scaling = SCALINGS[precision.fp8_recipe]
        low, high = formats(precision.fp8)
        self.operands = {
            "inputs": Operand(low, scaling.activations, scaling),
            "weights": Operand(low, scaling.weights, scaling),
            "gradients": Operand(high, scaling.activations, scaling),
        }
        self.most_recent = precision.fp8_amax_compute_algo == "most_recent"
        if not scaling.delayed:
            return
        device, length = torch.cuda.current_device(), precision.fp8_amax_history_len
        self.register_buffer("amax_history", torch.zeros(length, len(OPERANDS), device=device), persistent=False)
        self.register_buffer("scales", torch.ones(len(OPERANDS), device=device), persistent=False)
        self.watch()

    @property
    def is_delayed(self) -> bool:
        """Whether scales come from earlier steps."""
        return hasattr(self, "amax_history")

    def watch(self) -> None:
        """Take the current scales, and watch for new largest values."""
        self.seen = torch.zeros_like(self.scales)
        for index, operand in enumerate(self.operands.values()):
            operand.scale, operand.seen = self.scales[index], self.seen[index]

    @property
    def largest_seen(self) -> Tensor:
        """Of the step so far, [inputs, weights, gradients]; 0 for what was not finite."""
        seen = torch.stack([operand.seen for operand in self.operands.values()])
        return torch.where(torch.isfinite(seen), seen, 0.0)

    def remember(self, largest: Tensor) -> None:
        """Put a finished step's largest values into the history, and compute the next step's scales from it."""
        self.amax_history.copy_(self.amax_history.roll(1, 0))
        self.amax_history[0] = largest
        chosen = self.amax_history[0] if self.most_recent else self.amax_history.amax(0)
        for index, operand in enumerate(self.operands.values()):
            if_seen = scale_of(chosen[index], operand.dtype)
            self.scales[index] = torch.where(chosen[index] > 0, if_seen, self.scales[index])

    def _forward_impl(
        self, input: Tensor, weight: Tensor, *unused: Any, allreduce_dgrad=False, sequence_parallel=False, **ignored
    ) -> Tensor:
        """The layer's product [s, b, o], and its gradient's reduction over tensor-parallel ranks."""
        remember = self.training and torch.is_grad_enabled()
        if self.is_first_microbatch or self._quantised is None:
            self._quantised = self.operands["weights"](weight.detach(), remember)
            self.is_first_microbatch = False
        if sequence_parallel:
            input = tensor_parallel.gather_from_sequence_parallel_region(input, True, group=self.tp_group)
        elif allreduce_dgrad:
            input = tensor_parallel.copy_to_tensor_model_parallel_region(input, group=self.tp_group)
        inputs, gradients = self.operands["inputs"], self.operands["gradients"]
        product = QuantisedProduct.apply(
            input.flatten(0, -2),
            weight,
            self._quantised,
            lambda x: inputs(x, remember),
            lambda grad: gradients(grad, True),
        )
        return product.unflatten(0, input.shape[:-1])


class EmulatedColumnParallelLinear(EmulatedProducts, ColumnParallelLinear):
    """Megatron-Core's layer with emulated FP8 products."""


class EmulatedRowParallelLinear(EmulatedProducts, RowParallelLinear):
    """Megatron-Core's layer with emulated FP8 products."""


def emulated(kind: type, precision: PrecisionConfig) -> Any:
    """What builds an emulated layer in the place of Megatron-Core's.

    A class, since Megatron-Core's specs take some of them apart.
    """
    base = EmulatedColumnParallelLinear if kind is ColumnParallelLinear else EmulatedRowParallelLinear

    class Layer(base):
        """An emulated layer with its recipe."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.emulate(precision)

    Layer.__name__ = Layer.__qualname__ = base.__name__
    return Layer


def begin_step(stage: torch.nn.Module) -> None:
    """Before the first pass of the first micro-batch: weights may have changed since they were quantised last.

    Megatron-Core's schedules do this for a model that is one of its modules; here they get pass views.
    """
    for module in stage.modules():
        if hasattr(module, "is_first_microbatch"):
            module.is_first_microbatch = True


def end_step(stage: torch.nn.Module) -> None:
    """After the last backward of a step: the delayed recipe's scales of the next one.

    They come once from the largest values of all passes and micro-batches, whatever their order. Collective over the
    tensor- and data-parallel ranks of a stage.
    """
    remembering = [module for module in stage.modules() if isinstance(module, EmulatedProducts) and module.is_delayed]
    if not remembering:
        return
    largest = torch.stack([module.largest_seen for module in remembering])
    group = parallel_state.get_amax_reduction_group(with_context_parallel=True)
    if dist.get_world_size(group) > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    for module, values in zip(remembering, largest):
        if values.any():
            module.remember(values)
        module.watch()


def fp8_state(stage: torch.nn.Module) -> Iterator[Tuple[str, Dict[str, Tensor]]]:
    """Scales and histories of a stage's layers, by the name of the module; equal on tensor- and data-parallel ranks."""
    for name, module in stage.named_modules():
        if isinstance(module, EmulatedProducts) and module.is_delayed:
            yield name, {"amax_history": module.amax_history, "scales": module.scales}
        elif stage.config.fp8 and stage.config.fp8_recipe == "delayed" and _has_products(module):
            yield name, _engine_state(module, stage.config)


def _has_products(module: torch.nn.Module) -> bool:
    """Whether it is a linear layer of Transformer Engine."""
    return hasattr(module, "fp8_meta") and "weight" in module._parameters


@torch.no_grad()  # at its end a context updates the scales of all modules where gradients are on
def _engine_state(module: torch.nn.Module, config: TransformerConfig) -> Dict[str, Tensor]:
    """What Transformer Engine updates, by the names in its own extra state; made first, as by a first forward."""
    if "scaling_fwd" not in module.fp8_meta:
        with get_fp8_context(config):
            module.init_fp8_metadata(num_gemms=1)
    directions = {"fwd": module.fp8_meta["scaling_fwd"], "bwd": module.fp8_meta["scaling_bwd"]}
    return {
        f"{kind}_{direction}": getattr(state, kind)
        for direction, state in directions.items()
        for kind in ("scale", "amax_history")
    }


def fp8_pieces(stage: torch.nn.Module) -> List[Piece]:
    """What a checkpoint holds of them, to be written or filled in place."""
    layout, found = stage.layout, []
    for module, held in fp8_state(stage):
        name = global_name(module, stage.decoder.layers[0].layer_number - 1, tied=False)
        for kind, tensor in held.items():
            size, key = tuple(tensor.shape), f"{EXTRA_STATE}{name}.{kind}"
            found.append(Piece(key, size, (0,) * tensor.dim(), tensor, layout.tensor_rank == 0, replicated=True))
    return found
