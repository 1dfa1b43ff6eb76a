"""Validation under the recurrence of decoding, by parallel passes (method sections 1, 2 and 6).

With a plain prompt of length P, pass k holds the recurrent values of all positions t < P + k - 1; where the trained map
is a contraction, far fewer passes than positions settle.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Dict, List

import torch

from megatron_fbt.core.schedule import Recipe
from megatron_fbt.data.batch import MicroBatch


@dataclass
class SequentialRecipe(Recipe):
    """SOFT (fused_passes 0) or FUSED(n): the prompt is as n fused passes leave it, the rest iterates."""

    fused_passes: int = 0
    prompts: Dict[int, torch.Tensor] = field(default_factory=dict)
    """The stack's inputs of the micro-batches under way, as the last fused pass over the prompt read them."""
    last_pass: int = 0
    """The pass after which a micro-batch's prompt is not needed any more."""
    first_row: int = 0
    """Position in a row of the first state that this rank holds."""

    def fused(self, batch: MicroBatch, pass_number: int) -> torch.Tensor:
        """[b, s] bool; document starts stay plain."""
        answered = torch.ones_like(batch.document_starts) if self._in_prompt(pass_number) else answer_region(batch)
        return answered & ~batch.document_starts

    def held(self, batch: MicroBatch, pass_number: int, inputs: torch.Tensor) -> torch.Tensor:
        """Inputs of the prompt stay those of its last fused pass."""
        if self.fused_passes == 0:
            return inputs
        if pass_number == self.fused_passes + 1:
            self.prompts[id(batch)] = inputs
        if self._in_prompt(pass_number):
            return inputs
        keep = self.prompts.pop(id(batch)) if pass_number == self.last_pass else self.prompts[id(batch)]
        answer = answer_region(batch)[:, self.first_row : self.first_row + inputs.size(0)].t()
        return torch.where(answer[..., None], inputs, keep)

    def _in_prompt(self, pass_number: int) -> bool:
        return pass_number <= self.fused_passes + 1


def answer_region(batch: MicroBatch) -> torch.Tensor:
    """Positions whose token is generated, [b, s] bool: what the data say, or the second half of each row."""
    if batch.feedback_region is not None:
        return batch.feedback_region
    positions = torch.arange(batch.document_starts.size(1), device=batch.document_starts.device)
    return (positions >= batch.document_starts.size(1) // 2).expand_as(batch.document_starts)


def score_answers(batches: List[MicroBatch]) -> List[MicroBatch]:
    """The same micro-batches, of data that mark no answers, with a loss on each row's second half alone."""
    return [
        batch if batch.loss_mask is None else dataclasses.replace(batch, loss_mask=_second_half(batch.loss_mask))
        for batch in batches
    ]


def _second_half(loss_mask: torch.Tensor) -> torch.Tensor:
    """[b, s] -> the same; the last position of the prompt predicts the first token of the second half."""
    positions = torch.arange(loss_mask.size(1), device=loss_mask.device)
    return loss_mask * (positions >= loss_mask.size(1) // 2 - 1)
