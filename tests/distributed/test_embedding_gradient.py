"""The embedding's gradient goes to the buffer's rows: what Megatron-Core's embedding would add, in any layout."""

from typing import Dict, List

import pytest
import torch
from megatron.core.tensor_parallel import VocabParallelEmbedding

from megatron_fbt.core.grad_sync import reduce_gradients
from megatron_fbt.model.embedding import BufferedEmbedding
from tests.distributed.launch import run_distributed
from tests.distributed.model_case import Case, Grid, build, global_batch, own_part, start

TIED, UNTIED = {}, {"model.share_embeddings_and_output_weights": False}
CASES = {
    "tied": TIED,
    "untied": UNTIED,
    "whole logits": {**TIED, "memory.chunked_loss": False},
    "sharded states": {**UNTIED, "optimizer.sharding": "megatron"},
    "bf16": {**TIED, "precision.dtype": "bf16"},
}


def gradients(name: str, grid: Grid, layout, kind: type) -> Dict[str, torch.Tensor]:
    """Gradients of a step of three passes over two micro-batches, with an embedding of some class."""
    built = build(Case("", CASES[name]), grid, layout)
    if built.stage.pre_process:
        assert type(built.stage.embedding.word_embeddings) is BufferedEmbedding
        built.stage.embedding.word_embeddings.__class__ = kind
    built.optimizer.zero_grad()
    built.run(own_part(global_batch(0), layout)[:2], 3)
    reduce_gradients(built.optimizer.model)
    return {name: param.main_grad.clone() for name, param in built.stage.named_parameters()}


def outside_of_a_step(grid: Grid, layout) -> Dict[str, float]:
    """Difference of the gradient that plain autograd gives the table and that of the rows read."""
    built = build(Case(""), grid, layout)
    built.optimizer.zero_grad()
    if not built.stage.pre_process:
        return {}
    tokens, weight = global_batch(0)[0].tokens, built.stage.embedding.word_embeddings.weight
    (found,) = torch.autograd.grad(built.stage.embed(tokens).sum() * 2, weight)
    begin = layout.tensor_rank * len(weight)
    expected = 2.0 * tokens.flatten().bincount(minlength=begin + len(weight))[begin : begin + len(weight)]
    assert not weight.main_grad.any() and expected.any()
    return {"table": (found - expected[:, None]).abs().max().item()}


def measure(rank: int, world_size: int, grid: Grid) -> List:
    """Relative differences of all gradients, for each case."""
    layout, found = start(grid), {}
    for name in CASES:
        ours, theirs = (gradients(name, grid, layout, kind) for kind in (BufferedEmbedding, VocabParallelEmbedding))
        assert ours.keys() == theirs.keys() and any("word_embeddings" in key for key in ours) == layout.is_first_stage
        found[name] = {key: ((ours[key] - g).norm() / g.norm()).item() for key, g in theirs.items() if g.any()}
    found["outside of a step"] = outside_of_a_step(grid, layout)
    overlapping = build(Case("", {"parallel.overlap_grad_reduce": True}), grid, layout).stage
    if layout.is_first_stage:
        assert type(overlapping.embedding.word_embeddings) is VocabParallelEmbedding
    return found


@pytest.mark.parametrize("grid", [Grid(tensor=2, sequence_parallel=True), Grid(pipeline=2)], ids=str)
def test_gradients_are_megatron_cores(grid):
    for rank in run_distributed(measure, grid.world_size, grid, timeout=240):
        assert rank.keys() == {*CASES, "outside of a step"}
        for name, differences in rank.items():
            for key, difference in differences.items():
                # bf16: Megatron-Core's embedding sums the rows of a token in bf16.
                assert difference <= (4e-3 if name == "bf16" else 2e-7), (name, key)
