"""What test_memory.py asserts on: recompute, packed documents and overlapped reduction, measured on one rank."""

from typing import Dict, List

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_fbt.core.grad_sync import reduce_gradients
from megatron_fbt.core.parallel import Layout, seed_dropout
from megatron_fbt.model.layers import SDPAttention
from tests.distributed.model_case import Built, Case, Grid, build, global_batch, own_part, start

RECIPE = {"data.reset_attention_mask": True, "model.sliding_window": 9, "model.window_attn_skip_freq": 2}
DROPOUT = {"model.attention_dropout": 0.1, "model.hidden_dropout": 0.2}
MODES = [("none", "all"), ("selective", "all"), ("full", "all"), ("selective", "early"), ("full", "early")]


def gradients(built: Built, passes: int, micro_batches: int = 2) -> Dict[str, torch.Tensor]:
    """Gradients of one step from the initial weights, by name."""
    built.optimizer.zero_grad()
    built.stage.train()
    seed_dropout(1, step=0)
    built.run(own_part(global_batch(0), built.layout)[:micro_batches], passes)
    reduce_gradients(built.optimizer.model)
    return {name: param.main_grad.clone() for name, param in built.stage.named_parameters()}


def recompute(layout: Layout) -> Dict:
    """For each mode: whether K = 3 gradients are those of no recompute, bit for bit, and calls of core attention."""
    found, expected = {}, None
    for mode, passes in MODES:
        overrides = {**RECIPE, **DROPOUT, "memory.recompute": mode, "memory.recompute_passes": passes}
        built, calls = build(Case("", overrides), Grid(), layout), []
        count_attention(built, calls)
        got = gradients(built, passes=3, micro_batches=1)
        expected = expected or got
        same = all(torch.equal(got[name], expected[name]) for name in expected)
        found[mode, passes] = (same, len(calls) / built.config.model.num_layers)
    return found


def count_attention(built: Built, calls: List[int]) -> None:
    """Append to calls whenever a layer attends."""
    for layer in built.stage.decoder.layers:
        attention = layer.self_attention.core_attention
        attention._attend = lambda *args, plain=attention._attend: (calls.append(1), plain(*args))[1]


class SequenceAttention(torch.nn.Module):
    """Stands for Transformer Engine's attention over sequences of one packed row, in plain PyTorch."""

    def __init__(self, plain: SDPAttention, window: int):
        super().__init__()
        self.window = window if plain.windowed else None

    def forward(self, query, key, value, attention_mask, packed_seq_params: PackedSeqParams, **unused):
        """[t, np, hn] -> [t, np * hn], each sequence by itself."""
        assert attention_mask is None and packed_seq_params.qkv_format == "thd"
        ends, parts = packed_seq_params.cu_seqlens_q.tolist(), []
        assert packed_seq_params.max_seqlen_q == max(b - a for a, b in zip(ends, ends[1:]))
        for begin, end in zip(ends, ends[1:]):
            q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
            k, v = (x.repeat_interleave(q.size(0) // x.size(0), dim=0) for x in (k, v))
            distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
            seen = (distance >= 0) & (distance < (self.window or end))
            parts.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1))
        return torch.cat(parts).flatten(1)


def packed(layout: Layout) -> Dict:
    """Losses of three passes, rows one by one: masked as a whole, and as packed sequences."""
    case = Case("", {**RECIPE, "data.reset_position_ids": True})
    found = {}
    for name in ("masked", "packed"):
        built = build(case, Grid(), layout)
        built.stage.eval()
        if name == "packed":  # as with Transformer Engine, whose extra passes are computed in full
            built.stage.reuses_prefix = False
            built.stage.context.packed = True
            for layer in built.stage.decoder.layers:
                attention = layer.self_attention
                attention.core_attention = SequenceAttention(
                    attention.core_attention, built.config.model.sliding_window
                )
        batch = global_batch(0)[0]
        rows = [type(batch)(*(None if x is None else x[i : i + 1] for x in vars(batch).values())) for i in range(2)]
        assert min(row.document_starts.sum() for row in rows) > 1
        found[name] = (built.run(rows, 3).nll / 2).tolist()
    return found


def measure(rank: int, world_size: int) -> Dict:
    """All that one process shows."""
    layout = start(Grid())
    return {"recompute": recompute(layout), "packed": packed(layout)}


OVERLAPPED = {
    "tied": {},
    "untied": {"model.share_embeddings_and_output_weights": False},
    "whole logits": {"model.share_embeddings_and_output_weights": False, "memory.chunked_loss": False},
}


def overlap(rank: int, world_size: int, grid: Grid) -> Dict:
    """For each model and sharding, see overlapped."""
    layout = start(grid)
    return {
        (name, sharding): overlapped(overrides, sharding, grid, layout)
        for name, overrides in OVERLAPPED.items()
        for sharding in ("none", "megatron")
    }


def overlapped(overrides: Dict, sharding: str, grid: Grid, layout: Layout) -> List:
    """For K = 1, 2, 3: bucket groups, those under way when the backward ends, and the error of the gradients."""
    plain, found = build(Case("", overrides), grid, layout), []
    case = Case("", {**overrides, "parallel.overlap_grad_reduce": True, "optimizer.sharding": sharding})
    built = build(case, grid, layout)
    groups = built.optimizer.model.bucket_groups
    for passes in (1, 2, 1, 3, 2):
        expected = gradients(plain, passes)
        built.optimizer.zero_grad()
        built.run(own_part(global_batch(0), layout)[:2], passes)
        started = sum(group.grad_reduce_handle is not None for group in groups)
        reduce_gradients(built.optimizer.model)
        error = largest_error(built, expected) if sharding == "none" else 0.0
        found.append((passes, len(groups), started, error))
    return found


def largest_error(built: Built, expected: Dict[str, torch.Tensor]) -> float:
    """Over all parameters, relative."""
    pairs = ((param.main_grad, expected[name]) for name, param in built.stage.named_parameters())
    return max(((a - b).norm() / b.norm().clamp_min(1e-30)).item() for a, b in pairs)
