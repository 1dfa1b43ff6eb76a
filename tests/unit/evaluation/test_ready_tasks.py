"""The ready task files through lm-eval, with a model that gives canned answers."""

import json

import pytest

from megatron_fbt.errors import ConfigError, DataError
from megatron_fbt.evaluation.options import EvaluationOptions
from megatron_fbt.evaluation.task_files import load_tasks, ready_tasks
from tests.unit.evaluation.test_scores import ADD, SQUARE

DATA = {
    "gsm8k": [
        {"question": "How much is 2 + 3?", "answer": "2 + 3 = 5\n#### 5"},
        {"question": "How much is 2 * 600?", "answer": "2 * 600 = 1200\n#### 1,200"},
    ],
    "math_500": [
        {"problem": "Half of $1$?", "solution": r"\boxed{\frac12}", "answer": r"\frac{1}{2}", "level": 1},
        {"problem": "Who?", "answer": r"\text{Evelyn}", "subject": "Algebra", "unique_id": "test/1.json"},
    ],
    "humaneval": [
        {"task_id": "HumanEval/0", **ADD, "canonical_solution": "    return a + b\n"},
        {"task_id": "HumanEval/1", **ADD, "canonical_solution": "    return a + b\n"},
    ],
    "mbpp": [
        {"task_id": 2, **SQUARE, "code": "def square(x):\n    return x * x"},
        {"task_id": 3, "prompt": "Square.", "code": "x", "test_list": ["assert square(2) == 4"]},
    ],
}
RIGHT_AND_WRONG = {
    "gsm8k": [" 2 + 3 = 5\n#### 5", " #### 12"],
    "math_500": [r" It is $\boxed{0.5}$.", r" $\boxed{\text{Sue}}$"],
    "humaneval": ["    return a + b\n", "    return a\n"],
    "mbpp": ["def square(x):\n    return x * x\n", "def square(x):\n    return x\n"],
}


@pytest.fixture
def data_dir(tmp_path):
    for name, rows in DATA.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tmp_path


def options(data_dir, *tasks, **fields):
    return EvaluationOptions("unused", list(tasks), data_dir=str(data_dir), allow_code_execution=True, **fields)


def canned(answers):
    """A model of lm-eval that gives these texts in turn, and remembers its prompts."""
    from lm_eval.api.model import LM

    class Canned(LM):
        def generate_until(self, requests):
            self.prompts = [request.args[0] for request in requests]
            self.settings = requests[0].args[1]
            return [answers[number % len(answers)] for number in range(len(requests))]

        loglikelihood = loglikelihood_rolling = None

    Canned.__abstractmethods__ = frozenset()
    return Canned()


def run(name, task, answers):
    from lm_eval import evaluator

    model = canned(answers)
    task.set_fewshot_seed(seed=0)
    tasks = {"tasks": {name: task}, "groups": {}, "group_map": {}}
    found = evaluator.evaluate(model, tasks, bootstrap_iters=0, confirm_run_unsafe_code=True)
    return model, found["results"][name]


@pytest.mark.parametrize("name", sorted(DATA))
def test_right_and_wrong_answers(name, data_dir):
    (task,) = load_tasks(options(data_dir, name)).values()
    model, results = run(name, task, RIGHT_AND_WRONG[name])
    assert results["pass@1,none" if name in ("humaneval", "mbpp") else "exact_match,none"] == 0.5
    assert len(model.prompts) == 2


def test_all_ready_tasks_are_covered():
    assert ready_tasks() == sorted(DATA)


def test_samples_and_temperature(data_dir):
    (task,) = load_tasks(options(data_dir, "humaneval", samples=3, temperature=0.8, max_gen_toks=64)).values()
    right, wrong = RIGHT_AND_WRONG["humaneval"]
    model, results = run("humaneval", task, [right, wrong, wrong])
    assert len(model.prompts) == 6
    assert results["pass@1,none"] == pytest.approx(1 / 3) and results["pass@3,none"] == 1.0
    assert model.settings["temperature"] == 0.8 and model.settings["do_sample"] and model.settings["max_gen_toks"] == 64


def test_prompts(data_dir):
    tasks = load_tasks(options(data_dir, *DATA))
    prompts = {name: run(name, task, ["x"])[0].prompts[0] for name, task in tasks.items()}
    assert prompts["humaneval"] == ADD["prompt"]
    assert prompts["gsm8k"].endswith("#### 180\n\nQuestion: How much is 2 + 3?\nAnswer:")
    assert prompts["gsm8k"].count("Question:") == 4
    assert prompts["math_500"].endswith("}}$.\n\nProblem: Half of $1$?\nSolution:")
    shown = "\n".join(SQUARE["test_list"])
    assert prompts["mbpp"].endswith(
        f"count(largest)\n```\n\nTask: Square a number.\nThe function must pass these tests:\n{shown}\n```python\n"
    )
    bare = load_tasks(options(data_dir, "gsm8k", num_fewshot=0))["gsm8k"]
    assert run("gsm8k", bare, ["x"])[0].prompts[0] == "Question: How much is 2 + 3?\nAnswer:"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3: not a JSON object"),
        ("[1]", "line 3: not a JSON object, but a list"),
        ('{"question": "a"}', "line 3: has no field answer; it has question"),
        ('{"question": ["a"], "answer": "#### 1"}', 'line 3: field question is \\["a"\\], but must be a text'),
        ('{"question": "\\ud800", "answer": "#### 1"}', "line 3: field question holds a lone surrogate"),
        ('{"question": ' + "[" * 100_000, "line 3: not a JSON object"),
        ('{"question": "a", "answer": "1"}', "object 3: field answer has no ####"),
    ],
)
def test_a_bad_line_is_named(data_dir, line, message):
    with open(data_dir / "gsm8k.jsonl", "a", encoding="utf-8") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=message):
        load_tasks(options(data_dir, "gsm8k"))


def test_missing_and_empty_data(tmp_path):
    with pytest.raises(DataError, match="gsm8k.jsonl: no such file.*question, answer.*--data_dir"):
        load_tasks(options(tmp_path, "gsm8k"))
    (tmp_path / "gsm8k.jsonl").write_text("\n")
    with pytest.raises(DataError, match="it is empty"):
        load_tasks(options(tmp_path, "gsm8k"))


def test_tasks_that_cannot_be_loaded(data_dir):
    with pytest.raises(ConfigError, match="gsm8k is given twice"):
        load_tasks(options(data_dir, "gsm8k", "gsm8k"))
    (data_dir / "broken.yaml").write_text("task: broken\noutput_type: generate_until\n")
    with pytest.raises(ConfigError, match="broken.yaml: cannot be loaded"):
        load_tasks(options(data_dir, str(data_dir / "broken.yaml")))
    with pytest.raises(ConfigError, match="absent.yaml: no such file"):
        load_tasks(options(data_dir, "absent.yaml"))


def test_generated_code_needs_a_permission(data_dir):
    refused = options(data_dir, "gsm8k", "mbpp")
    refused.allow_code_execution = False
    with pytest.raises(ConfigError, match="task mbpp: .* add --allow_code_execution"):
        load_tasks(refused)
