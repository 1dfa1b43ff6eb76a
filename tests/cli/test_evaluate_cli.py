"""tools/evaluate.py as it is called."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
import yaml

from tests.unit.evaluation.models import LETTERS, export_text_model, ids_of, text_of, text_reference


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


def write_task(place, name, rows, **config):
    """A task file of lm-eval on rows of its own."""
    (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(place / f"{name}.jsonl")}}}
    task = {"task": name, **data, "test_split": "test", **config}
    (place / f"{name}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    return str(place / f"{name}.yaml")


def choice_task(place):
    """Two questions with two choices; the right one is what the model finds likelier in the soft regime, once."""
    rows, scores = [], []
    for question, choices in (("one", ["abcdefgh", "xyzuvw"]), ("two", ["12345678", "+-*/().?"])):
        found = []
        for choice in choices:
            ids = torch.cat([ids_of(question), ids_of(" " + choice)])
            logits = text_reference().logits(text_reference().regime(ids, "soft", len(question)))
            found.append(sum(logits[t - 1].log_softmax(-1)[ids[t]].item() for t in range(len(question), len(ids))))
        scores.append(found)
        best = found.index(max(found))
        rows.append({"q": question, "choices": choices, "gold": best if question == "one" else 1 - best})
    task = write_task(
        place,
        "choice",
        rows,
        output_type="multiple_choice",
        doc_to_text="{{q}}",
        doc_to_choice="{{choices}}",
        doc_to_target="{{gold}}",
        metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    )
    return task, scores


def test_choices_by_log_likelihood(tool, folder, tmp_path, capsys):
    task, scores = choice_task(tmp_path)
    output = tmp_path / "out.json"
    common = ["--model", str(folder), "--tasks", task, "--output", str(output), "--log_samples"]
    assert tool.main([*common, "--passes", "9"]) == 0
    table = capsys.readouterr().out
    assert "acc" in table and "0.5000 +- 0.5000" in table and "error of the passes, max" in table
    (result,) = json.loads(output.read_text())["results"]
    assert result["metrics"]["acc"]["value"] == 0.5
    assert result["error_of_passes"]["passes"] == 9 and result["error_of_passes"]["requests"] == 4
    assert result["error_of_passes"]["max"] < 1e-3  # nine tokens after nine passes
    lines = [json.loads(line) for line in (tmp_path / "out.choice.soft.samples.jsonl").read_text().splitlines()]
    for line, expected in zip(lines, scores):
        assert [response[0][0] for response in line["resps"]] == pytest.approx(expected, abs=1e-3)
    assert tool.main([*common, "--passes", "2", "--error_sample", "3"]) == 0
    (result,) = json.loads(output.read_text())["results"]
    assert result["error_of_passes"]["requests"] <= 3 and result["error_of_passes"]["max"] > 1e-3


def test_perplexity(tool, folder, tmp_path, capsys):
    text = "Some text of a page."
    task = write_task(
        tmp_path,
        "page",
        [{"page": text}],
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{page}}",
        metric_list=[{"metric": "bits_per_byte"}],
    )
    arguments = ["--model", str(folder), "--tasks", task, "--passes", "exact", "--json"]
    assert tool.main([*arguments, "--regime", "soft"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    ids = torch.cat([torch.tensor([len(LETTERS)]), ids_of(text)])
    logits = text_reference().logits(text_reference().regime(ids, "soft", 1))
    nats = -sum(logits[t - 1].log_softmax(-1)[ids[t]].item() for t in range(1, len(ids)))
    found = result["metrics"]["bits_per_byte"]
    assert found["value"] == pytest.approx(nats / len(text) / 0.6931472, rel=1e-5) and found["stderr"] is None


def test_results_so_far_are_kept(tool, folder, copy_task, tmp_path, capsys):
    """A task that fails while it runs costs nothing of what ran before it."""
    rows = [{"q": "one", "text": "x" * 600}]
    config = {"output_type": "loglikelihood", "doc_to_text": "{{q}}", "doc_to_target": "{{text}}"}
    metrics = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    too_long = write_task(tmp_path, "long", rows, metric_list=metrics, **config)
    output = tmp_path / "out.json"
    arguments = ["--model", str(folder), "--tasks", str(copy_task), too_long, "--output", str(output)]
    assert tool.main(arguments) == 2
    assert "max_length=512: a continuation of 600 tokens does not fit" in capsys.readouterr().err
    report = json.loads(output.read_text())
    assert report["complete"] is False and [result["task"] for result in report["results"]] == ["copy"]


def test_limit(tool, folder, copy_task, capsys):
    arguments = ["--model", str(folder), "--tasks", str(copy_task), "--limit", "2", "--json"]
    assert tool.main(arguments) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["documents"] == 2 and result["metrics"]["exact_match"]["value"] == 1.0
    assert result["trace"]["tokens_to_end"]["median"] == 6 and result["trace"]["tokens_to_answer"] is None


WRONG = [
    (["--passes", "0"], "passes=0"),
    (["--passes", "all"], "passes=all"),
    (["--fused_passes", "0"], "fused_passes=0"),
    (["--error_sample", "-1"], "error_sample=-1"),
    (["--batch_size", "0"], "batch_size=0"),
    (["--limit", "0"], "limit=0"),
    (["--num_fewshot", "-1"], "num_fewshot=-1"),
    (["--samples", "0"], "samples=0"),
    (["--samples", "4"], "samples=4: greedy samples are all the same"),
    (["--temperature", "nan"], "temperature=nan"),
    (["--max_gen_toks", "0"], "max_gen_toks=0"),
    (["--max_length", "1"], "max_length=1"),
    (["--dtype", "int8"], "dtype=int8"),
    (["--seed", "-1"], "seed=-1"),
    (["--regime", "soft", "--regime", "soft"], "name each regime once"),
    (["--log_samples"], "log_samples: samples go beside the results; give --output"),
    (["--tasks", "nothing_such"], "nothing_such is unknown"),
    (["--tasks", "absent.yaml"], "absent.yaml: no such file"),
    (["--output", "/proc/absent/out.json"], "output /proc/absent/out.json: cannot be written"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_arguments_end_before_the_weights_are_read(
    tool, folder, copy_task, capsys, arguments, message, monkeypatch
):
    monkeypatch.setattr(
        "megatron_fbt.inference.text.FBTForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("loaded")
    )
    assert tool.main(["--model", str(folder), "--tasks", str(copy_task), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error, error


def test_more_worked_examples_than_there_are(tool, folder, copy_task, capsys):
    assert tool.main(["--model", str(folder), "--tasks", str(copy_task), "--num_fewshot", "99"]) == 2
    assert "error: num_fewshot=99: task copy has fewer (" in capsys.readouterr().err


def test_generated_code_is_refused_before_the_weights_are_read(tool, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "megatron_fbt.inference.text.FBTForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("loaded")
    )
    rows = [{"prompt": "Square.", "code": "x", "test_list": ["assert square(2) == 4"]}]
    (tmp_path / "mbpp.jsonl").write_text(json.dumps(rows[0]), encoding="utf-8")
    assert tool.main(["--model", str(folder), "--tasks", "mbpp", "--data_dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "task mbpp" in error and "--allow_code_execution" in error


def test_data_and_model_that_are_not_there(tool, folder, tmp_path, capsys):
    assert tool.main(["--model", str(folder), "--tasks", "gsm8k", "--data_dir", str(tmp_path)]) == 3
    assert "gsm8k.jsonl: no such file" in capsys.readouterr().err
    assert tool.main(["--model", str(tmp_path / "absent"), "--tasks", "gsm8k"]) == 4
    assert "convert_to_hf.py" in capsys.readouterr().err


def test_without_lm_eval_the_remedy_is_told(tool, folder, copy_task, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "lm_eval" else find(name, *a))
    assert tool.main(["--model", str(folder), "--tasks", str(copy_task)]) == 2
    error = capsys.readouterr().err
    assert "lm-eval, which is not installed: pip install -c constraints.txt -e '.[eval]'" in error


def test_command_runs_generated_programs_when_that_is_allowed(repository, folder, tmp_path):
    rows = [{"prompt": "Square.", "code": "x", "test_list": ["assert square(2) == 4"]}]
    (tmp_path / "mbpp.jsonl").write_text(json.dumps(rows[0]), encoding="utf-8")
    command = [sys.executable, str(repository / "tools" / "evaluate.py"), "--model", str(folder), "--tasks", "mbpp"]
    done = subprocess.run(
        [*command, "--allow_code_execution", "--regime", "standard", "--regime", "soft", "--max_gen_toks", "4"],
        env={**os.environ, "PYTHONPATH": str(repository)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    head, passed = done.stdout.splitlines()[:2]
    assert head.split() == "mbpp, 1 documents standard soft soft - standard".split()
    assert passed.split() == ["pass@1", "0.0000", "0.0000", "+0.0000"]
    assert "done: mbpp, standard: pass@1 0.0000" in done.stderr


def test_help_has_an_example(tool, capsys):
    with pytest.raises(SystemExit) as left:
        tool.main(["--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert "python tools/evaluate.py --model" in shown and "exit codes" in shown
