"""What is called when the last backward of a step begins."""

from dataclasses import dataclass
from typing import Callable, Sequence

import torch

from megatron_fbt.data.batch import MicroBatch


class CallInBackward(torch.autograd.Function):
    """Identity whose backward calls a function first; tensors that x does not depend on get a gradient of zero."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, function: Callable[[], None], *unused: torch.Tensor) -> torch.Tensor:
        """Return x."""
        ctx.function, ctx.unused = function, unused
        return x

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        """Call the function; the gradient is unchanged."""
        ctx.function()
        return grad, None, *map(torch.zeros_like, ctx.unused)


@dataclass(frozen=True)
class LastBackward:
    """What is called when the last backward of a step begins: that of the first pass of the last micro-batch."""

    batch: MicroBatch
    function: Callable[[], None]
    unused: Sequence[torch.Tensor] = ()
    """Weights that pass 1 does not use: their gradient arrives in its backward, too, as zero."""

    def watch(self, output: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """The output, unchanged; if it is the last micro-batch's, its backward calls the function."""
        if batch is not self.batch or not output.requires_grad:
            return output
        return CallInBackward.apply(output, self.function, *self.unused)
