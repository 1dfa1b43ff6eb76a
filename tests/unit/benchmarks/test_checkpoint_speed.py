"""The benchmark of checkpoints runs, compares like with like and leaves nothing behind."""

import importlib.util
import os
import subprocess
import sys

import pytest


@pytest.fixture
def benchmark(repository):
    spec = importlib.util.spec_from_file_location("checkpoint_speed", repository / "benchmarks" / "checkpoint_speed.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_small_one_runs_through_all_sides(tmp_path, repository):
    command = [sys.executable, repository / "benchmarks" / "checkpoint_speed.py", "--quick", "--rounds", "1"]
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    options = {"capture_output": True, "text": True, "env": environment, "timeout": 250}
    done = subprocess.run([*command, "--folder", tmp_path / "folder"], **options)
    assert done.returncode == 0, done.stderr
    for side in ("save ", "save_beside", "write_plain", "load", "read_plain", "asynchronous / synchronous"):
        assert f"  {side}" in done.stdout
    assert not (tmp_path / "folder").exists()


def test_ratios_are_those_of_one_round(benchmark):
    found = {
        "save": [4.0, 8.0],
        "save_beside": [1.0, 1.0],
        "write_plain": [2.0, 6.0],
        "load": [5.0],
        "read_plain": [4.0],
    }
    assert benchmark.ratios(found) == {
        "asynchronous / synchronous": [0.25, 0.125],
        "save": [0.5, 0.75],
        "load": [0.8],
    }


def test_plain_sides_write_and_read_every_byte(benchmark, tmp_path):
    for size in (0, 10, benchmark.BLOCK, benchmark.BLOCK + 7):
        benchmark.write_plain(tmp_path / "plain", size)
        assert (tmp_path / "plain").stat().st_size == size
        benchmark.read_plain(tmp_path / "plain")
