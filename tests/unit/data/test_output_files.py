"""Output files: whole or not there, one writer at a time, nothing left of a killed one."""

import errno
import fcntl
import json
import os
import threading

import pytest

from megatron_fbt.data.output_files import open_alone, partial_path, write_json
from megatron_fbt.errors import DataError


def test_what_a_killed_process_left_is_replaced(tmp_path):
    path = tmp_path / "a.json"
    partial_path(path).write_bytes(b"half of something longer than the new content")
    write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1} and os.listdir(tmp_path) == ["a.json"]


def test_writers_of_one_file_wait_for_each_other(tmp_path):
    threads = [threading.Thread(target=write_json, args=(tmp_path / "a.json", {"n": [7] * 9999})) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert json.loads((tmp_path / "a.json").read_text()) == {"n": [7] * 9999}
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_second_writer_is_refused_and_spoils_nothing(tmp_path):
    with open_alone(tmp_path / "x.partial") as stream:
        stream.write(b"mine")
        with pytest.raises(DataError, match="another process is writing it"):
            open_alone(tmp_path / "x.partial")
    assert (tmp_path / "x.partial").read_bytes() == b"mine"


def test_a_file_system_without_locks_will_do(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    write_json(tmp_path / "a.json", {"a": 1})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1}


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_json(tmp_path / "a.json", {"a": 1})
    assert not list(tmp_path.iterdir())
