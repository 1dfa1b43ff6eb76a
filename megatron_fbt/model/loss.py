"""Loss of one pass and its place in the multi-pass objective (method section 3)."""

from typing import List

import torch
from megatron.core import tensor_parallel

from megatron_fbt.config.feedback import LossWeightsConfig


def pass_loss_weights(config: LossWeightsConfig, passes: int) -> List[float]:
    """Weight of each pass's NLL: first_pass, then extra_passes * p_k / sum of p.

    Args:
        config: feedback.loss_weights.
        passes: K >= 1.
    """
    relative = (config.per_pass or [1.0] * (passes - 1))[: passes - 1]
    total = sum(relative)
    return [config.first_pass] + [config.extra_passes * p / total for p in relative]


def token_losses(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, tensor_rank: int, tensor_size: int
) -> torch.Tensor:
    """Negative log-likelihood of each label over the real vocabulary; padded rows take no part.

    Args:
        logits: [s, b, v/tp], this rank's part of the padded vocabulary; float32 ones are overwritten.
        labels: [b, s].
        vocab_size: entries of the vocabulary without padding.
        tensor_rank: rank in the tensor-parallel group.
        tensor_size: size of the tensor-parallel group.

    Returns:
        float32 [s, b].
    """
    shard = logits.size(-1)
    real = min(max(vocab_size - tensor_rank * shard, 0), shard)
    if real < shard:
        padding = torch.arange(shard, device=logits.device) >= real
        logits = logits.masked_fill(padding, float("-inf"))
    return tensor_parallel.vocab_parallel_cross_entropy(logits.float(), labels.t().contiguous())


class AttachLoss(torch.autograd.Function):
    """Identity on a tensor whose backward adds the gradient of a scalar loss.

    This is how the loss of an earlier pass, whose state is sent on to the next pass, joins the backward of that state.
    """

    @staticmethod
    def forward(ctx, states: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        """Return the states; remember the loss's type."""
        ctx.loss_options = {"dtype": loss.dtype, "device": loss.device}
        return states

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        """Gradient of the states unchanged, 1 for the loss."""
        return grad, torch.ones((), **ctx.loss_options)
