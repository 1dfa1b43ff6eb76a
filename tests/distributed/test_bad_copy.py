"""A bad number in a weight that every tensor-parallel rank holds a copy of, on one rank only."""

import torch

from megatron_fbt.core.schedule import run_passes
from tests.distributed.launch import run_distributed
from tests.distributed.model_case import Case, Grid, build, global_batch, start


def step_with_a_bad_copy(rank: int, world_size: int):
    """One step whose gradient is NaN in rank 1's copy of the final norm."""
    grid = Grid(tensor=2)
    built = build(Case("tied"), grid, start(grid))
    before = [param.detach().clone() for param in built.stage.parameters()]
    built.optimizer.zero_grad()
    totals = run_passes(built.stage, global_batch(0), 2, built.recipe)
    if rank == 1:
        built.stage.decoder.final_layernorm.weight.main_grad[3] = float("nan")
    report = built.optimizer.step(totals, True, False)
    unchanged = all(torch.equal(a, b) for a, b in zip(before, built.stage.parameters()))
    return report.skipped, unchanged


def test_all_ranks_skip_the_step():
    assert run_distributed(step_with_a_bad_copy, 2) == [(True, True), (True, True)]
