"""What one node finds out about itself for the preflight."""

import platform
import shutil
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Dict, List, Optional

import torch

from megatron_fbt.training.machine import matmul_tflops, node_name

PACKAGES = ("torch", "megatron-core", "transformers", "numpy")
MATMUL_SIZE = {"cpu": 512, "cuda": 8192}
"""Rows and columns of the square matrices."""
MATMUL_REPEATS = {"cpu": 5, "cuda": 20}


@dataclass
class NodeFacts:
    """One node, as it sees itself."""

    name: str
    devices: int = 0
    """GPUs that this process sees."""
    free_bytes: Optional[int] = None
    """Free space where the run folder is; None = it cannot be written."""
    versions: Dict[str, str] = field(default_factory=dict)
    matmul_tflops: List[float] = field(default_factory=list)
    """10^12 operations per second of each device, median of some products."""
    sees_folder: bool = True
    """Whether the first node's file appeared in the run folder here, and this node's there."""
    clock_skew_s: float = 0.0
    """By how much its clock is surely off the first node's, with the time of the answer taken off."""
    link_gb_s: Optional[float] = None
    """10^9 bytes per second with the better one of two neighbours; None = alone."""
    all_reduce_gb_s: Optional[float] = None
    """10^9 bytes per second of an all-reduce over all nodes: its bytes over its duration."""


def versions() -> Dict[str, str]:
    """Of what must be equal on all nodes."""
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "none"
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
    return found


def own_facts(run_dir: Path, mark: Path) -> NodeFacts:
    """What needs no other node; leaves a mark in the run folder.

    Args:
        run_dir: the run folder.
        mark: file to write two levels below it.
    """
    count = torch.cuda.device_count()
    devices = [torch.device("cuda", index) for index in range(count)] or [torch.device("cpu")]
    facts = NodeFacts(node_name(), count, versions=versions())
    try:
        mark.parent.mkdir(exist_ok=True)
        mark.write_text(facts.name, encoding="utf-8")
        facts.free_bytes = shutil.disk_usage(run_dir).free
    except OSError:
        facts.free_bytes = None
    facts.matmul_tflops = [
        matmul_tflops(device, MATMUL_SIZE[device.type], MATMUL_REPEATS[device.type]) for device in devices
    ]
    return facts
