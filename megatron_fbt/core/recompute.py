"""Activations that are computed again in the backward instead of kept, chosen for each call.

Megatron-Core's own recompute is re-entrant: with K passes in one graph it fires every gradient hook K times. Here the
checkpoint is PyTorch's non-re-entrant one, and the K passes of a step may differ.
"""

from typing import Callable

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable, *args, **kwargs):
    """Call a function whose intermediate results are computed again in the backward, with the same dropout masks."""
    states = []

    def run(*run_args, **run_kwargs):
        tracker = get_cuda_rng_tracker()
        if not states:
            states.append(tracker.get_states())
            return function(*run_args, **run_kwargs)
        now = tracker.get_states()
        tracker.set_states(states[0])
        try:
            return function(*run_args, **run_kwargs)
        finally:
            tracker.set_states(now)

    return checkpoint(run, *args, use_reentrant=False, **kwargs)


class RecomputingLayer(TransformerLayer):
    """Megatron-Core's layer; with `recompute` "full" it keeps its input alone."""

    recompute = "none"

    def forward(self, *args, **kwargs):
        """See TransformerLayer."""
        if self.recompute != "full" or not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        return recomputed(super().forward, *args, **kwargs)


class RecomputingAttention(SelfAttention):
    """Megatron-Core's self-attention; with `checkpoint_core_attention` it keeps queries, keys and values alone."""

    def _checkpointed_attention_forward(
        self, query, key, value, attention_mask, rotary_pos_emb=None, attn_mask_type=None, **kwargs
    ):
        return recomputed(
            self.core_attention,
            query,
            key,
            value,
            attention_mask,
            attn_mask_type=attn_mask_type or self.attn_mask_type,
            **kwargs,
        )

    def _apply_output_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Megatron-Core compiles this one, which a machine without a GPU may lack the compiler for."""
        return x * torch.sigmoid(gate.reshape(x.shape).float()).to(x.dtype)


def set_recompute(block: TransformerBlock, mode: str) -> None:
    """Choose for the calls that follow: none, selective (attention) or full (whole layers)."""
    for layer in block.layers:
        layer.recompute = mode
        layer.self_attention.checkpoint_core_attention = mode == "selective"
