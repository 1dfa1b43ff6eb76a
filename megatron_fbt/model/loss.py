"""Loss of one pass and its place in the multi-pass objective (method section 3)."""

from typing import List, Tuple

import torch
from megatron.core import tensor_parallel

from megatron_fbt.config.feedback import LossWeightsConfig


def pass_loss_weights(config: LossWeightsConfig, passes: int, extra_factor: float = 1.0) -> List[float]:
    """Weight of each pass's NLL: first_pass, then extra_factor * extra_passes * p_k / sum of p.

    Args:
        config: feedback.loss_weights.
        passes: K >= 1.
        extra_factor: of the warm-up, see LossWeightsConfig.extra_factor.
    """
    relative = (config.per_pass or [1.0] * (passes - 1))[: passes - 1]
    total = sum(relative)
    return [config.first_pass] + [extra_factor * config.extra_passes * p / total for p in relative]


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
    logits = _without_padding(logits, vocab_size, tensor_rank)
    return tensor_parallel.vocab_parallel_cross_entropy(logits.float(), labels.t().contiguous())


def token_losses_and_normalizers(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, tensor_rank: int, tensor_size: int
) -> Tuple[torch.Tensor, torch.Tensor]:
    """token_losses, and the logarithm of the soft-max's denominator, whose square is the z-loss.

    It is the loss plus the label's logit, so the forward needs no second pass over the vocabulary and no copy of the
    logits; the backward needs one more buffer of their size. Arguments as in token_losses.

    Returns:
        Two float32 [s, b]: the negative log-likelihoods, and log sum exp over the real vocabulary.
    """
    logits = _without_padding(logits, vocab_size, tensor_rank).float()
    labels = labels.t().contiguous()
    local = labels - tensor_rank * logits.size(-1)
    here = (local >= 0) & (local < logits.size(-1))
    rows = torch.arange(here.numel(), device=logits.device)
    picked = logits.flatten(0, 1)[rows, torch.where(here, local, 0).flatten()]  # gather() would keep the logits
    picked = torch.where(here, picked.view_as(here), 0.0)
    if tensor_size > 1:
        picked = tensor_parallel.reduce_from_tensor_model_parallel_region(picked)
    losses = tensor_parallel.vocab_parallel_cross_entropy(logits, labels)  # overwrites the logits
    return losses, losses + picked


def _without_padding(logits: torch.Tensor, vocab_size: int, tensor_rank: int) -> torch.Tensor:
    """[s, b, v/tp] with minus infinity in padded rows."""
    shard = logits.size(-1)
    real = min(max(vocab_size - tensor_rank * shard, 0), shard)
    if real == shard:
        return logits
    padding = torch.arange(shard, device=logits.device) >= real
    return logits.masked_fill(padding, float("-inf"))


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
