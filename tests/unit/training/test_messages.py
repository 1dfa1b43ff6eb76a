"""What a run shows of the libraries' messages, in a process of its own."""

import subprocess
import sys

import pytest

SCRIPT = """
import logging, sys, warnings
from megatron_fbt.training.messages import hide_gpu_hints, set_up_messages
set_up_messages(is_main=sys.argv[1] == "main")
hide_gpu_hints()
for name in ("megatron.core.optimizer", "megatron_fbt.data.dataset"):
    for level in (logging.INFO, logging.WARNING, logging.ERROR):
        logging.getLogger(name).log(level, f"{name} {level}")
logging.getLogger("megatron.core.tensor_parallel.random").warning("CPU RNG state changed within GPU RNG context")
warnings.warn("Apex is not installed. Falling back to Torch Norm")
warnings.warn("Transformer Engine and Apex are not installed. Falling back")
warnings.warn("`torch.distributed.x` is deprecated", FutureWarning)
warnings.warn("it is recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS to 1")
warnings.warn("overflow in the loss", RuntimeWarning)
warnings.warn("this setting is ignored")
"""


def shown(who, *options):
    command = [sys.executable, *options, "-c", SCRIPT, who]
    return subprocess.run(command, capture_output=True, text=True, check=True, env={}).stderr


@pytest.mark.parametrize(
    "who, expected",
    [
        ("main", ["megatron.core.optimizer 30", "megatron.core.optimizer 40", "megatron_fbt.data.dataset 20"]),
        ("other", ["megatron.core.optimizer 40", "megatron_fbt.data.dataset 30"]),
    ],
)
def test_our_messages_and_real_warnings_are_shown(who, expected):
    lines = [line for line in shown(who).splitlines() if not line.startswith("  ")]
    assert lines[: len(expected)] == expected
    warned = [line for line in lines if "Warning: " in line]
    assert [line.split("Warning: ")[1] for line in warned] == ["overflow in the loss", "this setting is ignored"]
    assert len([line for line in lines if line.startswith("megatron")]) == (5 if who == "main" else 3)


def test_pythons_switch_shows_every_warning():
    assert "Apex is not installed" in shown("main", "-W", "default")
