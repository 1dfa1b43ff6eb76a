"""Prefix reuse over Transformer Engine's attention, with its layers replaced by what it documents of them."""

from typing import Any, Dict, Optional

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.extensions import transformer_engine as extension
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_fbt.core import backends
from megatron_fbt.model.layers import RMSNorm
from tests.distributed.model_case import Case, Grid, build, start
from tests.distributed.prefix_reuse_case import RowCount, batches_of, plain, recipe_of, relative, take_step

WINDOWS = {"model.sliding_window": 7, "model.window_attn_skip_freq": 2}
CASES: Dict[str, Dict[str, Any]] = {
    "random": {},
    "p = T/2": plain(16),
    "p = T": plain(32),
    "windows": {**WINDOWS, "memory.recompute": "selective", "feedback.fusion": "concat"},
    "early": {"memory.recompute": "full", "memory.recompute_passes": "early", "model.qk_layernorm": True},
}


class Attention(torch.nn.Module):
    """Masks as TEDotProductAttention does: from the first query and key, or from the last ones ("bottom right")."""

    shapes: list = []
    """(queries, keys, mask) of each call."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, attn_mask_type: AttnMaskType, attention_type: str, **unused
    ):
        super().__init__()
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.left = config.window_size[0] if windowed else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Optional[torch.Tensor],
        attn_mask_type: AttnMaskType,
        packed_seq_params: Any = None,
        **unused,
    ) -> torch.Tensor:
        """[sq, b, np, hn], [sk, b, ng, hn] twice -> [sq, b, np * hn]."""
        assert attention_mask is None and packed_seq_params is None
        sizes = query.size(0), key.size(0)
        self.shapes.append((*sizes, attn_mask_type))
        first = {AttnMaskType.causal: 0, AttnMaskType.causal_bottom_right: sizes[1] - sizes[0]}[attn_mask_type]
        distance = torch.arange(first, first + sizes[0])[:, None] - torch.arange(sizes[1])
        seen = distance >= 0 if self.left is None else (distance >= 0) & (distance <= self.left)
        heads = [x.permute(1, 2, 0, 3) for x in (query, key, value)]
        context = F.scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True)
        return context.permute(2, 0, 1, 3).flatten(2)


def measure(rank: int, world_size: int, grid: Grid) -> Dict[Any, Any]:
    """{(case, K): differences of steps with reuse from those without it, and from the torch backend's}."""
    extension.TENorm, extension.TEDotProductAttention = RMSNorm, Attention
    extension.TEColumnParallelLinear = tensor_parallel.ColumnParallelLinear
    extension.TERowParallelLinear = tensor_parallel.RowParallelLinear
    layout, found = start(grid), {}
    for name, settings in CASES.items():
        steps = {}
        for kind, reuse in (("torch", False), ("transformer_engine", False), ("transformer_engine", True)):
            backends.resolve_backend = lambda implementation, kind=kind: kind
            built = build(Case("", {**settings, "feedback.prefix_reuse": reuse}), grid, layout)
            count = RowCount(built.stage)
            for passes in (2, 3):
                batches = batches_of(name, passes, layout)
                Attention.shapes.clear()
                step = take_step(built, recipe_of(name, built), batches, passes, count)
                steps[kind, reuse, passes] = step, list(Attention.shapes)
        for passes in (2, 3):
            on, shapes = steps["transformer_engine", True, passes]
            others = [steps[key, False, passes][0] for key in ("transformer_engine", "torch")]
            found[name, passes] = {
                "sums": [relative(torch.tensor(on.sums), torch.tensor(off.sums)) for off in others],
                "gradients": [
                    max(relative(on.gradients[key], g) for key, g in off.gradients.items() if g.any()) for off in others
                ],
                "rows": on.rows / others[0].rows,
                "shapes": shapes,
            }
    return found
