"""Every layout gives the single-process loss, gradients and weights (method section 6, invariant 4)."""

import math

import pytest
import torch

from megatron_fbt.config.parameter_count import count_parameters
from tests.distributed.launch import run_distributed
from tests.distributed.model_case import Case, Grid, Outcome, run_cases, whole

DATA_PARALLEL = Grid(data=2)
GRIDS = [
    Grid(),
    Grid(tensor=2),
    Grid(tensor=2, sequence_parallel=True),
    Grid(pipeline=2),
    Grid(pipeline=4),
    Grid(tensor=2, pipeline=2, sequence_parallel=True),
    DATA_PARALLEL,
    Grid(tensor=2, pipeline=2, data=2, sequence_parallel=True),
]
# 1003 entries are padded to 1004 rows with one tensor-parallel rank and to 1008 with two.
CASES = [
    Case("tied"),
    Case(
        "untied",
        {
            "model.share_embeddings_and_output_weights": False,
            "feedback.fusion": "add",
            "model.qk_layernorm": True,
            "feedback.prefix.granularity": "document",
            "feedback.prefix.probability": 0.8,
            "feedback.prefix.exponent": 2.0,
            "feedback.loss_weights.extra_passes": 0.7,
            "feedback.loss_weights.warmup_steps": 2,
            "training.z_loss.coefficient": 0.01,
            "model.attention_output_gate": True,
            "model.add_qkv_bias": True,
            "model.residual_multiplier": 0.7,
            "model.sliding_window": 11,
            "model.window_attn_skip_freq": 2,
            "data.reset_attention_mask": True,
            "data.reset_position_ids": True,
            "memory.recompute": "full",
            "parallel.overlap_grad_reduce": True,
        },
        uneven=True,
    ),
    Case(
        "sharded",
        {
            "optimizer.sharding": "megatron",
            "feedback.fusion": "concat",
            "memory.recompute": "selective",
            "memory.recompute_passes": "early",
            "parallel.overlap_grad_reduce": True,
        },
    ),
]
UNSHARDED = Case("unsharded", {"feedback.fusion": "concat"})
"""Run with DATA_PARALLEL alone, to compare with "sharded"."""
NAMES = [case.name for case in (*CASES, UNSHARDED)]


@pytest.fixture(scope="session")
def results():
    """Outcomes by grid, computed once in this process: one launch runs all cases of a layout."""
    found = {}

    def of(grid: Grid) -> list:
        if grid not in found:
            cases = [*CASES, UNSHARDED] if grid == DATA_PARALLEL else CASES
            found[grid] = run_distributed(run_cases, grid.world_size, grid, cases, timeout=240)
        return found[grid]

    return of


def outcomes(results, grid: Grid, name: str) -> list:
    """One Outcome for each rank."""
    return [rank[NAMES.index(name)] for rank in results(grid)]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm of b."""
    return ((a - b).double().norm() / b.double().norm().clamp_min(1e-30)).item()


def first_step(ranks: list, passes: int, grid: Grid):
    """Mean losses of each pass and the whole gradients of the mean, at the initial weights."""
    last = [r for r in ranks if r.first[passes][2].pipeline_rank == grid.pipeline - 1]
    sums = [r.first[passes] for r in last if r.first[passes][2].tensor_rank == 0]
    tokens = sum(s[1] for s in sums)
    losses = [sum(s[0][k] for s in sums) / tokens for k in range(passes)]
    gradients = whole([r.first[passes][2] for r in ranks])
    return losses, {name: gradient / tokens for name, gradient in gradients.items()}


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_initial_weights_are_equal_bit_for_bit(results, grid, name):
    expected = whole([o.initial for o in outcomes(results, Grid(), name)])
    found = whole([o.initial for o in outcomes(results, grid, name)])
    assert found.keys() == expected.keys()
    for key in expected:
        assert torch.equal(found[key], expected[key]), key


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("grid", GRIDS[1:], ids=str)
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_first_step_equals_one_process(results, grid, name, passes):
    losses, gradients = first_step(outcomes(results, Grid(), name), passes, Grid())
    found_losses, found = first_step(outcomes(results, grid, name), passes, grid)
    assert found_losses == pytest.approx(losses, rel=1e-6)
    for key in gradients:
        if gradients[key].any():
            assert relative(found[key], gradients[key]) <= 1e-5, key
        else:
            assert key.startswith("fusion.") and passes == 1 and not found[key].any(), key


@pytest.mark.parametrize("grid", GRIDS[1:], ids=str)
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_five_steps_equal_one_process(results, grid, name):
    reference, ranks = outcomes(results, Grid(), name)[0], outcomes(results, grid, name)
    for rank in ranks:
        assert len({step for step in map(repr, rank.steps)}) == len(rank.steps)
        for found, expected in zip(rank.steps, reference.steps):
            assert found.loss_per_pass == pytest.approx(expected.loss_per_pass, rel=1e-5)
            assert found.z_loss == pytest.approx(expected.z_loss, rel=1e-5)
            assert (found.z_loss > 0.1) == (name == "untied")
            assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
            assert found.loss_tokens == expected.loss_tokens and not found.skipped
    expected = whole([reference.final])
    for key, value in whole([rank.final for rank in ranks]).items():
        assert relative(value, expected[key]) <= 1e-4, key


def test_clipping_was_active_in_some_steps(results):
    norms = [step.grad_norm for step in outcomes(results, Grid(), "tied")[0].steps]
    assert max(norms) > 0.6 > min(norms)


def test_sharding_changes_nothing(results):
    plain, sharded = (outcomes(results, DATA_PARALLEL, name)[0] for name in ("unsharded", "sharded"))
    for a, b in zip(plain.steps, sharded.steps):
        assert a.loss_per_pass == pytest.approx(b.loss_per_pass, rel=1e-6)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_parameter_count(results, grid, name):
    case = CASES[NAMES.index(name)]
    found = whole([o.final for o in outcomes(results, grid, name)])
    assert sum(t.numel() for t in found.values()) == count_parameters(case.config(grid).model, 1003).total


def test_losses_start_near_the_uniform_guess(results):
    outcome: Outcome = outcomes(results, Grid(), "tied")[0]
    assert outcome.steps[0].loss_per_pass[0] == pytest.approx(math.log(1003), abs=0.2)
