"""One run, one owner: in real processes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from megatron_fbt.errors import CheckpointError
from megatron_fbt.training import lease as lease_module
from megatron_fbt.training.lease import LEASE, Lease, is_gone, process_name

HOLD = """
import sys, time
from megatron_fbt.training.lease import Lease
lease = Lease(sys.argv[1], float(sys.argv[2]))
print(lease.try_to_take(), flush=True)
time.sleep(60)
"""
SECONDS = 1.5


@pytest.fixture
def holder(tmp_path, repository):
    environment = {**os.environ, "PYTHONPATH": str(repository), "SLURM_JOB_ID": "17"}
    command = [sys.executable, "-c", HOLD, str(tmp_path), str(SECONDS)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "None\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def take(lease, patience=30.0):
    """Like a run that starts: try until it is taken; what was said on the way."""
    said, deadline = [], time.monotonic() + patience
    while (waiting := lease.try_to_take()) is not None:
        said.append(waiting)
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return said


def test_a_second_run_is_refused_with_owner_and_age_while_the_first_one_lives(tmp_path, holder):
    with pytest.raises(
        CheckpointError, match=rf"in use by another run \(job 17, pid {holder.pid} on .*, renewed \d+ s ago"
    ):
        take(Lease(tmp_path, SECONDS))
    assert json.loads((tmp_path / LEASE).read_text())["pid"] == holder.pid


def test_the_successor_of_a_killed_run_on_another_machine_waits_until_the_lease_lapses(tmp_path, holder, monkeypatch):
    monkeypatch.setattr(lease_module, "is_gone", lambda process: False)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    began = time.time()
    renewed = json.loads((tmp_path / LEASE).read_text())["time"]
    successor = Lease(tmp_path, SECONDS)
    said = take(successor)
    assert time.time() - renewed > SECONDS and time.time() - began < 20
    assert f"is held by job 17, pid {holder.pid}" in said[0] and "lapses 1.5 s after its renewal" in said[0]
    successor.check()
    successor.release()
    assert os.listdir(tmp_path) == []


def test_on_the_same_machine_a_killed_process_is_known_to_be_gone(tmp_path, holder):
    name = json.loads((tmp_path / LEASE).read_text())["process"]
    assert name == process_name(holder.pid) and not is_gone(name)
    holder.send_signal(signal.SIGKILL)
    while not is_gone(name):  # also before its parent has noticed
        time.sleep(0.01)
    holder.wait()
    assert is_gone(name) and not is_gone("another-boot/" + name.partition("/")[2])
    successor = Lease(tmp_path, 1000.0)
    assert successor.try_to_take() is None
    successor.release()


def test_the_same_job_takes_over_at_once_and_the_old_process_stops(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    old, new = Lease(tmp_path, 1000.0), Lease(tmp_path, 1000.0)
    assert old.try_to_take() is None and new.try_to_take() is None
    new.check()
    with pytest.raises(CheckpointError, match=r"was taken over by another run \(job 17, .*; nothing more is written"):
        old.check()
    old.release()
    new.check()
    new.release()


def test_a_lease_is_renewed_and_given_back(tmp_path):
    lease = Lease(tmp_path, 0.3)
    assert lease.try_to_take() is None
    times = set()
    for _ in range(8):
        times.add(json.loads((tmp_path / LEASE).read_text())["time"])
        time.sleep(0.1)
    assert len(times) > 2
    lease.check()
    lease.release()
    lease.release()
    assert os.listdir(tmp_path) == []


def test_of_several_successors_one_gets_a_lapsed_lease(tmp_path):
    first = Lease(tmp_path, 1000.0)
    assert first.try_to_take() is None
    content = json.loads((tmp_path / LEASE).read_text())
    (tmp_path / LEASE).write_text(json.dumps({**content, "time": 0.0}))
    rivals = [Lease(tmp_path, 1000.0) for _ in range(4)]
    assert [rival.try_to_take() is None for rival in rivals] == [True, False, False, False]
    holder = rivals[1]._read()
    assert holder.token == rivals[0]._me.token and not rivals[1]._displace(first._me)
    rivals[0].check()
    rivals[0].release()


@pytest.mark.parametrize("content", ["", "{}", '{"pid": 3}', "[]"])
def test_what_is_no_lease_holds_nothing(tmp_path, content):
    (tmp_path / LEASE).write_text(content)
    lease = Lease(tmp_path, 1000.0)
    assert lease.try_to_take() is None
    lease.release()


GOOD = {"token": "a", "job": None, "host": "h", "pid": 1, "process": "", "time": 1e9, "seconds": 60.0}


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        json.dumps({**GOOD, "time": "yesterday"}),
        json.dumps({**GOOD, "time": None}),
        json.dumps({**GOOD, "time": 10**400}),
        json.dumps({**GOOD, "time": float("nan")}),
        json.dumps({**GOOD, "seconds": float("inf")}),
        json.dumps({**GOOD, "process": 5}),
    ],
)
def test_what_no_run_can_have_written_is_no_lease(tmp_path, content):
    (tmp_path / LEASE).write_text(content)
    lease = Lease(tmp_path, SECONDS)
    assert lease.try_to_take() is None
    lease.release()


def test_a_lease_that_cannot_be_read_is_not_taken_away_from_its_holder(tmp_path, monkeypatch):
    (tmp_path / LEASE).write_text(json.dumps({**GOOD, "time": time.time()}))

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(lease_module, "read_holder", refuse)
    with pytest.raises(CheckpointError, match=r"lease.json cannot be read: .*Permission denied.* another run may hold"):
        Lease(tmp_path, SECONDS).try_to_take()
    assert json.loads((tmp_path / LEASE).read_text())["token"] == "a"


@pytest.mark.parametrize("kind", ["folder", "dangling link"])
def test_something_else_in_the_place_of_the_lease_is_an_error_not_a_wait(tmp_path, kind):
    path = tmp_path / LEASE
    path.mkdir() if kind == "folder" else path.symlink_to(tmp_path / "nowhere" / "file")
    with pytest.raises(CheckpointError, match=r"lease.json (cannot be read|is a symbolic link to nothing)"):
        Lease(tmp_path, SECONDS).try_to_take()
