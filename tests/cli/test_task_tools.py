"""tools/task_rows.py and tools/task_accuracy.py as they are called."""

import importlib.util
import json

import pytest

from megatron_fbt.analysis.tasks import TASKS
from tests.unit.hf.exports import export
from tests.unit.hf.reference import random_weights, tiny_config


@pytest.fixture(scope="module")
def tool(repository):
    def load(name):
        spec = importlib.util.spec_from_file_location(name, repository / "tools" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return task_export(tmp_path_factory.mktemp("exports") / "tiny")


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    return task_export(tmp_path_factory.mktemp("exports") / "baseline", passes=1)


def task_export(path, passes=2, vocab_size=TASKS["cot5"].vocab_size, spoil=""):
    """An export with the weights that the sizes give; `spoil` names a parameter with one NaN."""
    config = tiny_config()
    config.model.vocab_size, config.feedback.eval_passes = vocab_size, passes
    weights = random_weights(config, vocab_size)
    for name in weights:
        if spoil and spoil in name:
            weights[name].view(-1)[0] = float("nan")
    return export(path, weights, config)


def test_rows_are_those_of_the_task(tool, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    arguments = ["--rows", "3", "--length", "6", "--seed", "5", "--output", str(path)]
    assert tool("task_rows").main([*arguments, "--task", "parity"]) == 0
    assert capsys.readouterr().out == f"3 rows -> {path}; model.vocab_size 4\n"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 3 and all(len(row["input_ids"]) == len(row["labels"]) == 6 for row in rows)
    assert tool("task_rows").main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "output": str(path),
        "rows": 3,
        "vocab_size": TASKS["cot5"].vocab_size,
    }


@pytest.mark.parametrize(
    "change, message",
    [(["--task", "chess"], "task=chess"), (["--rows", "0"], "rows=0"), (["--length", "7"], "length=7")],
)
def test_rows_that_cannot_be_are_refused(tool, tmp_path, capsys, change, message):
    assert tool("task_rows").main(["--rows", "3", "--output", str(tmp_path / "rows.jsonl"), *change]) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_told(tool, tmp_path, capsys):
    assert tool("task_rows").main(["--rows", "3", "--output", str(tmp_path / "no" / "rows.jsonl")]) == 2
    assert "cannot be written (No such file or directory)" in capsys.readouterr().err


@pytest.mark.parametrize("task", ["parity", "fsm"])
def test_a_model_of_another_task_is_refused(tool, tmp_path, capsys, task):
    folder = task_export(tmp_path / task, vocab_size=TASKS[task].vocab_size)
    assert tool("task_accuracy").main(["--model", str(folder), "--rows", "2", "--output", str(tmp_path / "out")]) == 4
    error = capsys.readouterr().err
    assert (
        f"vocabulary of {TASKS[task].vocab_size} ids" in error
        and "which has 8" in error
        and not (tmp_path / "out").exists()
    )


@pytest.mark.parametrize("spoil", ["word_embeddings", "fusion"])
def test_weights_that_are_not_numbers(tool, tmp_path, capsys, spoil):
    folder = task_export(tmp_path / "bad", spoil=spoil)
    arguments = ["--model", str(folder), "--rows", "4", "--length", "8", "--output", str(tmp_path / "out")]
    assert tool("task_accuracy").main(arguments) == 5
    assert "not finite" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_baseline_that_was_trained_with_feedback_is_refused(tool, folder, baseline, tmp_path, capsys):
    arguments = ["--model", str(baseline), "--baseline", str(folder), "--output", str(tmp_path / "out")]
    assert tool("task_accuracy").main(arguments) == 4
    assert "trained with 2 passes" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_rows_longer_than_the_model_was_trained_on_are_told(tool, folder, tmp_path, capsys):
    arguments = ["--model", str(folder), "--rows", "2", "--length", "66", "--output", str(tmp_path / "out")]
    assert tool("task_accuracy").main(arguments) == 0
    assert "was trained on rows of 64" in capsys.readouterr().err


def test_answers_of_two_models(tool, folder, baseline, tmp_path, capsys):
    output = tmp_path / "results"
    arguments = ["--model", str(folder), "--baseline", str(baseline), "--rows", "20", "--length", "8"]
    assert tool("task_accuracy").main([*arguments, "--output", str(output), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((output / "task_accuracy.json").read_text())
    assert (output / "task_accuracy.png").read_bytes().startswith(b"\x89PNG")
    generated = report["generated"]
    assert list(generated) == ["FBT, SOFT", "FBT, STANDARD", "standard transformer"]
    assert generated["FBT, STANDARD"] == generated["standard transformer"]
    assert all(len(accuracy["by_position"]) == 4 for accuracy in generated.values())
    assert list(report["given_answers"]) == ["1", "2", "3", "4", "6", "8"]
    assert tool("task_accuracy").main([*arguments[:2], "--rows", "20", "--length", "8", "--output", str(output)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line[:13].strip() for line in table] == ["", "FBT, SOFT", "FBT, STANDARD", "FBT reading t"]


def test_a_folder_without_a_model_is_refused(tool, tmp_path, capsys):
    assert tool("task_accuracy").main(["--model", str(tmp_path), "--output", str(tmp_path / "results")]) == 4
    assert "no exported model" in capsys.readouterr().err and not (tmp_path / "results").exists()
