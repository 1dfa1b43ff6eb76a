"""The synthetic tasks, against rows worked out by hand."""

import json

import pytest
import torch

from megatron_fbt.analysis.tasks import TASKS, automaton_table, cot5_rows, write_rows


def rows(task, count=64, length=16, seed=1):
    return TASKS[task].rows(count, length, torch.Generator().manual_seed(seed))


def test_parity_counts_ones():
    made = rows("parity")
    assert set(made.input_ids.flatten().tolist()) == {0, 1} and made.feedback is None
    for bits, labels in zip(made.input_ids.tolist(), made.labels.tolist()):
        assert labels == [2 + sum(bits[: t + 1]) % 2 for t in range(16)]


def test_the_automaton_walks_its_table():
    table, made = automaton_table().tolist(), rows("fsm")
    assert len(table) == 6 and {len(states) for states in table} == {4}
    for letters, labels in zip(made.input_ids.tolist(), made.labels.tolist()):
        state = 0
        for letter, label in zip(letters, labels):
            state = table[state][letter]
            assert label == 4 + state
    assert set(made.input_ids.flatten().tolist()) == set(range(4))


def test_cot5_by_hand(monkeypatch):
    digits = torch.tensor([[3, 4, 1, 2], [0, 0, 2, 1]])
    monkeypatch.setattr(torch, "randint", lambda low, high, size, generator: digits)
    made = cot5_rows(2, 8, torch.Generator())
    # Sums mod 5: 3 2 3 0 and 0 0 2 3; 7 = at least 3, 6 = below.
    assert made.input_ids.tolist() == [[3, 4, 1, 2, 5, 7, 6, 7], [0, 0, 2, 1, 5, 6, 6, 6]]
    assert made.labels.tolist() == [[-100] * 4 + [7, 6, 7, 6], [-100] * 4 + [6, 6, 6, 7]]
    assert made.feedback.tolist() == [False] * 5 + [True] * 3


def test_cot5_needs_an_even_length():
    with pytest.raises(ValueError, match="length=7"):
        rows("cot5", length=7)


@pytest.mark.parametrize("task", TASKS)
def test_ids_fit_the_vocabulary_and_rows_follow_the_seed(task):
    made, again, other = rows(task), rows(task), rows(task, seed=2)
    assert torch.equal(made.input_ids, again.input_ids) and torch.equal(made.labels, again.labels)
    assert not torch.equal(made.input_ids, other.input_ids)
    used = set(made.input_ids.flatten().tolist()) | set(made.labels.flatten().tolist())
    assert used - {-100} == set(range(TASKS[task].vocab_size))


def test_rows_are_written_as_the_trainer_reads_them(tmp_path):
    write_rows(rows("cot5", 2, 4), tmp_path / "rows.jsonl")
    first, second = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    made = rows("cot5", 2, 4)
    assert first == {
        "input_ids": made.input_ids[0].tolist(),
        "labels": made.labels[0].tolist(),
        "feedback": [0, 0, 0, 1],
    }
    assert second["labels"] == made.labels[1].tolist()
    write_rows(rows("parity", 1, 4), tmp_path / "rows.jsonl")
    assert json.loads((tmp_path / "rows.jsonl").read_text()).keys() == {"input_ids", "labels"}
