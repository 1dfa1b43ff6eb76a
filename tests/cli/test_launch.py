"""The launcher: exit codes, time to save after a signal, nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_fbt.launch import build_parser, choose_exit_code, main
from megatron_fbt.training.signals import ECHO_SECONDS

ROOT = Path(__file__).resolve().parents[2]
WORKER = """
import os, signal, subprocess, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
received = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: received.append(signal.Signals(number).name))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(folder / f"ready.{rank}").write_text(f"{os.getpid()} {child.pid}")

def wait_for(path):
    while not path.exists():
        time.sleep(0.02)

"""
SAVES_WHEN_ASKED = """
while not received:
    time.sleep(0.02)
time.sleep(1.0 * rank)
(folder / f"saved.{rank}").write_text(" ".join(received))
sys.exit(75)
"""
WATCHES = """
from megatron_fbt.training.signals import SignalWatcher
with SignalWatcher() as watcher:
    (folder / f"watches.{rank}").touch()
    wait_for(folder / "step is over")
    sys.exit(75 if watcher.requested else 1)
"""
IGNORES = """
time.sleep(600)
"""
FAILS_ON_RANK_1 = """
wait_for(folder / f"ready.{1 - rank}")
if rank == 1:
    code = int(sys.argv[2])
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)
while not received:
    time.sleep(0.02)
sys.exit(1)
"""
ENDS = "sys.exit(0)\n"


def start(folder, body, *arguments, options=()):
    script = folder / "worker.py"
    script.write_text(WORKER + body)
    command = [sys.executable, "-m", "megatron_fbt.launch", "--nproc_per_node", "2", *options]
    command += [str(script), str(folder), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for_files(folder, launcher, name):
    deadline = time.monotonic() + 60
    while not all((folder / f"{name}.{rank}").exists() for rank in (0, 1)):
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def wait_until_ready(folder, launcher):
    wait_for_files(folder, launcher, "ready")
    time.sleep(0.3)


def runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def end(folder, launcher):
    """Exit code and standard error; every process that the workers were or started must be gone."""
    _, errors = launcher.communicate(timeout=60)
    processes = [int(pid) for ready in folder.glob("ready.*") for pid in ready.read_text().split()]
    assert len(processes) == 4
    deadline = time.monotonic() + 5
    while any(map(runs, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list(filter(runs, processes))
    return launcher.returncode, errors


@pytest.mark.parametrize(
    "codes, expected",
    [
        ([], 0),
        ([3], 3),
        ([75, 75], 75),
        ([1, 3], 3),
        ([75, 4], 4),
        ([1, 75], 75),
        ([75, -6], 75),
        ([-9, 1], 137),
        ([-15, -15], 143),
        ([1, -15], 1),
    ],
)
def test_choice_among_the_workers_codes(codes, expected):
    assert choose_exit_code(codes) == expected


def test_workers_that_finish_give_zero(tmp_path):
    assert end(tmp_path, start(tmp_path, ENDS))[0] == 0


@pytest.mark.parametrize("code, expected", [(3, 3), (-signal.SIGKILL, 137)])
def test_a_failed_worker_gives_its_code_and_ends_the_others(tmp_path, code, expected):
    body = FAILS_ON_RANK_1
    exit_code, errors = end(tmp_path, start(tmp_path, body, str(code)))
    assert exit_code == expected
    assert ("rank 1 (pid" in errors) and ("was ended by SIGKILL" if code < 0 else f"exit code {code}") in errors


def test_an_error_is_told_even_if_the_first_rank_is_the_last_to_find_it(tmp_path):
    slow = "import os, time\nif os.environ.get('LOCAL_RANK') == '0':\n    time.sleep(2)\n"
    (tmp_path / "sitecustomize.py").write_text(slow)
    command = [sys.executable, "-m", "megatron_fbt.launch", "--nproc_per_node", "2", "-m", "megatron_fbt.pretrain"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ended = subprocess.run([*command, "--config", "none.yaml"], env=environment, capture_output=True, timeout=60)
    assert ended.returncode == 2 and ended.stderr.count(b"error: --config none.yaml: no such file") == 1, ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_signal_reaches_every_worker_once_and_all_may_save(tmp_path, number):
    launcher = start(tmp_path, SAVES_WHEN_ASKED)
    wait_until_ready(tmp_path, launcher)
    launcher.send_signal(number)
    exit_code, errors = end(tmp_path, launcher)
    assert exit_code == 75
    assert [(tmp_path / f"saved.{rank}").read_text() for rank in (0, 1)] == [number.name] * 2
    assert f"passing {number.name} on" in errors and "600 s" in errors
    assert "same command goes on" in errors and "failed" not in errors


def start_watching(folder):
    """A launcher whose workers watch their signals, and the workers' process ids."""
    launcher = start(folder, WATCHES)
    wait_until_ready(folder, launcher)
    wait_for_files(folder, launcher, "watches")
    return launcher, [int((folder / f"ready.{rank}").read_text().split()[0]) for rank in (0, 1)]


def test_a_warning_that_a_rank_has_already_never_ends_it_however_late_the_launcher_is(tmp_path):
    launcher, workers = start_watching(tmp_path)
    for number in (signal.SIGUSR1, signal.SIGTERM):  # as srun does
        os.kill(workers[0], number)
    time.sleep(ECHO_SECONDS + 0.1)
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
        launcher.send_signal(number)
    time.sleep(ECHO_SECONDS + 0.1)
    launcher.send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    (tmp_path / "step is over").touch()
    exit_code, errors = end(tmp_path, launcher)
    assert exit_code == 75 and "was ended by" not in errors, errors


def test_a_second_request_to_the_launcher_ends_the_workers_at_once(tmp_path):
    launcher, _ = start_watching(tmp_path)
    launcher.send_signal(signal.SIGINT)
    time.sleep(ECHO_SECONDS + 0.1)
    launcher.send_signal(signal.SIGTERM)
    exit_code, errors = end(tmp_path, launcher)
    assert exit_code == 137 and "SIGTERM after an earlier request: ending the workers" in errors, errors


def test_workers_that_do_not_leave_are_killed_after_the_grace_period(tmp_path):
    launcher = start(tmp_path, IGNORES, options=["--stop_grace_s", "1"])
    wait_until_ready(tmp_path, launcher)
    began = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    exit_code, errors = end(tmp_path, launcher)
    assert exit_code == 137 and "--stop_grace_s" in errors
    assert 1 <= time.monotonic() - began < 20


def test_arguments_after_the_script_are_the_workers_and_help_has_an_example(capsys):
    args = build_parser().parse_args(["--nproc_per_node", "4", "-m", "x.y", "--config", "a", "--stop_grace_s", "1"])
    assert (args.stop_grace_s, args.training_script, args.training_script_args) == (
        600.0,
        "x.y",
        ["--config", "a", "--stop_grace_s", "1"],
    )
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and "-m megatron_fbt.pretrain --config" in shown and "--stop_grace_s" in shown
