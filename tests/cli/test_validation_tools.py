"""tools/corpus_entropy.py and tools/show_validation.py, which close the quick start."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

ROOT = Path(__file__).resolve().parents[2]


def run(tool, *arguments):
    command = [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def write_dataset(prefix, documents):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for document in documents:
        builder.add_document(numpy.array(document), [len(document)])
    builder.finalize(f"{prefix}.idx")


def test_entropy_over_all_data_sets(tmp_path):
    write_dataset(tmp_path / "a", [[0, 0, 7], [7]])
    write_dataset(tmp_path / "b", [[7, 7, 300, 1]])
    report = json.loads(run("corpus_entropy", tmp_path / "a", tmp_path / "b", "--json").stdout)
    shares = [2 / 8, 4 / 8, 1 / 8, 1 / 8]
    expected = -sum(share * math.log(share) for share in shares)
    assert report == {"tokens": 8, "distinct_tokens": 4, "unigram_entropy": round(expected, 4)}


def test_entropy_of_a_data_set_that_is_not_there(tmp_path):
    ended = run("corpus_entropy", tmp_path / "nothing")
    assert ended.returncode == 3 and "nothing" in ended.stderr and "Traceback" not in ended.stderr


@pytest.fixture
def run_folder(tmp_path):
    rows = [
        {"step": 1, "loss": 9.0},
        {"step": 2, "loss": 7.0, "validation_loss_pass_1": 6.5, "validation_loss_pass_2": 8.125},
        {"step": 3, "loss": 5.0, "validation_loss_pass_1": 4.5, "validation_loss_pass_2": 4.25},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "va')
    return tmp_path


def test_table_has_a_row_for_each_validation_and_a_column_for_each_pass(run_folder):
    ended = run("show_validation", "--run", run_folder, "--unigram_entropy", 5.0, "--margin", 0.5)
    assert ended.returncode == 0
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert lines[0] == ["step", "pass", "1", "pass", "2"]
    assert lines[1:3] == [["2", "6.5000", "8.1250"], ["3", "4.5000", "4.2500"]]
    assert "5.0000" in lines[3]


@pytest.mark.parametrize("margin, code", [(0.5, 0), (0.51, 1)])
def test_the_worst_pass_of_the_last_validation_decides(run_folder, margin, code):
    ended = run("show_validation", "--run", run_folder, "--unigram_entropy", 5.0, "--margin", margin, "--json")
    assert ended.returncode == code
    assert json.loads(ended.stdout)["validations"][-1] == {"step": 3, "losses": [4.5, 4.25], "sequential": {}}


def test_losses_under_the_recurrence_have_columns_of_their_own(run_folder):
    sequential = {"validation_loss_soft": 4.75, "validation_loss_soft_trained": 4.5, "validation_loss_fused_2": None}
    row = {"step": 4, "validation_loss_pass_1": 4.25, "validation_soft_update_norm": 0.125, **sequential}
    (run_folder / "metrics.jsonl").write_text(
        (run_folder / "metrics.jsonl").read_text().rsplit("\n", 1)[0] + "\n" + json.dumps(row) + "\n"
    )
    lines = [line.split() for line in run("show_validation", "--run", run_folder).stdout.splitlines()]
    assert " ".join(lines[0]) == "step pass 1 pass 2 soft soft trained fused 2"
    assert lines[2] == ["3", "4.5000", "4.2500", "-", "-", "-"]
    assert lines[3] == ["4", "4.2500", "-", "4.7500", "4.5000", "non-finite"]
    found = json.loads(run("show_validation", "--run", run_folder, "--json").stdout)["validations"]
    assert found[-1]["sequential"] == {"soft": 4.75, "soft_trained": 4.5, "fused_2": None}


@pytest.mark.parametrize("loss", ["NaN", "Infinity", "null", '"4.0"', "1e999"])
def test_a_loss_that_is_no_finite_number_is_not_below_anything(run_folder, loss):
    with open(run_folder / "metrics.jsonl", "a") as file:
        file.write(f'\n{{"step": 4, "validation_loss_pass_1": 4.0, "validation_loss_pass_2": {loss}}}\n')
    ended = run("show_validation", "--run", run_folder, "--unigram_entropy", 5.0, "--json")
    assert ended.returncode == 1 and "not all below 5.0000" in ended.stderr and "Traceback" not in ended.stderr
    assert ended.stdout.endswith('"losses": [4.0, null], "sequential": {}}], "unigram_entropy": 5.0}\n')


def test_of_steps_that_ran_again_the_later_validation_is_shown(run_folder):
    with open(run_folder / "metrics.jsonl", "a") as file:
        file.write('\n{"step": 3, "validation_loss_pass_1": 4.0}\n')
    found = json.loads(run("show_validation", "--run", run_folder, "--json").stdout)["validations"]
    assert [(row["step"], row["losses"]) for row in found] == [(2, [6.5, 8.125]), (3, [4.0])]


def test_a_run_without_validation_is_an_error(tmp_path):
    ended = run("show_validation", "--run", tmp_path)
    assert ended.returncode == 3 and "no metrics.jsonl there" in ended.stderr
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 9.0}\n')
    ended = run("show_validation", "--run", tmp_path)
    assert ended.returncode == 3 and "no row has validation_loss_pass_1" in ended.stderr


@pytest.mark.parametrize("options", [["--margin", "0.5"], ["--margin", "0.5", "--unigram_entropy", "nan"]])
def test_a_margin_that_could_not_fail_is_refused(run_folder, options):
    ended = run("show_validation", "--run", run_folder, *options)
    assert ended.returncode == 2 and "error:" in ended.stderr
