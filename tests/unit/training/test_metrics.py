"""metrics.jsonl: strict JSON, one row a step, cut after a resume."""

import json
import os

import numpy
import pytest
import torch

from megatron_fbt.training.metrics import MetricsLog, json_ready, read_metrics, replace_file


def strict_rows(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_non_finite_numbers_become_null_on_every_level(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.append({"step": 1, "loss": float("nan"), "grad_norm": torch.tensor(float("inf")), "lr": numpy.float32(0.5)})
        log.append({"step": 2, "loss": 1.25, "nested": {"values": [float("-inf"), 2]}, "skipped": numpy.int64(3)})
    assert strict_rows(path) == [
        {"step": 1, "loss": None, "grad_norm": None, "lr": 0.5},
        {"step": 2, "loss": 1.25, "nested": {"values": [None, 2]}, "skipped": 3},
    ]


def test_numbers_survive_exactly():
    values = {"tokens": 3 * 10**12, "loss": 0.1 + 0.2, "flag": True, "text": "K"}
    assert json.loads(json.dumps(json_ready(values))) == values


def test_values_without_a_json_form_are_an_error():
    with pytest.raises(TypeError, match="set"):
        json_ready({"loss": {1, 2}})


def test_rows_are_readable_before_the_log_is_closed(tmp_path):
    log = MetricsLog(tmp_path / "run" / "metrics.jsonl")
    log.append({"step": 1})
    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == [{"step": 1}]
    log.close()


def test_cut_after_keeps_the_checkpoint_step_and_appending_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in range(1, 6):
        log.append({"step": step, "run": "first"})
    assert log.cut_after(3) == 2
    log.append({"step": 4, "run": "second"})
    log.close()
    assert [(row["step"], row["run"]) for row in strict_rows(path)] == [
        (1, "first"),
        (2, "first"),
        (3, "first"),
        (4, "second"),
    ]
    assert log.cut_after(-1) == 4 and path.read_text() == ""


def test_cutting_a_log_that_is_not_there_is_no_error(tmp_path):
    assert MetricsLog(tmp_path / "metrics.jsonl").cut_after(7) == 0
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', "\0\0\0", "42", '{"step": 3}{"step'])
def test_a_torn_last_line_is_dropped_by_cutting_and_by_appending(tmp_path, torn):
    whole = '{"step": 1}\n{"step": 2}\n'
    for method in ("cut_after", "append"):
        path = tmp_path / f"{method}.jsonl"
        path.write_text(whole + torn)
        with MetricsLog(path) as log:
            if method == "cut_after":
                log.cut_after(2)
            log.append({"step": 3, "new": True})
        assert strict_rows(path) == [{"step": 1}, {"step": 2}, {"step": 3, "new": True}]


def test_a_failed_replacement_leaves_the_old_file_and_no_temporary(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text("old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("odd", ['{"step": "3"}', '{"step": null}', '{"loss": 1.0}', "[" * 100_000, "1" * 5000])
def test_a_line_that_is_no_row_of_a_step_goes_when_the_log_is_cut(tmp_path, odd):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{odd}\n{{"step": 2}}\n{{"step": 3}}\n')
    MetricsLog(path).cut_after(2)
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


def test_a_full_disk_is_told_with_the_file():
    log = MetricsLog("/dev/full")
    log._file = open("/dev/full", "w")
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        log.append({"step": 1})


def test_rows_that_find_no_space_wait_for_it(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append({"step": 1})
    log._file = open("/dev/full", "w")
    with pytest.raises(OSError, match="No space left on device: '.*metrics.jsonl'"):
        log.append({"step": 2})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": ')  # what of the row has found space
    log.append({"step": 3})
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == ['{"step": 1}', '{"step": 2}', '{"step": 3}']


def test_a_failed_replacement_is_told_with_the_file(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'latest'}'"):
        replace_file(tmp_path / "latest", "step_00000003")
