"""The check for GPUs runs what it can without one, and says what it could not."""

import importlib.util
import math
import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_without_a_gpu_it_tests_itself(repository):
    environment = {**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", repository / "benchmarks" / "gpu_check.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = [line.split()[-1] for line in done.stdout.splitlines()]
    assert "FAIL" not in verdicts and verdicts.count("pass") == 2
    for line in (
        "ran: emulated FP8 training, costs, decoding",
        "could not run: backends (",
        "could not run: FP8 training (there is no GPU)",
        "could not run: pipeline (needs 2 GPUs, there are 0)",
    ):
        assert f"\n{line}" in done.stdout


@pytest.mark.parametrize(
    "value, bar, verdict",
    [
        (0.1, 0.2, "pass"),
        (0.3, 0.2, "FAIL"),
        (math.nan, 0.2, "FAIL"),
        (math.nan, math.inf, "FAIL"),
        (5.0, math.inf, "5"),
    ],
)
def test_verdicts(repository, value, bar, verdict):
    spec = importlib.util.spec_from_file_location("gpu_check", repository / "benchmarks" / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    assert str(module.Row("x", value, bar)).split()[-1] == verdict
