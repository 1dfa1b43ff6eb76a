"""The screen about a run: what status.json, the lease, the starts and the queue say."""

import json
import re
import time

import pytest

from megatron_fbt.errors import ConfigError
from megatron_fbt.slurm import run_status
from megatron_fbt.slurm.run_status import collect, describe
from megatron_fbt.slurm.starts import Start, note_submission, write_start
from megatron_fbt.training.lease import Lease
from megatron_fbt.training.status import write_status

QUEUE = 'echo "7|RUNNING|1:02:03|1-00:00:00|n[1-2]"'


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run folder; no SLURM."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def running(folder, **fields):
    reached = {"step": 1200, "loss": 2.5, "tokens": 10**6, "last_checkpoint": "step_00001000"}
    write_status(
        folder / "status.json", **{"state": "running", "train_steps": 5000, "eta_s": 3700.0, **reached, **fields}
    )


def squeue(folder, text):
    tool = folder.parent / "bin" / "squeue"
    tool.write_text(f"#!/bin/sh\n{text}\n")
    tool.chmod(0o755)


def test_a_running_run(run):
    running(run)
    report = collect(str(run))
    assert (report["step"], report["silent"], report["queue"], report["alarm"]) == (1200, False, None, None)
    text = describe(report)
    assert "running" in text and "1,200 of 5,000, loss 2.5000" in text and "1h01m" in text
    assert "step_00001000" in text and "queue            not asked" in text


def test_the_newest_checkpoint_is_what_the_folder_says(run):
    running(run)
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "latest").write_text("step_00001100\n")
    assert collect(str(run))["last_checkpoint"] == "step_00001100"


def test_the_queue_and_the_starts_of_the_last_job(run):
    running(run)
    squeue(run, QUEUE)
    write_start(run, Start("6", 0, 10.0, None, 20.0, 2, None, "end"))
    write_start(run, Start("7", 0, 100.0, None))
    write_start(run, Start("7", 0, 100.0, None, 3700.0, 75, "step_00000500", "0"))
    write_start(run, Start("7", 1, 3800.0, "step_00000500"))
    report = collect(str(run))
    assert report["queue"] == [
        {"job": "7", "state": "RUNNING", "time": "1:02:03", "limit": "1-00:00:00", "where": "n[1-2]"}
    ]
    lines = describe(report).splitlines()
    assert "queue            job 7 RUNNING, 1:02:03 of 1-00:00:00, n[1-2]" in lines
    assert lines[-2:] == [
        "start 1          of job 7, 1h00m: exit code 75, step_00000500; back into the queue, 0 s",
        "start 2          of job 7, from step_00000500: has not ended",
    ]


@pytest.mark.parametrize(
    "script, found", [("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", []), ("exit 1", None)]
)
def test_a_job_that_the_queue_has_forgotten(run, script, found):
    running(run)
    squeue(run, script)
    write_start(run, Start("7", 0, 100.0, None))
    assert collect(str(run))["queue"] == found


def test_who_holds_the_folder(run, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    running(run)
    lease = Lease(run, 60.0)
    assert lease.try_to_take() is None
    try:
        report = collect(str(run))
    finally:
        lease.release()
    assert report["holder"]["job"] == "9" and not report["holder"]["lapsed"]
    assert "held by          job 9, pid" in describe(report) and "s ago\n" in describe(report)


def test_a_lease_of_a_wrong_clock(run):
    running(run)
    fields = {"token": "t", "job": None, "host": "n1", "pid": 5, "process": "", "time": time.time() + 7200.5}
    (run / "lease.json").write_text(json.dumps({**fields, "seconds": 60.0}))
    assert re.search(r"held by +pid 5 on n1, renewed 7200 s from now \(clock\?\)\n", describe(collect(str(run))))


def test_a_silent_and_a_failed_run_raise_an_alarm(run):
    running(run, time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 3600)))
    report = collect(str(run))
    assert report["silent"] and "1h00m" in report["alarm"] and "(silent)" in describe(report)
    running(run, state="failed")
    assert collect(str(run))["alarm"] == "the run has failed"


@pytest.mark.parametrize(
    "written, line",
    [
        (3 * 3600 + 330, "written          3h05m from now (clock?)"),
        ("yesterday", "written          at 'yesterday' (clock?)"),
        (None, "written          at an unknown time"),
        (["2026"], "written          at ['2026'] (clock?)"),
    ],
)
def test_a_time_that_cannot_be_is_said(run, written, line):
    if isinstance(written, int):
        written = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + written))
    running(run, time=written)
    report = collect(str(run))
    assert line in describe(report).splitlines() and not report["silent"]
    assert json.dumps(report, allow_nan=False)


def test_a_start_that_ended_before_it_began(run):
    write_start(run, Start("7", 0, 1000.0, None, 400.0, 75, "step_00000500", "0"))
    assert "start 1          of job 7, clock?: exit code 75" in describe(collect(str(run)))


ODD = "a\x1b[31mb\nc\x07\u202e\udc80"


def test_control_characters_of_stored_texts_reach_no_terminal(run):
    running(run, state=ODD, last_checkpoint=ODD, time=ODD)
    write_start(run, Start(ODD, 0, 100.0, ODD, 200.0, 75, ODD, ODD))
    write_start(run, Start(ODD, 1, 300.0, ODD))
    squeue(run, "printf '7|RUN\\033NING|\\377|1|n[1-2]\\n'")
    text = describe(collect(str(run)))
    assert all(line.isprintable() for line in text.splitlines())
    assert r"a\x1b[31mb\nc\x07\u202e\udc80" in text and "RUN\\x1bNING" in text


def test_before_the_first_step_there_are_starts_alone(run):
    write_start(run, Start("7", 0, 100.0, None))
    assert collect(str(run))["state"] == "waiting"


@pytest.mark.parametrize("code, alarm", [(3, "exit code 3"), (69, "exit code 69"), (75, None), (0, None)])
def test_a_job_that_gave_up_before_the_first_step_has_failed(run, code, alarm):
    write_start(run, Start("7", 0, 100.0, None, 200.0, code, None, "end"))
    report = collect(str(run))
    assert report["alarm"] == (alarm and f"the run has failed: {alarm}")
    assert report["state"] == {75: "stopped", 0: "finished"}.get(code, "failed")


def test_a_job_that_waits_for_its_first_start_is_found_in_the_queue(run):
    squeue(run, 'echo "42|PENDING|0:00|1:00:00|(Priority)"')
    note_submission(run, "42")
    report = collect(str(run))
    assert (report["state"], report["alarm"]) == ("waiting", None)
    assert "queue            job 42 PENDING, 0:00 of 1:00:00, (Priority)" in describe(report)


GONE = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


@pytest.mark.parametrize("queue", [GONE, 'echo "42|FAILED|0:01|1:00:00|(NonZeroExitCode)"'])
def test_a_job_that_is_over_without_a_start_has_failed(run, queue):
    squeue(run, queue)
    note_submission(run, "42")
    report = collect(str(run))
    assert (report["state"], report["alarm"]) == ("failed", "job 42 is over and has not started: see its log")


@pytest.mark.parametrize("begun", [False, True])
def test_a_start_without_an_end_whose_job_is_over_has_failed(run, begun):
    if begun:
        running(run)
    squeue(run, 'echo "7|CANCELLED|0:01|1:00:00|n1"')
    write_start(run, Start("7", 0, 100.0, None))
    report = collect(str(run))
    assert (report["state"], report["alarm"]) == ("failed", "job 7 is over and its start 1 has no end: see its log")


def test_a_job_that_runs_before_the_first_step_is_starting(run):
    squeue(run, QUEUE)
    write_start(run, Start("7", 0, 100.0, None))
    assert collect(str(run))["state"] == "starting"


def test_a_job_that_slurm_took_away_is_not_said_to_be_back_in_the_queue(run):
    squeue(run, GONE)
    write_start(run, Start("7", 0, 100.0, None, 200.0, 75, "step_00000500", "COMPLETING"))
    report = collect(str(run))
    assert report["state"] == "stopped"
    assert describe(report).splitlines()[-1].endswith("step_00000500; not put back into the queue, it was COMPLETING")


@pytest.mark.parametrize("odd", ["text", None, [1], float("nan"), True])
def test_fields_of_other_types_are_shown_as_unknown(run, odd):
    for name in ("step", "train_steps", "tokens", "loss", "eta_s"):
        running(run, **{name: odd})
        report = collect(str(run))
        assert report[name] is None and json.dumps(report, allow_nan=False) and describe(report)


@pytest.mark.parametrize("content", [None, "{", json.dumps([1])])
def test_what_is_no_run_is_refused(run, content):
    if content is not None:
        (run / "status.json").write_text(content)
    with pytest.raises(ConfigError, match="name the folder of a run"):
        collect(str(run))
    for name in ("nothing", "x" * 5000, "a\0b"):
        with pytest.raises(ConfigError, match="no such folder"):
            collect(str(run / name))


def test_queue_of_without_slurm(run):
    assert run_status.queue_of("7") is None
