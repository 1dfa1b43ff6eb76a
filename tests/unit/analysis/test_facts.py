"""Labelled sequences for probes: what is read, and what is refused with the number of its line."""

import json

import pytest

from megatron_fbt.analysis.facts import NO_LABEL, read_facts
from megatron_fbt.errors import DataError


class Letters:
    def __call__(self, text, **options):
        return type("Encoding", (), {"input_ids": [ord(letter) - ord("a") for letter in text]})


def read(tmp_path, *lines, tokenizer=None):
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (tmp_path / "facts.jsonl").write_text(text)
    return read_facts(str(tmp_path / "facts.jsonl"), tokenizer, 20)


def test_ids_text_and_groups(tmp_path):
    facts = read(
        tmp_path,
        {"input_ids": [3, 4, 5], "labels": [None, 7, 8], "group": "b"},
        "",
        {"text": "bcd", "labels": [8, -100, 7], "group": "a"},
        {"input_ids": [1, 2], "labels": [7, 7], "group": "b"},
        {"input_ids": [1], "labels": [8]},
        tokenizer=Letters(),
    )
    assert facts.input_ids == [[3, 4, 5], [1, 2, 3], [1, 2], [1]]
    assert facts.names == [7, 8] and facts.groups == [0, 1, 0, 2]
    assert facts.classes == [[NO_LABEL, 0, 1], [1, NO_LABEL, 0], [0, 0], [1]]


def test_values_of_several_kinds_stay_apart(tmp_path):
    facts = read(tmp_path, {"input_ids": [0] * 4, "labels": [1, True, "1", None]})
    assert facts.names == [True, 1, "1"] and facts.classes == [[1, 0, 2, NO_LABEL]]


GOOD = {"input_ids": [1, 2], "labels": [0, 1]}


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"input_ids": [1', "line 2: not JSON"),
        ([1], "line 2: must be an object"),
        ({"input_ids": [1]}, "line 2: must be an object"),
        ({"input_ids": [1], "text": "a", "labels": [1]}, "either"),
        ({"input_ids": [1, 2], "labels": [1]}, "line 2: 2 tokens and 1 labels"),
        ({"input_ids": [], "labels": []}, "line 2: 0 tokens"),
        ({"input_ids": [20], "labels": [1]}, "token id 20 .* 20 ids"),
        ({"input_ids": [True], "labels": [1]}, "whole numbers"),
        ({"input_ids": 1, "labels": [1]}, "input_ids must be a list"),
        ({"input_ids": [1], "labels": [0.5]}, "line 2: labels must be"),
        ({"text": "a", "labels": [1]}, "no tokenizer"),
    ],
)
def test_bad_lines_are_refused_with_their_number(tmp_path, line, message):
    with pytest.raises(DataError, match=message):
        read(tmp_path, GOOD, line)


@pytest.mark.parametrize(
    "lines", [[], [{"input_ids": [1], "labels": [None]}], [{"input_ids": [1, 2], "labels": [3, 3]}]]
)
def test_a_fact_needs_two_values(tmp_path, lines):
    with pytest.raises(DataError, match="at least two values"):
        read(tmp_path, *lines)


def test_no_file(tmp_path):
    with pytest.raises(DataError, match="absent.jsonl"):
        read_facts(str(tmp_path / "absent.jsonl"), None, 20)
