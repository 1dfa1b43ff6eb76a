"""Whether a job goes on: every exit code, the restart budget and its back-off, the reason in the last line."""

import json

import pytest

from megatron_fbt.errors import FBTError
from megatron_fbt.slurm.job import RequeueConfig
from megatron_fbt.slurm.requeue import MEANINGS, decide, last_error, main
from megatron_fbt.slurm.starts import Start, read_starts

BUDGET = RequeueConfig(max_failures=3, max_restarts=None, backoff_s=60)


def starts(*progress, first=0):
    """Starts of a job; True = it wrote a checkpoint."""
    return [Start("7", first + i, 0.0, f"step_{i}", reached=f"step_{i + done}") for i, done in enumerate(progress)]


def test_a_finished_run_does_not_go_on():
    assert decide(0, "USR1", starts(True), BUDGET).word == "end"


@pytest.mark.parametrize("code", [2, 3, 4, 5, 69])
def test_what_another_start_would_not_mend_ends_the_job(code):
    verdict = decide(code, "", starts(True), BUDGET)
    assert verdict.word == "end" and f"failed: exit code {code}, {MEANINGS[code]}" in verdict.reason


def test_every_final_error_has_a_meaning():
    codes = {error.exit_code for error in FBTError.__subclasses__() if error.__module__ == FBTError.__module__}
    assert codes - {75} == set(MEANINGS) - {69}


def test_a_warned_run_that_saved_goes_on_at_once():
    verdict = decide(75, "USR1", starts(True), BUDGET)
    assert verdict.word == "0" and "step_1" in verdict.reason


def test_a_run_that_was_stopped_otherwise_stays_stopped():
    assert decide(75, "", starts(True), BUDGET).word == "end"


@pytest.mark.parametrize("code", [1, 137, 134])
def test_failures_wait_longer_each_time_and_then_end(code):
    words = [decide(code, "", starts(*[False] * count), BUDGET).word for count in (1, 2, 3, 4)]
    assert words == ["60", "120", "end", "end"]
    reason = decide(code, "", starts(*[False] * 3), BUDGET).reason
    assert "restart budget exhausted: 3 starts in a row" in reason and f"exit code {code}" in reason


def test_back_off_ends_at_an_hour():
    assert decide(1, "", starts(*[False] * 20), RequeueConfig(max_failures=99, backoff_s=60)).word == "3600"


def test_a_new_checkpoint_gives_the_budget_back():
    assert decide(1, "", starts(False, False, True), BUDGET).word == "60"
    assert decide(1, "", starts(False, False, True, False), BUDGET).word == "60"


def test_a_warned_run_that_never_gets_further_ends_too():
    assert [decide(75, "USR1", starts(*[False] * n), BUDGET).word for n in (1, 3)] == ["60", "end"]
    long = RequeueConfig(max_failures=3, backoff_s=7200)
    assert [decide(1, "", starts(found), long).word for found in (True, False)] == ["3600", "3600"]
    assert "ended by USR1 before it could save" in decide(138, "USR1", starts(False), BUDGET).reason


def test_a_limit_of_all_restarts():
    budget = RequeueConfig(max_failures=3, max_restarts=2, backoff_s=60)
    assert decide(75, "USR1", starts(True, True), budget).word == "0"
    verdict = decide(75, "USR1", starts(True, True, True), budget)
    assert verdict.word == "end" and "requeue.max_restarts" in verdict.reason


@pytest.mark.parametrize("code", [75, 143])
def test_a_job_that_slurm_has_taken_away_is_not_said_to_go_on(code):
    verdict = decide(code, "TERM", starts(True), BUDGET, "COMPLETING")
    assert (
        verdict.word == "COMPLETING"
        and "not put back into the queue" in verdict.reason
        and "goes on" not in verdict.reason
    )
    assert decide(code, "TERM", starts(True), BUDGET, "RUNNING").word.isdecimal()
    assert decide(0, "TERM", starts(True), BUDGET, "COMPLETING").word == "end"


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Calls the command as the job script does; what it printed."""

    def call(job, restart, when, *options):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restart))
        assert main([when, "--run_dir", str(tmp_path), *options]) == 0
        return capsys.readouterr()

    return call


def checkpoint(folder, name):
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / "latest").write_text(f"{name}\n")


def test_starts_are_kept_beside_the_run_and_counted_by_job(tmp_path, command):
    assert command("7", 0, "begin").out == "== job 7, start 1\n"
    checkpoint(tmp_path, "step_00000010")
    assert command("7", 0, "end", "--exit_code", "75", "--warned", "USR1").out == "0\n"
    for restart, word in ((1, "60"), (2, "120"), (3, "end")):
        command("7", restart, "begin")
        assert command("7", restart, "end", "--exit_code", "1").out == f"{word}\n"
    command("8", 0, "begin")
    assert command("8", 0, "end", "--exit_code", "1").out == "60\n"
    found = read_starts(tmp_path, "7")
    assert [start.verdict for start in found] == ["0", "60", "120", "end"]
    assert [start.progressed for start in found] == [True, False, False, False]


def test_the_script_is_told_to_end_and_the_state_is_kept(tmp_path, command):
    command("7", 0, "begin")
    assert command("7", 0, "end", "--exit_code", "75", "--warned", "TERM", "--state", "CANCELLED").out == "end\n"
    assert read_starts(tmp_path)[0].verdict == "CANCELLED"


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path, command):
    command("7", 0, "begin")
    with open(tmp_path / "slurm" / "starts.jsonl", "a") as file:
        file.write('{"job": "7", "rest\n' + json.dumps({"job": "7"}) + "\n")
    assert len(read_starts(tmp_path, "7")) == 1


ODD_LINES = ['{"job": [1]}', '"restart": "x"', "[" * 100_000, "null", "3", '{"job": "7", "restart": 0, "began": "x"}']


@pytest.mark.parametrize("line", [*ODD_LINES, '{"job": "7", "restart": "x", "began": 1.0, "checkpoint": null}'])
def test_lines_of_another_hand_do_not_end_a_job(tmp_path, command, line):
    command("6", 0, "begin")
    command("7", 0, "begin")
    with open(tmp_path / "slurm" / "starts.jsonl", "a") as file:
        file.write(line + "\n")
    assert command("7", 0, "end", "--exit_code", "1").out == "60\n"
    assert [start.job for start in read_starts(tmp_path)] == ["7"]


def test_a_start_behind_a_torn_line_is_kept(tmp_path, command):
    command("7", 0, "begin")
    path = tmp_path / "slurm" / "starts.jsonl"
    path.write_text(path.read_text() + '{"job": "7", "rest')
    checkpoint(tmp_path, "step_00000010")
    command("7", 1, "begin")
    assert command("7", 1, "end", "--exit_code", "1").out == "120\n", "neither start wrote a checkpoint"
    assert [start.restart for start in read_starts(tmp_path, "7")] == [0, 1]


def test_a_lost_beginning_is_not_taken_for_progress(tmp_path, command):
    checkpoint(tmp_path, "step_00000010")
    command("7", 0, "begin")
    command("7", 0, "end", "--exit_code", "1")
    assert command("7", 1, "end", "--exit_code", "1").out == "120\n"


def test_a_start_of_the_future_is_not_this_one(tmp_path, command):
    command("7", 0, "begin")
    with open(tmp_path / "slurm" / "starts.jsonl", "a") as file:
        file.write(json.dumps({"job": "7", "restart": 99, "began": 1.0, "checkpoint": None}) + "\n")
    assert command("7", 0, "end", "--exit_code", "1", "--max_restarts", "5").out == "60\n"


def test_the_last_line_says_why(tmp_path, command):
    log = tmp_path / "log"
    log.write_text(
        "== job 7, start 1\nerror: an older one\n== job 7, start 2\nTraceback (most recent call last):\n"
        "ValueError: not this one\nerror: data.paths = []: no data set\nsrun: error: n1: task 0: Exited\n"
    )
    command("7", 1, "begin")
    printed = command("7", 1, "end", "--exit_code", "2", "--log", str(log))
    assert printed.err.splitlines() == [
        "last error: error: data.paths = []: no data set",
        "job 7: failed: exit code 2, configuration or command line; starting again would not help",
    ]
    assert last_error(log, "== job 9, start 1") is not None and last_error(tmp_path / "none", "x") is None


@pytest.mark.parametrize(
    "text, found",
    [
        ("half a lineerror: no data set\nsrun: error: n1: task 0: Exited\n", "error: no data set"),
        ("srun: error: n1: task 0: Exited\n", None),
        ("half a lineerror: no data set\nerror: the last whole one\n", "error: the last whole one"),
    ],
)
def test_an_error_behind_half_a_line_of_another_task_is_found(tmp_path, text, found):
    (tmp_path / "log").write_text(f"== job 7, start 1\n{text}")
    assert last_error(tmp_path / "log", "== job 7, start 1") == found


@pytest.mark.parametrize(
    "restart, options, part",
    [
        ("many", [], "SLURM_RESTART_COUNT = 'many'"),
        ("-1", [], "SLURM_RESTART_COUNT = '-1'"),
        ("0", ["--backoff_s", "-5"], "--backoff_s = -5"),
        ("0", ["--max_failures", "0"], "--max_failures = 0"),
        ("0", ["--max_restarts", "-1"], "--max_restarts = -1"),
        ("0", ["--run_dir", __file__], "slurm/starts.jsonl: cannot be written"),
        ("0", ["--run_dir", ""], "--run_dir '': empty"),
    ],
)
@pytest.mark.parametrize("when", ["begin", "end"])
def test_what_makes_no_sense_is_one_line(tmp_path, monkeypatch, capsys, when, restart, options, part):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
    assert main([when, "--run_dir", str(tmp_path), *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    assert printed.err.startswith("error: ") and part in printed.err and "; " in printed.err
    assert list(tmp_path.iterdir()) == []
