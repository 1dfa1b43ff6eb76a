"""The evidence script: which runs, which numbers count, and that it runs."""

import importlib.util
import json
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def evidence(repository):
    spec = importlib.util.spec_from_file_location("feedback_evidence", repository / "benchmarks/feedback_evidence.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["feedback_evidence"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_runs_of_an_experiment_have_equal_token_equivalents(evidence):
    runs = {(run.experiment, run.name): run for run in evidence.plan_runs(list(evidence.MODELS), [7], evidence.Size())}
    assert {run.seed for run in runs.values()} == {7}
    steps = {key: run.steps for key, run in runs.items()}
    assert steps["parity", "standard"] == steps["fsm", "standard"] == steps["cot5", "standard"] == 3000
    assert steps["parity", "FBT"] == steps["fsm", "FBT"] == 1000  # three passes
    assert steps["cot5", "FBT"] == 1714  # 1.75 passes
    units = evidence.Size().byte_units
    assert steps["bytes", "2 passes only"] == units // 2
    assert steps["bytes", "FBT 75/22/3"] == steps["bytes", "standard, FBT's tokens"] == int(units / 1.28)
    assert steps["bytes", "FBT 75/25/0"] == int(units / 1.25) and steps["bytes", "standard"] == units


def parity(seed, name, accuracy, doubled=None):
    def at(value):
        return {"1": {"tokens": 0.5, "whole": 0.0}, "32": {"tokens": value, "whole": 0.0}}

    doubled = {"1": {"tokens": 0.5}, "64": {"tokens": accuracy if doubled is None else doubled}}
    found = {"experiment": "parity", "name": name, "seed": seed, "steps": 10, "tokens": 1e6, "token_equivalents": 3e6}
    found["cpu_seconds"] = 600.0
    return {**found, "trained_length": at(accuracy), "double_length": doubled}


def test_a_bar_holds_for_the_median(evidence):
    results = [parity(seed, "FBT", value, 0.8) for seed, value in enumerate((0.2, 0.96, 0.97))]
    results += [parity(seed, "standard", value) for seed, value in enumerate((0.5, 0.73, 0.9))]
    judged = {bar["bar"]: bar for bar in evidence.judge(results)}
    assert list(judged) == ["parity, RECURRENT, T", "parity, RECURRENT, 2T", "parity, standard, T"]
    assert (judged["parity, RECURRENT, T"]["median"], judged["parity, RECURRENT, T"]["holds"]) == (0.96, True)
    assert judged["parity, RECURRENT, T"]["values"] == [0.2, 0.96, 0.97]
    assert judged["parity, RECURRENT, 2T"]["holds"] and not judged["parity, standard, T"]["holds"]
    text = evidence.conclusions(results, list(judged.values()))
    assert "MISSED  parity, standard, T: 0.730 <= 0.72  (0.500, 0.730, 0.900)" in text
    assert text.splitlines()[-1] == "6 runs, 3,600 CPU seconds: 30 minutes on 2 idle cores"
    table = evidence.format_table(results).splitlines()
    assert len([line for line in table if line.startswith("parity")]) == 6
    assert "0.960" in table[3] and "0.800" in table[3]


@pytest.mark.slow
def test_everything_runs(repository):
    command = [sys.executable, "benchmarks/feedback_evidence.py", "--quick", "--seeds", "3", "--json"]
    result = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stderr[-4000:]
    content = json.loads(result.stdout)
    runs = {(run["experiment"], run["name"]): run for run in content["runs"]}
    assert len(runs) == 11 and all(run["seed"] == 3 for run in runs.values()) and content["bars"] == []
    for (experiment, name), run in runs.items():
        if experiment == "bytes":
            assert len(run["losses"]) == (1 if name.startswith("standard") else 6)
            assert all(0 < loss < 6 for loss in run["losses"]) and run["cpu_seconds"] > 0
            assert ("stability" in run) == (not name.startswith("standard"))
        else:
            passes = ["1"] if name == "standard" else ["1", "2", "3", "5", "8"]
            assert sorted(run["trained_length"], key=int) == passes
    assert runs["cot5", "FBT"]["generation"].keys() == {"standard", "soft"}
    assert 0 < runs["fsm", "FBT"]["probe"]["fused1"] <= 1
    assert runs["parity", "FBT"]["token_equivalents"] == 3 * runs["parity", "FBT"]["tokens"]
