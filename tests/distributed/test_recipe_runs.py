"""Whole runs: warm-up of the extra passes, z-loss window, pass counts, phases; over stops, resumes, new lengths."""

import contextlib
import io
import json
from pathlib import Path

import pytest

from megatron_fbt.config.feedback import PassPhase
from megatron_fbt.feedback.pass_schedule import passes_at
from tests.distributed.launch import run_distributed
from tests.distributed.run_case import SHARP_PHASE, STEPS, branch, rows_of, run, run_config, stop_before, write_corpus

WARMUP = 4
Z_STEPS = (4, 5, 6, 7, 8, 9)
"""Steps, counted from 1, of the z-loss's window: [0.25, 0.75) of 12 steps."""
OTHER = [PassPhase(0.0, {1: 1.0}), PassPhase(0.75, {2: 1.0})]


def recipe_config(folder, corpus):
    config = run_config(folder, corpus)
    config.feedback.loss_weights.warmup_steps = WARMUP
    config.training.z_loss.coefficient = 1e-2
    config.training.z_loss.from_fraction, config.training.z_loss.to_fraction = 0.25, 0.75
    return config


def all_runs(rank, world_size, folder, corpus):
    """{name: what the run said}, each in its own folder."""
    folder, said = Path(folder), {}

    def speaking(name, config, end, hook=None):
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            assert run(config, hook) == end
        said[name] = text.getvalue()

    config = recipe_config(folder / "whole", corpus)
    starts, phases = config.feedback.phase_start_steps(STEPS), config.feedback.phases
    first = next(step + 1 for step in range(STEPS) if passes_at(step, config.run.seed, starts, phases) > 1)
    config.checkpoint.save_interval = first
    speaking("whole", config, "finished")
    config.run.dir, config.checkpoint.save_interval = str(folder / "stopped"), None
    speaking("stopped", config, "StoppedBySignal", stop_before(first + 1))
    speaking("resumed", config, "finished")
    for name in ("longer", "other"):
        branch(folder / "whole", folder / name, first)
    config = recipe_config(folder / "longer", corpus)
    config.training.train_steps = 2 * STEPS
    speaking("longer", config, "StoppedBySignal", stop_before(first + 3))
    speaking("longer again", config, "finished")
    config = recipe_config(folder / "other", corpus)
    config.feedback.schedule = OTHER
    speaking("other", config, "finished")
    return said


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    said = run_distributed(all_runs, 1, str(folder), write_corpus(folder), timeout=200, init_group=False)[0]
    return folder, said


def state_of(folder: Path, step: int = STEPS) -> dict:
    return json.loads((folder / "checkpoints" / f"step_{step:08d}" / "trainer_state.json").read_text())


def test_loss_is_the_weighted_sum_with_warm_up_and_z_loss(runs):
    rows = rows_of(runs[0] / "whole")
    first = next(row["step"] for row in rows if row["passes"] > 1)
    extra = []
    for row in rows:
        later = [row[f"loss_pass_{k}"] for k in range(2, row["passes"] + 1)]
        factor = min(1.0, (row["step"] - first + 1) / WARMUP) if later else 0.0
        mean = sum(later) / max(len(later), 1)
        assert row["loss"] == pytest.approx(row["loss_pass_1"] + factor * mean + row["z_loss"], rel=1e-12)
        extra += [factor] if later else []
    assert extra[0] == 1 / WARMUP and extra[-1] == 1.0 and state_of(runs[0] / "whole")["switch_on_step"] == first - 1


def test_z_loss_has_its_window(runs):
    rows = rows_of(runs[0] / "whole")
    assert tuple(row["step"] for row in rows if row["z_loss"] > 0.01) == Z_STEPS
    assert all(row["z_loss"] == 0 for row in rows if row["step"] not in Z_STEPS)


def test_a_resume_in_the_warm_up_changes_nothing(runs):
    folder, said = runs
    assert rows_of(folder / "stopped") == rows_of(folder / "whole")
    assert state_of(folder / "stopped") == state_of(folder / "whole")
    assert "the phases of feedback.schedule start" not in said["resumed"]
    assert "feedback.schedule has changed" not in said["resumed"]


def test_realised_shares_are_logged_and_told(runs):
    folder, said = runs
    rows = rows_of(folder / "whole")
    for number, row in enumerate(rows, start=1):
        counts = [sum(other["passes"] == k for other in rows[:number]) for k in (1, 2, 3)]
        shares = {f"pass_share_{k}": count / number for k, count in enumerate(counts, start=1)}
        assert {name: row.get(name, 0.0) for name in shares} == pytest.approx(shares)
    assert state_of(folder / "whole")["pass_counts"] == counts
    line = f"steps by passes so far: 1: {counts[0]} ({counts[0] / STEPS:.2%}), 2: {counts[1]} ({counts[1] / STEPS:.2%})"
    assert said["whole"].count("steps by passes so far") == 1 and line in said["whole"]
    assert said["resumed"].count("steps by passes so far") == 2 and line in said["resumed"]
    assert "steps by passes so far" not in said["stopped"]


def test_a_longer_run_keeps_its_phases_and_says_so(runs):
    folder, said = runs
    kept = f"the phases of feedback.schedule start at steps 0, {SHARP_PHASE}, as stored; a new run has 0, {STEPS}"
    assert kept in said["longer"] and kept in said["longer again"]
    assert state_of(folder / "longer", 2 * STEPS)["phase_start_steps"] == [0, SHARP_PHASE]
    rows, whole = rows_of(folder / "longer"), rows_of(folder / "whole")
    assert [row["passes"] for row in rows[:STEPS]] == [row["passes"] for row in whole]
    assert len(rows) == 2 * STEPS and {row["passes"] for row in rows[STEPS:]} == {1, 2, 3}


def test_a_changed_schedule_is_resolved_anew_and_said_so(runs):
    folder, said = runs
    assert f"feedback.schedule has changed: its phases start at steps 0, {3 * STEPS // 4}" in said["other"]
    assert state_of(folder / "other")["phase_start_steps"] == [0, 3 * STEPS // 4]
    assert [row["passes"] for row in rows_of(folder / "other")[-4:]] == [1, 2, 2, 2]
