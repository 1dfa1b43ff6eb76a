"""fp16: a scaled loss scales every gradient exactly, overflows cost steps and nothing else, a resume goes on."""

import json
import math
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import run_distributed
from tests.distributed.model_case import Case, Grid, build, global_batch, own_part, start
from tests.distributed.run_case import STEPS, checkpoint_of, rows_of, run, run_config, stop_before, write_corpus

GRIDS = [Grid(), Grid(tensor=2, sequence_parallel=True), Grid(pipeline=2)]
HUGE = 2.0**31
CASES = {
    "chunked": {},
    "whole": {"memory.chunked_loss": False, "training.z_loss.coefficient": 0.01, "memory.recompute": "full"},
    "untied": {"model.share_embeddings_and_output_weights": False, "feedback.loss_weights.extra_passes": 0.5},
}


def scaled_gradients(rank, world_size):
    """{(grid, case, K): names whose gradients with a loss scale of 1024 are not 1024 times those without}."""
    from megatron.core import parallel_state

    from megatron_fbt.core.schedule import run_passes

    found = {}
    for grid in (grid for grid in GRIDS if grid.world_size == world_size):
        layout = start(grid)
        for name, overrides in CASES.items():
            built = build(Case(name, overrides), grid, layout)
            for passes in (1, 2, 3):
                both, totals = [], []
                for scale in (1.0, 1024.0):
                    built.optimizer.zero_grad()
                    recipe = built.recipe
                    recipe.loss_scale = scale
                    batches = own_part(global_batch(passes), layout)[:2]
                    totals.append(run_passes(built.stage, batches, passes, recipe))
                    both.append({key: p.main_grad / scale for key, p in built.stage.named_parameters()})
                assert torch.equal(totals[0].nll, totals[1].nll) and torch.equal(totals[0].z_loss, totals[1].z_loss)
                assert any(gradient.any() for gradient in both[0].values())
                found[str(grid), name, passes] = [key for key in both[0] if not torch.equal(both[0][key], both[1][key])]
        parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize("processes", [1, 2])
def test_a_loss_scale_multiplies_every_gradient_and_nothing_else(processes):
    for found in run_distributed(scaled_gradients, processes, timeout=240):
        assert len(found) == 9 * processes ** (processes - 1) and not any(found.values())


def fp16_config(folder, corpus, layout=(1, 1), **overrides):
    return run_config(folder, corpus, layout, **{"precision__dtype": "fp16", "optimizer__lr": 0.005, **overrides})


def fp16_runs(rank, world_size, folder, corpus):
    place, falling = Path(folder), {"precision__initial_loss_scale": HUGE, "precision__hysteresis": 1}
    falling.update(precision__loss_scale_window=3, training__train_steps=30)
    assert run(run_config(place / "fp32", corpus, optimizer__lr=0.005)) == "finished"
    assert run(fp16_config(place / "fp16", corpus, precision__initial_loss_scale=512.0)) == "finished"
    assert run(fp16_config(place / "stages", corpus, (1, 2), precision__initial_loss_scale=512.0)) == "finished"
    assert run(fp16_config(place / "constant", corpus, precision__loss_scale=64.0)) == "finished"
    for sharding in ("none", "megatron"):
        assert run(fp16_config(place / sharding, corpus, optimizer__sharding=sharding, **falling)) == "finished"
    for step, end in ((6, "StoppedBySignal"), (25, "StoppedBySignal"), (None, "finished")):
        hook = step and stop_before(step)
        assert run(fp16_config(place / "resumed", corpus, optimizer__sharding="megatron", **falling), hook) == end
    for step, dtype in ((4, "fp16"), (8, "bf16"), (None, "fp16")):
        hook, end = (stop_before(step), "StoppedBySignal") if step else (None, "finished")
        config = fp16_config(place / "formats", corpus, precision__dtype=dtype)
        config.precision.initial_loss_scale = 256.0 if step == 4 else 512.0 if dtype == "fp16" else 2.0**15
        assert run(config, hook) == end
    lowest = {"precision__min_loss_scale": HUGE, "precision__initial_loss_scale": HUGE}
    assert run(fp16_config(place / "lowest", corpus, **lowest)) == "BadNumbersError"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run_distributed(fp16_runs, 2, str(folder), write_corpus(folder), timeout=400, init_group=False)
    return folder


@pytest.mark.parametrize("name", ["fp16", "stages", "constant"])
def test_losses_follow_fp32(runs, name):
    found, expected = rows_of(runs / name), rows_of(runs / "fp32")
    assert len(found) == len(expected) == STEPS
    for row, other in zip(found, expected):
        assert row["skipped"] == 0 and row["loss_scale"] == (64.0 if name == "constant" else 512.0)
        assert row["loss"] == pytest.approx(other["loss"], rel=4e-3)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=4e-2)
    assert "loss_scale" not in expected[0]


@pytest.mark.parametrize("name", ["none", "megatron"])
def test_overflows_lower_the_scale_and_change_no_weight(runs, name):
    rows = rows_of(runs / name)
    told = [json.loads(line) for line in (runs / name / "skipped.jsonl").read_text().splitlines()]
    first = rows[0]["skipped"] and next(row["step"] for row in rows if row["skipped"] < row["step"])
    assert first > 4, "the scale is too large in several steps"
    scales = [row["loss_scale"] for row in rows]
    assert scales[:first] == [HUGE / 2**step for step in range(first)]
    assert max(scales[first:]) > scales[first - 1], "after three steps without an overflow it doubles"
    assert len(told) == rows[-1]["skipped"] and all("fp16 gradients overflow" in row["reason"] for row in told)
    assert all(math.isfinite(row["loss"]) for row in rows)
    state = json.loads((runs / name / "checkpoints" / "step_00000030" / "trainer_state.json").read_text())
    assert state["updates"] == 30 - rows[-1]["skipped"] and state["bad_in_a_row"] == 0
    assert all(torch.isfinite(value).all() for value in checkpoint_of(runs / name, 30).values())


def test_sharding_and_resume_change_nothing(runs):
    assert rows_of(runs / "resumed") == rows_of(runs / "megatron")
    resumed, whole = checkpoint_of(runs / "resumed", 30), checkpoint_of(runs / "megatron", 30)
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    for one, other in zip(rows_of(runs / "none"), rows_of(runs / "megatron")):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_a_scale_begins_anew_after_steps_in_another_format(runs):
    rows = rows_of(runs / "formats")
    assert [row.get("loss_scale") for row in rows] == [256.0] * 4 + [None] * 4 + [512.0] * 4
    assert rows[-1]["skipped"] == 0


def test_a_checkpoint_has_fp32_masters_of_fp16_weights(runs):
    tensors = checkpoint_of(runs / "fp16", STEPS)
    weights = {name: value for name, value in tensors.items() if not name.startswith("optimizer.")}
    assert weights and all(value.dtype == torch.float16 for value in weights.values())
    for name, value in weights.items():
        master = tensors[f"optimizer.master.{name}"]
        assert master.dtype == torch.float32 and torch.equal(master.half(), value)


def test_overflows_at_the_smallest_scale_end_the_run(runs):
    assert not list((runs / "lowest").glob("checkpoints/*"))
    rows = rows_of(runs / "lowest")
    assert [row["skipped"] for row in rows] == list(range(1, len(rows) + 1))
    reasons = (runs / "lowest" / "skipped.jsonl").read_text()
    assert reasons.count("cannot fall below precision.min_loss_scale") == len(rows)
