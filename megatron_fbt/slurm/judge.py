"""Which nodes are bad, from what all of them found out. A pure function."""

import statistics
from collections import Counter
from typing import Dict, List, Optional, Sequence

from megatron_fbt.slurm.job import PreflightConfig
from megatron_fbt.slurm.node_facts import NodeFacts


def judge(nodes: Sequence[NodeFacts], limits: PreflightConfig, devices: int = 0) -> Dict[str, List[str]]:
    """{name of a bad node: what is wrong with it}; empty if all are good.

    The first node is what clocks and folders are compared with; versions are compared with what most nodes have, speeds
    with the median, the network's with more than two nodes.

    Args:
        nodes: what each found.
        limits: what it must have.
        devices: GPUs of each node; 0 = CPUs are trained on.
    """
    bad: Dict[str, List[str]] = {}
    median_speed = statistics.median(speed for node in nodes for speed in node.matmul_tflops)
    links = [node.link_gb_s for node in nodes if node.link_gb_s is not None]
    common = {
        name: Counter(node.versions.get(name) for node in nodes).most_common(1)[0][0]
        for name in sorted({name for node in nodes for name in node.versions})
    }
    for node in nodes:
        problems = _own_problems(node, limits, devices)
        problems += [
            f"{name} {node.versions.get(name)}, but {version} on most nodes"
            for name, version in common.items()
            if node.versions.get(name) != version
        ]
        problems += [
            f"device {index} multiplies at {speed:.3g} TFLOP/s, the median is {median_speed:.3g}"
            for index, speed in enumerate(node.matmul_tflops)
            if speed < limits.slow_factor * median_speed
        ]
        median = statistics.median(links) if len(links) > 2 else 0.0
        if node.link_gb_s is not None and node.link_gb_s < limits.slow_factor * median:
            problems.append(f"{node.link_gb_s:.3g} GB/s to its neighbours, the median is {median:.3g}")
        if problems:
            bad[node.name] = problems
    return bad


def _own_problems(node: NodeFacts, limits: PreflightConfig, devices: int) -> List[str]:
    problems = []
    if node.devices < devices:
        problems.append(f"{node.devices} GPUs instead of {devices}")
    if node.free_bytes is None:
        problems.append("the run folder cannot be written")
    elif node.free_bytes < limits.min_free_gb * 1e9:
        problems.append(f"{node.free_bytes / 1e9:.1f} GB free in the run folder, {limits.min_free_gb:g} are needed")
    if not node.sees_folder:
        problems.append("its run folder is not the first node's: the folder is not shared")
    if abs(node.clock_skew_s) > limits.max_clock_skew_s:
        problems.append(f"its clock is {node.clock_skew_s:+.1f} s off the first node's")
    return problems


def excluded(bad: Dict[str, List[str]]) -> Optional[str]:
    """Bad nodes for sbatch's --exclude, without those that have no name outside of a job, as `number 1`."""
    return ",".join(name for name in bad if " " not in name) or None


def describe(nodes: Sequence[NodeFacts], bad: Dict[str, List[str]]) -> str:
    """The report for a person, with what to give sbatch."""
    slowest = min(speed for node in nodes for speed in node.matmul_tflops)
    fastest = max(speed for node in nodes for speed in node.matmul_tflops)
    size = f"{len(nodes)} node" + "s" * (len(nodes) > 1)
    lines = [f"preflight: {size}, matrix products {slowest:.3g} to {fastest:.3g} TFLOP/s a device"]
    links = [node.link_gb_s for node in nodes if node.link_gb_s is not None]
    if links:
        reduced = min(node.all_reduce_gb_s or 0.0 for node in nodes)
        lines[0] += f", neighbours {min(links):.3g} to {max(links):.3g} GB/s, all-reduce {reduced:.3g} GB/s"
    for name, problems in bad.items():
        lines += [f"preflight: bad node {name}: {problem}" for problem in problems]
    if bad:
        named = excluded(bad)
        remedy = f"submit with --exclude={named}" if named else "look at why they did not answer"
        lines.append(f"error: bad nodes: {', '.join(bad)}; {remedy}")
    else:
        lines.append("preflight: all nodes are good")
    return "\n".join(lines)
