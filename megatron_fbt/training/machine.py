"""This machine: its name, and how fast its devices are."""

import os
import socket
import statistics
import time
from typing import Callable

import torch


def node_name() -> str:
    """As SLURM calls it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def matmul_tflops(device: torch.device, size: int, repeats: int) -> float:
    """Speed of a device: 10^12 operations per second in the median of some products, in bf16 on a GPU.

    Args:
        device: to measure.
        size: rows and columns of the matrices.
        repeats: products, besides a first one that does not count.
    """
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    left = torch.ones(size, size, dtype=dtype, device=device)
    return 2 * size**3 / median_seconds(lambda: left @ left, device, repeats) / 1e12


def median_seconds(action: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median duration of an action, until the device has done it.

    Args:
        action: to time.
        device: that it keeps busy.
        repeats: times that count, after a first one that does not.
    """
    durations = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        durations.append(time.perf_counter() - began)
    return statistics.median(durations[1:])
