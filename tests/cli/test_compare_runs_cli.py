"""tools/compare_runs.py as it is called."""

import json
import os
import subprocess
import sys

import pytest

from tests.unit.analysis.test_curves import row, write


@pytest.fixture
def runs(tmp_path):
    def rows(losses, factor):
        return [
            {**row(step, validation_loss_pass_1=loss), "token_equivalents": 10 * step * factor}
            for step, loss in enumerate(losses, start=1)
        ]

    folders = [
        write(tmp_path / "standard", rows([5.0, 4.0, 3.0, 2.0], 1)),
        write(tmp_path / "fbt", rows([5.0, 3.5, 2.5], 2)),
    ]
    for folder, size in zip(folders, (50, 60)):
        with open(f"{folder}/config.yaml", "w") as stream:
            stream.write(f"model:\n  vocab_size: {size}\n")
    return folders


def call(repository, *arguments):
    command = [sys.executable, str(repository / "tools" / "compare_runs.py"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_text_json_and_plot(repository, runs, tmp_path):
    ended = call(repository, *runs, "--output", tmp_path / "out")
    assert ended.returncode == 0, ended.stderr
    assert "standard needs 35, 1.17x the tokens" in ended.stdout
    assert "standard needs 35, 0.58x the token-equivalents" in ended.stdout
    assert "warning: standard and fbt: the vocabularies differ" in ended.stdout
    report = json.loads((tmp_path / "out" / "compare_runs.json").read_text())
    assert report["baseline"] == "standard" and len(report["comparisons"]) == 3 * 2
    assert (tmp_path / "out" / "compare_runs.png").read_bytes().startswith(b"\x89PNG")


def test_baseline_and_json(repository, runs):
    ended = call(repository, *runs, "--baseline", runs[1], "--json")
    report = json.loads(ended.stdout)
    assert report["baseline"] == "fbt" and report["comparisons"][0]["status"] == "not reached"


def test_a_folder_without_metrics(repository, runs, tmp_path):
    ended = call(repository, runs[0], tmp_path)
    assert ended.returncode == 3 and ended.stderr.startswith("error: run ") and "Traceback" not in ended.stderr


def test_one_run_is_not_enough_and_help_has_an_example(repository, runs):
    assert call(repository, runs[0]).returncode == 2
    ended = call(repository, "--help")
    assert ended.returncode == 0 and "python tools/compare_runs.py runs/baseline" in ended.stdout
