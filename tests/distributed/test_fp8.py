"""Emulated FP8 in tensor, pipeline and data parallel layouts, with recompute, K passes and every sharding."""

import math

import pytest
import torch

from tests.distributed.fp8_case import DELAYED, ROWS_USED, SMALL, layers, run_fp8
from tests.distributed.launch import run_distributed
from tests.distributed.model_case import Case, Grid, whole

PASSES = (1, 3)
CASES = [
    Case("tensorwise", SMALL, PASSES),
    Case("recomputed", {**SMALL, "memory.recompute": "full"}, PASSES),
    Case("delayed", {**SMALL, **DELAYED}, PASSES),
    Case("delayed recomputed", {**SMALL, **DELAYED, "memory.recompute": "full"}, PASSES),
    Case("all", {**SMALL, "precision.fp8_head": True, "precision.fp8_fusion": True}, PASSES),
    Case("first in bf16", {**SMALL, "precision.num_layers_at_start_in_bf16": 1}, PASSES),
]
for case in CASES:  # a padded vocabulary that divides
    case.overrides["model.make_vocab_size_divisible_by"] = 16
GRIDS = [Grid(), Grid(tensor=2, sequence_parallel=True), Grid(pipeline=2)]
SHARDINGS = ["none", "megatron", "zero1", "zero2", "zero3"]
NAMES = [case.name for case in CASES]


@pytest.fixture(scope="module")
def results():
    """Steps by grid: one launch for each."""
    found = {}

    def of(grid):
        if grid not in found:
            found[grid] = run_distributed(run_fp8, grid.world_size, grid, CASES, timeout=200)
        return found[grid]

    return of


def losses(ranks, name):
    return [report.loss_per_pass for report in ranks[0][name].reports]


@pytest.mark.parametrize("world_size", [1, 2])
def test_layers_equal_a_plain_reference_whose_shards_scale_by_themselves(world_size):
    for errors in run_distributed(layers, world_size):
        assert len(errors) == 6 * world_size
        assert max(errors.values()) < 2e-6, errors


@pytest.mark.parametrize("name", NAMES)
def test_a_pipeline_changes_rounding_alone(results, name):
    """The first step's losses not at all; then sums over micro-batches differ in their last bits, and 8 bits more."""
    one, two = results(Grid()), results(Grid(pipeline=2))
    found, expected = two[0][name].reports, one[0][name].reports
    assert found[0].loss_per_pass == expected[0].loss_per_pass
    assert found[0].grad_norm == pytest.approx(expected[0].grad_norm, rel=1e-6)
    assert [report.grad_norm for report in found] == pytest.approx([r.grad_norm for r in expected], rel=1e-3)
    for step, reference in zip(losses(two, name), losses(one, name), strict=True):
        assert step == pytest.approx(reference, abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_tensor_parallel_ranks_agree_and_stay_near_one_process(results, name):
    ranks = results(Grid(tensor=2, sequence_parallel=True))
    whole([rank[name].final for rank in ranks])  # fails if copies differ; the delayed scales are all ranks'
    for found, expected in zip(ranks[0][name].reports, results(Grid())[0][name].reports, strict=True):
        assert found.loss_per_pass == pytest.approx(expected.loss_per_pass, abs=2e-3)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6 if "delayed" in name else 5e-3)
    for module, held in ranks[0][name].state.items():
        for kind, value in held.items():
            assert torch.equal(value, ranks[1][name].state[module][kind]), module


@pytest.mark.parametrize("name", ["", "delayed "])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_recompute_changes_nothing(results, grid, name):
    ranks, plain, recomputed = results(grid), name.strip() or "tensorwise", f"{name}recomputed"
    for rank in ranks:
        assert losses([rank], plain) == losses([rank], recomputed)
        for key, value in rank[plain].final.tensors.items():
            assert torch.equal(value, rank[recomputed].final.tensors[key]), key
        for module, held in rank[plain].state.items():
            assert all(torch.equal(value, rank[recomputed].state[module][kind]) for kind, value in held.items())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_weights_are_quantised_once_a_step(results, grid, name):
    """Whatever the passes, micro-batches and recomputed layers; the other operands once for each product."""
    for rank in results(grid):
        for passes, counts in zip(PASSES, rank[name].counts, strict=True):
            assert counts or name == "first in bf16"
            for key, count in counts.items():
                module, kind = key.rsplit(".", 1)
                uses = ROWS_USED * (passes - 1 if module.startswith("fusion.") else passes)
                recomputed = 2 if kind == "inputs" and "recomputed" in name else 1
                assert count == (1 if kind == "weights" else uses * recomputed), (key, passes)


@pytest.mark.parametrize("name", NAMES)
def test_which_layers_are_quantised(results, name):
    modules = {key.rsplit(".", 1)[0] for key in results(Grid())[0][name].counts[1]}
    linears = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    layers = [1] if name == "first in bf16" else [0, 1]
    expected = {f"decoder.layers.{layer}.{linear}" for layer in layers for linear in linears}
    if name == "all":
        expected |= {"fusion.state_proj", "fusion.token_gate", "output_layer"}
    assert modules == expected


def test_fp8_is_not_the_same_as_full_precision(results):
    one = results(Grid())[0]
    reports = {name: repr(one[name].reports) for name in ("tensorwise", "delayed", "all", "first in bf16")}
    assert len(set(reports.values())) == len(reports)


def test_delayed_scales_come_from_all_passes_of_earlier_steps(results):
    for held in results(Grid())[0]["delayed"].state.values():
        history, scales = held["amax_history"], held["scales"]
        assert history.shape == (3, 3) and (history[:2] > 0).all() and not history[2].any()
        limits = torch.tensor([448.0, 448.0, 57344.0])
        assert torch.equal(scales, limits / history.amax(0))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [{}, DELAYED], ids=["tensorwise", "delayed"])
def test_every_sharding_takes_the_same_steps(recipe):
    grid, passes = Grid(data=2), (1, 2)
    cases = [Case(name, {**SMALL, **recipe, "optimizer.sharding": name}, passes) for name in SHARDINGS]
    ranks = run_distributed(run_fp8, 2, grid, cases, timeout=250)
    for name in SHARDINGS[1:]:
        for found, expected in zip(ranks[0][name].reports, ranks[0]["none"].reports, strict=True):
            assert found.loss_per_pass == pytest.approx(expected.loss_per_pass, rel=1e-5)
            assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        for module, held in ranks[0][name].state.items():
            assert all(torch.equal(value, ranks[1][name].state[module][kind]) for kind, value in held.items())


def test_losses_are_finite(results):
    assert all(math.isfinite(x) for name in NAMES for step in losses(results(Grid()), name) for x in step)
