"""What is called when the last backward of a step begins."""

from dataclasses import dataclass
from typing import Callable

import torch

from megatron_fbt.data.batch import MicroBatch


class _CallInBackward(torch.autograd.Function):
    """Identity whose backward calls a function first."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, function: Callable[[], None]) -> torch.Tensor:
        """Return x."""
        ctx.function = function
        return x

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        """Call the function; the gradient is unchanged."""
        ctx.function()
        return grad, None


@dataclass(frozen=True)
class LastBackward:
    """What is called when the last backward of a step begins: that of the first pass of the last micro-batch."""

    batch: MicroBatch
    function: Callable[[], None]

    def watch(self, output: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """The output, unchanged; if it is the last micro-batch's, its backward calls the function."""
        if batch is not self.batch or not output.requires_grad:
            return output
        return _CallInBackward.apply(output, self.function)
