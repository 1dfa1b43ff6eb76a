"""The benchmark of what extra passes hold runs, and says what it should."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import memory_of_passes
from benchmarks.memory_of_passes import BARS, BUDGETS, missed_bars

TINY = "--hidden_size 64 --num_layers 2 --sequence_length 32 --vocab_size 256 --pairs 2 --json".split()


@pytest.fixture(scope="module")
def run():
    command = [sys.executable, Path(memory_of_passes.__file__), *TINY]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_a_tiny_run_has_a_row_for_each_budget_and_ends_as_its_bars_say(run):
    found = json.loads(run.stdout)
    assert list(found["prefixes"]) == ["8", "1"] and found["state"] > 0
    assert run.returncode == (1 if found["missed"] else 0), run.stderr
    assert run.stderr.count("missed: ") == len(found["missed"])
    for prefix in found["prefixes"].values():
        one = prefix["K=1"]
        assert one["left"] == 0 and max(one["timeline"]) == one["peak"]
        for passes in BARS:
            rows = prefix[f"K={passes}"]
            assert [row["budget"] for row in rows] == sorted({*BUDGETS, BARS[passes]})
            assert [row["budget"] for row in rows if row["automatic"]] == [BARS[passes]]
            assert all(row["left"] == 0 and row["time"] > 0 for row in rows)
            assert all(row["peak_ratio"] == row["peak"] / one["peak"] for row in rows)
            again = [row["computed_again"] for row in rows]
            assert again == sorted(again, reverse=True), "a larger budget computes no more again"


def test_a_missed_bar_is_named():
    def rows(ratio, bar):
        return [{"automatic": False, "peak_ratio": 9.0}, {"automatic": True, "peak_ratio": ratio * bar}]

    results = {256: {"K=1": {}, **{f"K={passes}": rows(0.99, bar) for passes, bar in BARS.items()}}}
    assert missed_bars(results) == []
    results[256]["K=3"] = rows(1.01, BARS[3])
    assert missed_bars(results) == ["prefix 256, K=3 / K=1: peak 1.414 > 1.4"]
