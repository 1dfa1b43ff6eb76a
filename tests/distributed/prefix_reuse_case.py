"""What test_prefix_reuse.py asserts on: steps with and without prefix reuse, on one rank."""

from dataclasses import dataclass, field
from typing import Any, Dict, List, Sequence, Tuple

import torch

from megatron_fbt.core.grad_sync import reduce_gradients
from megatron_fbt.core.schedule import run_passes
from megatron_fbt.core.stage import FBTStage
from megatron_fbt.data.batch import MicroBatch
from megatron_fbt.feedback.diagnostics import PassDiagnostics
from tests.distributed.model_case import SEQUENCE, Built, Case, Grid, build, global_batch, own_part, start

MICRO_BATCHES = 4


def plain(length: int) -> Dict[str, Any]:
    """Settings that make the first `length` positions of every row plain."""
    return {"feedback.prefix.low": (length - 1) / SEQUENCE, "feedback.prefix.high": (length - 1) / SEQUENCE}


DOCUMENTS = {
    "data.reset_attention_mask": True,
    "data.reset_position_ids": True,
    "model.sliding_window": 9,
    "model.window_attn_skip_freq": 2,
}
CASES: Dict[str, Tuple[Dict[str, Any], Sequence[int]]] = {
    "random": ({}, (2, 3, 1)),
    "p = 1": (plain(1), (3,)),
    "p = T/2": ({**plain(SEQUENCE // 2), "memory.chunked_loss": False}, (2, 3)),
    "p = T - 1": ({**plain(SEQUENCE - 1), "model.share_embeddings_and_output_weights": False}, (3,)),
    "p = T": ({**plain(SEQUENCE), "training.z_loss.coefficient": 0.01}, (3,)),
    "packed documents": (
        {
            **DOCUMENTS,
            "feedback.fusion": "concat",
            "memory.recompute": "full",
            "model.share_embeddings_and_output_weights": False,
            "model.qk_layernorm": True,
            "model.add_qkv_bias": True,
            "feedback.prefix.granularity": "document",
            "training.z_loss.coefficient": 0.01,
        },
        (2, 3),
    ),
    "windows": (
        {
            "model.sliding_window": 7,
            "model.attention_output_gate": True,
            "feedback.fusion": "add",
            "memory.recompute": "selective",
            "model.input_norm": "none",
            "feedback.loss_weights.extra_passes": 0.7,
            "feedback.loss_weights.per_pass": [1.0, 2.0],
            "feedback.prefix.low": 0.3,
            "optimizer.sharding": "megatron",
            "parallel.overlap_grad_reduce": True,
        },
        (3,),
    ),
    "early": (
        {
            **DOCUMENTS,
            "memory.recompute": "full",
            "memory.recompute_passes": "early",
            "feedback.prefix.probability": 0.8,
        },
        (3,),
    ),
    "early attention": ({"memory.recompute": "selective", "memory.recompute_passes": "early"}, (3,)),
}


@dataclass
class Step:
    """One step's sums and gradients, and the rows that the layers of this rank computed."""

    sums: List[float]
    gradients: Dict[str, torch.Tensor]
    rows: int
    diagnostics: Dict[str, float] = field(default_factory=dict)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return ((found - expected).double().norm() / expected.double().norm().clamp_min(1e-30)).item()


class RowCount:
    """Counts the positions that a stage's layers are called for."""

    def __init__(self, stage: FBTStage):
        self.rows, run = 0, stage.run_layers

        def run_layers(hidden: torch.Tensor, *arguments):
            self.rows += hidden.size(0)
            return run(hidden, *arguments)

        stage.run_layers = run_layers


def take_step(built: Built, batches: List[MicroBatch], passes: int, count: RowCount) -> Step:
    """Forward, backward and reduction, from the weights as they are."""
    built.optimizer.zero_grad()
    built.stage.train()
    count.rows, diagnostics = 0, PassDiagnostics(passes, built.layout)
    totals = run_passes(
        built.stage,
        batches,
        passes,
        built.recipe,
        on_last_backward=built.optimizer.on_last_backward,
        diagnostics=diagnostics,
    )
    reduce_gradients(built.optimizer.model)
    gradients = {name: param.main_grad.clone() for name, param in built.stage.named_parameters()}
    return Step([*totals.nll.tolist(), totals.z_loss.item()], gradients, count.rows, diagnostics.reduce())


def compare(name: str, grid: Grid, layout) -> List[Dict[str, Any]]:
    """Differences between steps with reuse and without it, for each number of passes, the weights being the same."""
    settings, numbers = CASES[name]
    built = {
        reuse: build(Case("", {**settings, "feedback.prefix_reuse": reuse}), grid, layout) for reuse in (False, True)
    }
    counts = {reuse: RowCount(one.stage) for reuse, one in built.items()}
    found = []
    for passes in numbers:
        batches = own_part(global_batch(passes)[: MICRO_BATCHES * layout.data_size], layout)
        off, on = (take_step(built[reuse], batches, passes, counts[reuse]) for reuse in (False, True))
        found.append(
            {
                "passes": passes,
                "sums": relative(torch.tensor(on.sums), torch.tensor(off.sums)),
                "gradients": {key: relative(on.gradients[key], g) for key, g in off.gradients.items() if g.any()},
                "zeros": [key for key, g in off.gradients.items() if not g.any() and on.gradients[key].any()],
                "rows": on.rows / off.rows,
                "diagnostics": (off.diagnostics, on.diagnostics),
            }
        )
    return found


def measure(rank: int, world_size: int, grid: Grid) -> Dict[str, List[Dict[str, Any]]]:
    """`compare` for every case; one launch runs all cases of a layout."""
    layout = start(grid)
    return {name: compare(name, grid, layout) for name in CASES}
