"""All passes of a micro-batch on one stage: forward one after the other, backward one by one from the last.

In one backward over all passes every weight's gradient would be kept from the last pass on until the first pass's has
come, as the engine hands a leaf the sum of its gradients. So each pass is a graph of its own between leaves, as with a
pipeline, and its gradients go into the buffers when they are there.
"""

from typing import List, Optional, Sequence, Tuple

import torch


class _BackwardOneByOne(torch.autograd.Function):
    """A loss whose backward runs that of each pass in turn."""

    @staticmethod
    def forward(ctx, anchor: torch.Tensor, passes: List[Tuple[torch.Tensor, Optional[torch.Tensor]]]) -> torch.Tensor:
        """Return the last output; anchor requires a gradient, so that there is a backward."""
        ctx.passes = passes
        return passes[-1][0].detach().clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        """Every pass's gradient goes to its leaves: weights, and the states that it was given."""
        passes = ctx.passes
        while passes:
            output, given = passes.pop()
            torch.autograd.backward(output, grad)
            del output
            grad = None if given is None else given.grad
        return None, None


class PassByPass(torch.nn.Module):
    """All passes of a micro-batch, for a model that is not split into stages.

    Args:
        views: the passes in order; each takes the output of the one before it by set_input_tensor.
    """

    def __init__(self, views: Sequence[torch.nn.Module]):
        super().__init__()
        object.__setattr__(self, "views", list(views))
        self.config, self.model_type = views[0].config, views[0].model_type

    def set_input_tensor(self, tensors) -> None:
        """There is no previous stage."""

    def forward(self, batch) -> torch.Tensor:
        """The last pass's loss; the attached ones of the others join in the backward."""
        given, passes = None, []
        for view in self.views:
            view.set_input_tensor(given)
            output = view(batch)
            passes.append((output, given))
            given = output.detach().requires_grad_(output.requires_grad)
        if len(passes) == 1 or not output.requires_grad:
            return output
        del output, given
        anchor = torch.zeros((), device=passes[-1][0].device, requires_grad=True)
        return _BackwardOneByOne.apply(anchor, passes)
