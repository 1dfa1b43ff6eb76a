"""tools/evaluate.py as it is called."""

import importlib.util
import json

import pytest
import yaml

from tests.unit.evaluation.models import export_text_model, ids_of, text_of, text_reference


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return export_text_model(tmp_path_factory.mktemp("exports") / "tiny model-1.0")


@pytest.fixture(scope="module")
def tool(repository):
    spec = importlib.util.spec_from_file_location("evaluate_tool", repository / "tools" / "evaluate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PROMPTS = ["one plus one is", "the sky", "def f(x):", "A"]


@pytest.fixture(scope="module")
def copy_task(tmp_path_factory):
    """A task of four prompts; the right answers are what the model writes in the soft regime, but for the last."""
    place = tmp_path_factory.mktemp("task")
    answers = [text_of(text_reference().greedy(ids_of(prompt), "soft", 6)) for prompt in PROMPTS]
    answers[-1] = "something else"
    rows = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in zip(PROMPTS, answers)]
    (place / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    config = {
        "task": "copy",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(place / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["<never>"], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (place / "copy.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return place / "copy.yaml"


def test_right_answers_are_counted_in_two_regimes(tool, folder, copy_task, tmp_path, capsys):
    output = tmp_path / "results" / "out.json"
    common = ["--model", str(folder), "--tasks", str(copy_task), "--output", str(output), "--log_samples"]
    assert tool.main([*common, "--regime", "soft", "--regime", "standard", "--batch_size", "3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(output.read_text()) and report["complete"]
    soft, standard = report["results"]
    assert soft["metrics"]["exact_match"] == {"value": 0.75, "stderr": 0.25, "n": 4}
    assert standard["metrics"]["exact_match"]["value"] < 0.75
    (comparison,) = report["comparisons"]
    difference = comparison["differences"]["exact_match"]
    assert difference["value"] == standard["metrics"]["exact_match"]["value"] - 0.75 and difference["n"] == 4
    lines = (tmp_path / "results" / "out.copy.soft.samples.jsonl").read_text().splitlines()
    written = [json.loads(line)["continuations"][0]["text"] for line in lines]
    assert written == [text_of(text_reference().greedy(ids_of(prompt), "soft", 6)) for prompt in PROMPTS]
