"""Signals to any process of a run, the second one, and runs that meet in one folder; real processes."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from megatron_fbt.config.load import dump_yaml
from megatron_fbt.training.lease import LEASE
from tests.distributed.run_case import rows_of, run_config, write_corpus

pytestmark = pytest.mark.slow
WORKER = """
import os, sys, time
from pathlib import Path
from megatron_fbt import pretrain
from tests.distributed.run_case import VOCAB
from tests.unit.data.corpus import PlainTokenizer

def write(planned):
    Path(sys.argv[1]).with_name("saving").touch()
    time.sleep(600)

if __name__ == "__main__":  # processes that read data ahead import this file
    pretrain.run_tokenizer = lambda config: PlainTokenizer(VOCAB)
    Path(sys.argv[1]).with_name(f"pid.{os.environ['RANK']}").write_text(str(os.getpid()))
    if sys.argv[2:] == ["hang"]:
        from megatron_fbt.core.checkpoint_write import PlannedSave
        PlannedSave.write = write
    sys.exit(pretrain.main(["--config", sys.argv[1]]))
"""


@pytest.fixture
def start(tmp_path, repository):
    """Starts runs, whose processes are ended with the test."""
    launchers = []

    def begin(folder, *arguments, **settings):
        launchers.append(launch(folder, repository, *arguments, **settings))
        return launchers[-1]

    yield begin
    for launcher in launchers:
        launcher.kill()
    for file in tmp_path.glob("pid.*"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGKILL)
    for launcher in launchers:
        launcher.communicate()  # ends with the last process that holds the pipes


def launch(folder, repository, *arguments, processes=2, own_session=False, **settings):
    """A long run under the launcher; without a corpus, one is made. In its own session, it leads a process group."""
    if not (folder / "corpus.idx").exists():
        write_corpus(folder)
    layout = (1, processes)
    options = {"training__train_steps": 100_000, "checkpoint__lease_seconds": 6.0, **settings}
    (folder / "config.yaml").write_text(
        dump_yaml(run_config(folder / "run", str(folder / "corpus"), layout, **options))
    )
    (folder / "worker.py").write_text(WORKER)
    command = [sys.executable, "-m", "megatron_fbt.launch", "--nproc_per_node", str(processes)]
    command += [str(folder / "worker.py"), str(folder / "config.yaml"), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    environment.update(PYTHONPATH=str(repository), OMP_NUM_THREADS="1")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": own_session}
    # Tests that run in the background of a shell ignore SIGINT, and what they start would, too.
    interruptible = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, text=True, env=environment, preexec_fn=interruptible, **pipes)


def wait_until(condition, launcher, seconds=150):
    deadline = time.monotonic() + seconds
    while not condition():
        assert launcher.poll() is None and time.monotonic() < deadline, launcher.communicate()
        time.sleep(0.1)


def status_of(folder):
    return json.loads((folder / "run" / "status.json").read_text())


@pytest.mark.parametrize(
    "number, target",
    [(signal.SIGINT, "launcher"), (signal.SIGUSR1, "launcher"), (signal.SIGUSR1, 0), (signal.SIGTERM, 1)],
)
def test_a_signal_to_any_process_saves_once_and_leaves(tmp_path, start, number, target):
    launcher = start(tmp_path)
    wait_until(lambda: len(rows_of(tmp_path / "run")) >= 2, launcher)
    pid = launcher.pid if target == "launcher" else int((tmp_path / f"pid.{target}").read_text())
    os.kill(pid, number)
    output, errors = launcher.communicate(timeout=150)
    assert launcher.returncode == 75, errors
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().strip() == checkpoint.name
    status = status_of(tmp_path)
    assert (status["state"], status["last_checkpoint"]) == ("stopped", checkpoint.name)
    assert len(rows_of(tmp_path / "run")) == status["step"] == int(checkpoint.name[5:])
    assert output.count("stopped by") == 1 and not (tmp_path / "run" / LEASE).exists()


def test_a_second_signal_leaves_at_once_without_waiting_for_the_save(tmp_path, start):
    launcher = start(tmp_path, "hang")
    wait_until(lambda: len(rows_of(tmp_path / "run")) >= 2, launcher)
    launcher.send_signal(signal.SIGTERM)
    wait_until(lambda: (tmp_path / "saving").exists(), launcher)
    time.sleep(1.5)
    began = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=100)
    assert launcher.returncode == 128 + signal.SIGKILL and time.monotonic() - began < 60
    assert (
        not list((tmp_path / "run" / "checkpoints").glob("step_*"))
        and not (tmp_path / "run" / "checkpoints" / "latest").exists()
    )


def test_a_second_run_in_the_folder_is_refused_and_the_successor_of_a_killed_one_starts(tmp_path, start):
    settings = {"processes": 1, "checkpoint__save_interval": 20, "checkpoint__keep_last": 2}
    first = start(tmp_path, **settings)
    wait_until(lambda: (tmp_path / "run" / "checkpoints" / "latest").exists(), first)
    owner = int((tmp_path / "pid.0").read_text())
    second = start(tmp_path, **settings)
    _, errors = second.communicate(timeout=150)
    assert second.returncode == 4 and "is in use by another run" in errors and f"pid {owner}" in errors
    assert first.poll() is None and status_of(tmp_path)["state"] == "running"
    os.kill(first.pid, signal.SIGKILL)
    os.kill(owner, signal.SIGKILL)
    first.communicate()
    assert (tmp_path / "run" / LEASE).exists(), "it was left behind"
    successor = start(tmp_path, **settings)
    wait_until(lambda: status_of(tmp_path)["pid"] == int((tmp_path / "pid.0").read_text()) != owner, successor)
    wait_until(lambda: status_of(tmp_path)["step"] > 20, successor)
    successor.send_signal(signal.SIGTERM)
    output, errors = successor.communicate(timeout=150)
    assert successor.returncode == 75 and "resuming from" in output, errors
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
