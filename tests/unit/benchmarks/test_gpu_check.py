"""The check for GPUs runs what it can without one, and says what it could not."""

import importlib.util
import math
import os
import subprocess
import sys

import pytest

from tests.distributed.launch import run_distributed


@pytest.mark.slow
def test_without_a_gpu_it_tests_itself(repository):
    environment = {**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", repository / "benchmarks" / "gpu_check.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = [line.split()[-1] for line in done.stdout.splitlines()]
    assert "FAIL" not in verdicts and verdicts.count("pass") == 9
    for line in (
        "ran: prefix reuse, emulated FP8 training, costs, decoding",
        "could not run: backends (",
        "could not run: FP8 emulation (there is no GPU)",
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
    assert str(load(repository).Row("x", value, bar)).split()[-1] == verdict


def load(repository):
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("gpu_check", repository / "benchmarks" / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


def comparisons(rank, world_size, repository):
    """Rows of bf16 against itself, and against emulated FP8."""
    check = load(repository)
    layout = check.initialize_parallel(check.PretrainConfig().parallel, seed=1)
    shape = {"data__sequence_length": 32, "training__global_batch_size": 1}
    low = {"precision__fp8": "e4m3", "precision__fp8_emulated": True}
    plain, again, other = (check.Run(check.configuration(True, **shape, **fields), layout) for fields in ({}, {}, low))
    same, near = check.compared("same", [plain, again], 0.0), check.compared("near", [plain, other], 0.0)
    return [(row.check, row.value) for row in same], [(row.check, row.value) for row in near]


def test_logits_losses_and_gradients_are_compared_for_each_pass(repository):
    ((same, near),) = run_distributed(comparisons, 1, repository, timeout=100)
    names = [f"same, pass {k}: logits" for k in (1, 2, 3)]
    names += [f"same, K = {k}: {what}" for k in (1, 2, 3) for what in ("loss", "gradient")]
    assert same == [(name, 0.0) for name in names]
    for name, value in near:
        assert 0.0 < value < (0.01 if name.endswith("loss") else 0.2), name
