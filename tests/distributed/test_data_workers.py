"""Runs whose rows are read ahead by processes: equal to runs without them, bit for bit, and clean when they end."""

import contextlib
import multiprocessing
import os
import signal
import statistics
import subprocess
import time
from pathlib import Path

import pytest
import torch

from megatron_fbt.analysis.tasks import TASKS, write_rows
from megatron_fbt.config.feedback import PassPhase, PrefixConfig
from megatron_fbt.training.metrics import read_metrics
from tests.distributed.launch import run_distributed
from tests.distributed.run_case import STEPS, checkpoint_of, rows_of, run, run_config, stop_before
from tests.distributed.test_rewind import BAD, OPTIONS, Data
from tests.distributed.test_stops_and_owners import launch, wait_until

LENGTH = 16
COT5 = TASKS["cot5"]
VALIDATED = {"training__eval_iters": 1, "training__eval_interval": 5}
ROW_S = 0.01
"""Time that a slow row takes."""


class SlowRows:
    """Rows that take their time."""

    def __init__(self, rows):
        self.rows, self.sequence_length, self.marked = rows, rows.sequence_length, rows.marked

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        time.sleep(ROW_S)
        return self.rows[index]


def labelled(folder, name, layout=(1, 1), **overrides):
    fields = {
        "data__format": "labelled",
        "data__split": "9,1,0",
        "model__vocab_size": COT5.vocab_size,
        "model__hidden_dropout": 0.1,
        "feedback__schedule": [PassPhase(0.0, {2: 1.0})],
        "feedback__prefix": PrefixConfig(granularity="prompt"),
        "checkpoint__save_interval": 5,
        **VALIDATED,
        **overrides,
    }
    return run_config(Path(folder) / name, str(Path(folder) / "rows.jsonl"), layout, **fields)


def run_labelled(*arguments, hook=None, **overrides):
    from megatron_fbt.data.token_ids import run_tokenizer

    config = labelled(*arguments, **overrides)
    config.data.tokenizer.path = None
    outcome = run(config, hook, run_tokenizer(config))
    assert not multiprocessing.active_children(), "workers end with the run"
    return outcome


def rewound_and_stopped(folder):
    """Bad rows, rewinds, validation, dropout and a growing batch; the stopped run goes on with other workers."""
    with Data(BAD):
        assert run_labelled(folder, "unbroken", **OPTIONS) == "finished"
    with Data(BAD):
        outcome = run_labelled(folder, "stopped", hook=stop_before(4), **OPTIONS, data__num_workers=2)
        assert outcome == "StoppedBySignal"
        assert run_labelled(folder, "stopped", **OPTIONS, data__num_workers=1) == "finished"


def waits_of_slow_rows(folder):
    from megatron_fbt.training import session

    plain = session.build_datasets

    def slow(*arguments):
        found = plain(*arguments)
        found.train = SlowRows(found.train)
        return found

    session.build_datasets = slow
    for workers in (0, 2):
        options = {"training__train_steps": 6, "training__rampup_batch_size": None, "data__num_workers": workers}
        assert run_labelled(folder, f"slow{workers}", hook=lambda trainer: time.sleep(0.15), **options) == "finished"


def alone(rank, world_size, folder):
    rewound_and_stopped(folder)
    waits_of_slow_rows(folder)


def kill_workers(trainer):
    if trainer.state.step + 1 == 7:
        for process in multiprocessing.active_children():
            os.kill(process.pid, signal.SIGKILL)


def in_layout(rank, world_size, folder, layout):
    assert run_labelled(folder, f"{layout}", layout) == "finished"
    if layout[0] == 1:
        assert run_labelled(folder, "pipeline", layout, data__num_workers=2) == "finished"
        return
    began = time.monotonic()
    assert run_labelled(folder, "killed", layout, hook=kill_workers, data__num_workers=2) == "DataError"
    assert time.monotonic() - began < 30
    assert run_labelled(folder, "killed", layout, data__num_workers=1) == "finished"


def equal_runs(folder, name, other):
    assert rows_of(folder / name) == rows_of(folder / other) and len(rows_of(folder / name)) == STEPS
    found, expected = checkpoint_of(folder / name, STEPS), checkpoint_of(folder / other, STEPS)
    return [key for key in expected if not torch.equal(found[key], expected[key])] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workers")
    write_rows(COT5.rows(60, LENGTH, torch.Generator().manual_seed(1)), folder / "rows.jsonl")
    return folder


def test_rows_read_ahead_are_those_of_a_run_without_workers_and_waiting_ends(folder):
    run_distributed(alone, 1, str(folder), timeout=300, init_group=False)
    assert equal_runs(folder, "stopped", "unbroken") and rows_of(folder / "unbroken")[-1]["rewinds"] == 1
    rows = {workers: read_metrics(folder / f"slow{workers}" / "metrics.jsonl") for workers in (0, 2)}
    waits = {workers: [row["data_wait_s"] for row in found] for workers, found in rows.items()}
    assert min(waits[0]) >= 8 * ROW_S and statistics.median(waits[2][1:]) < 4 * ROW_S
    for row in rows[0]:
        assert row["data_wait_share"] == pytest.approx(row["data_wait_s"] / row["seconds"]) and row["seconds"] > 0.15


@pytest.mark.slow
def test_workers_of_a_tensor_parallel_group_die_for_all_its_ranks(folder):
    run_distributed(in_layout, 2, str(folder), (2, 1), timeout=300, init_group=False)
    assert equal_runs(folder, "killed", "(2, 1)")


@pytest.mark.slow
def test_every_stage_of_a_pipeline_reads_ahead(folder):
    run_distributed(in_layout, 2, str(folder), (1, 2), timeout=300, init_group=False)
    assert equal_runs(folder, "pipeline", "(1, 2)")


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 75), (signal.SIGTERM, 75), (signal.SIGKILL, None)])
def test_a_signal_to_all_processes_at_once_leaves_none_behind_and_makes_no_noise(tmp_path, repository, number, code):
    launcher = launch(tmp_path, repository, processes=1, own_session=True, data__num_workers=2)
    try:
        wait_until(lambda: len(rows_of(tmp_path / "run")) >= 3, launcher)
        if number == signal.SIGKILL:  # of the training process alone, as for lack of memory
            os.kill(int((tmp_path / "pid.0").read_text()), number)
        else:
            os.killpg(launcher.pid, number)
        output, errors = launcher.communicate(timeout=100)
        assert launcher.returncode == code or code is None and launcher.returncode not in (0, 75), errors
        assert "Traceback" not in output + errors
        # What a killed process leaves behind is cleaned up, and told, by Python's resource tracker.
        assert number == signal.SIGKILL or "leaked" not in errors
        deadline = time.monotonic() + 15
        while group_lives(launcher.pid):
            assert time.monotonic() < deadline, subprocess.run(["ps", "-ef"], capture_output=True, text=True).stdout
            time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)


def group_lives(leader):
    """Whether a process group has any process left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, 0)
        return True
    return False
