"""Activations that are computed again in the backward instead of kept, chosen for each call.

Megatron-Core's own recompute is re-entrant: with K passes in one graph it fires every gradient hook K times. Here the
checkpoint is PyTorch's non-re-entrant one, and the K passes of a step may differ.
"""

from typing import Callable

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable, *args, fp8: bool = False, **kwargs):
    """Call a function whose intermediate results are computed again in the backward, with the same dropout masks.

    Args:
        function: what is called.
        args: its arguments.
        fp8: Transformer Engine may be in one of its FP8 contexts, which the backward is outside of: its own checkpoint
            enters the context again, with the same recipe.
        kwargs: more of its arguments.
    """
    if fp8:
        from transformer_engine.pytorch.distributed import checkpoint as checkpoint_in_fp8

        return checkpoint_in_fp8(
            function, *args, use_reentrant=False, get_rng_state_tracker=get_cuda_rng_tracker, **kwargs
        )
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
        return recomputed(self._forward_once, *args, fp8=self.config.fp8 is not None, **kwargs)

    def _forward_once(self, *args, **kwargs):
        """A forward that leaves nothing in the layer, though a checkpoint may stop it before its end.

        Megatron-Core 0.19 keeps hidden states there, and so their graph, until the forward's last lines.
        """
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.mlp_norm_manager = None


class RecomputingAttention(SelfAttention):
    """Megatron-Core's self-attention; with `checkpoint_core_attention` it keeps queries, keys and values alone.

    At inference it caches keys that are rotated already."""

    def _checkpointed_attention_forward(
        self, query, key, value, attention_mask, rotary_pos_emb=None, attn_mask_type=None, **kwargs
    ):
        return recomputed(
            self.core_attention,
            query,
            key,
            value.contiguous(),  # a view would keep the whole projection
            attention_mask,
            attn_mask_type=attn_mask_type or self.attn_mask_type,
            fp8=self.config.fp8 is not None,
            **kwargs,
        )

    def _adjust_key_value_for_inference(self, inference_context, query, key, value, rotary_pos_emb, *args, **kwargs):
        """Megatron-Core caches keys as they are before their rotation and turns them all in every step; here, once."""
        if inference_context is not None and rotary_pos_emb is not None:
            begin = inference_context.sequence_len_offset
            angles = rotary_pos_emb[1][begin : begin + key.size(0)]
            key = apply_rotary_pos_emb(key, angles, config=self.config, cp_group=self.pg_collection.cp)
        adjusted = super()._adjust_key_value_for_inference(
            inference_context, query, key, value, rotary_pos_emb, *args, **kwargs
        )
        if inference_context is None or rotary_pos_emb is None:
            return adjusted
        query, key, value, angles, *others = adjusted
        return query, key, value, (angles[0], None), *others

    def _apply_output_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Megatron-Core compiles this one, which a machine without a GPU may lack the compiler for."""
        return x * torch.sigmoid(gate.reshape(x.shape).float()).to(x.dtype)


def set_recompute(block: TransformerBlock, mode: str) -> None:
    """Choose for the calls that follow: none, selective (attention) or full (whole layers)."""
    for layer in block.layers:
        layer.recompute = mode
        layer.self_attention.checkpoint_core_attention = mode == "selective"
