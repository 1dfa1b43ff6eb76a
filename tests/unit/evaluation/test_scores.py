"""Scores of the ready tasks, and what is made of many of them."""

import itertools
import statistics

import pytest

from megatron_fbt.errors import DataError
from megatron_fbt.evaluation.scores import (
    answer_end,
    code_block,
    gsm8k,
    humaneval_runs,
    math_500,
    mbpp_runs,
    pass_at,
    passed,
)
from megatron_fbt.evaluation.statistics import mean_and_error, paired, quartiles

ADD = {
    "prompt": 'def add(a, b):\n    """Sum of two numbers."""\n',
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n",
    "entry_point": "add",
}
SQUARE = {
    "text": "Square a number.",
    "test_list": ["assert square(3) == 9", "assert square(-2) == math.prod([2, 2])"],
    "test_setup_code": "",
    "test_imports": ["import math"],
}


def test_gsm8k():
    document = {"answer": "6 * 3 = 18\n#### 18"}
    assert gsm8k(document, [["#### 18"]]) == {"exact_match": 1.0}
    assert gsm8k(document, [["18", "#### 18.0", "#### 19", "#### 1,8"]]) == {"exact_match": 0.5}
    with pytest.raises(DataError, match="no number after ####"):
        gsm8k({"answer": "18"}, [["#### 18"]])


def test_math_500():
    document = {"answer": r"\frac{1}{2}"}
    assert math_500(document, [[r"\boxed{0.5}", r"\boxed{2}", "0.5", r"\boxed{3} or \boxed{\dfrac12}"]]) == {
        "exact_match": 0.5
    }


def test_humaneval_programs_are_run():
    samples = ["    return a + b\n", "    return a - b\n", "    return\n"]
    assert humaneval_runs([samples], [ADD]) == [[True, False, False]]


def test_mbpp_programs_are_run():
    samples = [
        "def square(x):\n    return x * x\n",
        "Here it is:\n```python\ndef square(x):\n    return x ** 2\n```\nBye",
        "def square(x):\n    return x + x\n",
        "",
    ]
    assert mbpp_runs([samples[:2], samples[2:]], [SQUARE, SQUARE]) == [[True, True], [False, False]]


def test_code_block():
    assert code_block("x = 1\n```\nMore") == "x = 1\n"
    assert code_block("As before:\n```\nx = 1\n```\n") == "x = 1\n"
    assert code_block("Sure:\n```py\nx = 1\n```") == "x = 1\n"
    assert code_block("```python\nx = 1") == "x = 1"
    assert code_block("x = 1") == "x = 1"


@pytest.mark.parametrize(("size", "samples", "right"), [(1, 5, 2), (2, 5, 2), (3, 5, 1), (5, 5, 0), (2, 4, 4)])
def test_pass_at_k_is_the_share_of_all_choices_with_a_right_one(size, samples, right):
    outcomes = [True] * right + [False] * (samples - right)
    choices = list(itertools.combinations(outcomes, size))
    assert pass_at(size, samples, right) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_passed_has_the_sizes_that_the_samples_allow():
    assert passed({}, [[True]]) == {"pass@1": 1.0}
    assert passed({}, [[True, False]]) == {"pass@1": 0.5, "pass@2": 1.0}
    assert list(passed({}, [[False] * 20])) == ["pass@1", "pass@10", "pass@20"]


def test_where_the_answer_ends():
    assert answer_end("number", "a\n#### 12 eggs") == len("a\n#### 12")
    assert answer_end("boxed", r"so \boxed{1}. x") == len(r"so \boxed{1}")
    assert answer_end("whole", "abc") == 3
    assert answer_end("number", "abc") is None and answer_end(None, "abc") is None


def test_means_and_paired_differences():
    assert mean_and_error([1, 0, 1, 1]) == {"value": 0.75, "stderr": 0.25, "n": 4}
    assert mean_and_error([2.0]) == {"value": 2.0, "stderr": None, "n": 1}
    found = paired({1: 1.0, 2: 0.0, 3: 1.0, 9: 5.0}, {1: 1.0, 2: 1.0, 3: 3.0})
    assert found["value"] == pytest.approx(1.0) and found["n"] == 3
    assert found["stderr"] == pytest.approx(statistics.stdev([0, 1, 2]) / 3**0.5)
    assert paired({1: 1.0}, {2: 1.0}) is None


def test_quartiles():
    assert quartiles([5, 1, 3, 2, 4]) == {"mean": 3, "q1": 2, "median": 3, "q3": 4, "n": 5}
    assert quartiles([7]) == {"mean": 7, "q1": 7, "median": 7, "q3": 7, "n": 1}
    assert quartiles([]) is None
