"""Megatron-Core's vocabulary-parallel embedding; the gradient goes to the rows that were read, in the gradient buffer.

A gradient of the table's whole size would else be made, cleared and added in each pass of each micro-batch.
"""

from typing import Optional

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.autograd.function import once_differentiable


class _LookUp(torch.autograd.Function):
    """Rows of a table; their gradient is added to a buffer in the backward, and the table gets none."""

    @staticmethod
    def forward(
        ctx, table: torch.Tensor, rows: torch.Tensor, outside: Optional[torch.Tensor], buffer: torch.Tensor
    ) -> torch.Tensor:
        """[b, s] -> [b, s, h]; zeros for what is outside of this rank's rows."""
        ctx.save_for_backward(rows, outside)
        ctx.buffer = buffer
        found = F.embedding(rows, table)
        return found if outside is None else found.masked_fill_(outside[..., None], 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        """Rows that were read several times get the sum, in an order that does not change."""
        rows, outside = ctx.saved_tensors
        grad = grad if outside is None else grad.masked_fill(outside[..., None], 0.0)
        ctx.buffer.index_put_((rows.flatten(),), grad.flatten(0, 1).to(ctx.buffer.dtype), accumulate=True)
        return None, None, None, None


class BufferedEmbedding(tensor_parallel.VocabParallelEmbedding):
    """Outside of a training step, or where the weight has no gradient buffer, Megatron-Core's."""

    into_buffer = False
    """Whether a training step is under way, whose backwards all end in the buffers; see FBTStage.training_step."""

    @classmethod
    def like(cls, other: tensor_parallel.VocabParallelEmbedding, config: TransformerConfig) -> "BufferedEmbedding":
        """An embedding of another's shape and layout, in its place."""
        return cls(
            other.num_embeddings,
            other.embedding_dim,
            init_method=config.embedding_init_method,
            reduce_scatter_embeddings=other.reduce_scatter_embeddings,
            config=config,
            tp_group=other.tp_group,
        )

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """[b, s] token ids -> [b, s, h], or [s/tp, b, h] under sequence parallelism."""
        buffer = getattr(self.weight, "main_grad", None)
        if not self.into_buffer or buffer is None or not torch.is_grad_enabled():
            return super().forward(input_)
        rows, outside = input_, None
        if self.tp_group.size() > 1:
            outside = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
            rows = (input_ - self.vocab_start_index).masked_fill(outside, 0)
        found = _LookUp.apply(self.weight, rows, outside, buffer)
        if self.reduce_scatter_embeddings:
            found = found.transpose(0, 1).contiguous()
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(found, group=self.tp_group)
        return tensor_parallel.reduce_from_tensor_model_parallel_region(found, group=self.tp_group)
