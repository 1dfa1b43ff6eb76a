"""status.json: always whole, always JSON."""

import json
import os
import threading
from datetime import datetime

import pytest

from megatron_fbt.training.status import known_status, write_status


def test_fields_are_written_and_pid_and_time_added(tmp_path):
    path = tmp_path / "run" / "status.json"
    write_status(path, state="running", step=3, train_steps=10, loss=float("nan"), eta_s=None, last_checkpoint=None)
    status = json.loads(path.read_text())
    assert (status["state"], status["step"], status["loss"], status["eta_s"]) == ("running", 3, None, None)
    assert status["pid"] == os.getpid()
    assert datetime.fromisoformat(status["time"].replace("Z", "+00:00")).year >= 2024


def test_a_reader_never_sees_half_a_file(tmp_path):
    path = tmp_path / "status.json"
    write_status(path, state="running", step=0, padding="x" * 20000)
    done = threading.Event()
    seen = []

    def read():
        while not done.is_set():
            seen.append(json.loads(path.read_text())["step"])

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(1, 60):
        write_status(path, state="running", step=step, padding="x" * 20000)
    done.set()
    reader.join()
    assert seen == sorted(seen) and len(seen) > 0
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", ["", "[1]", "{", "[" * 100_000])
def test_nothing_is_known_from_a_file_that_cannot_be_read(tmp_path, content):
    (tmp_path / "status.json").write_text(content)
    assert known_status(tmp_path / "status.json") == known_status(tmp_path / "missing.json") == {}
