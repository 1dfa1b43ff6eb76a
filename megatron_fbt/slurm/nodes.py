"""Nodes of a job, where its ranks meet: the address of the first node, a port from the job id. Needs no torch.

`python -m megatron_fbt.slurm.nodes address` and `... port` print them inside a job.
"""

import math
import re
import shutil
import socket
import subprocess
import sys
from itertools import product
from os import environ
from typing import List, Mapping, Optional, Sequence

from megatron_fbt.ending import tell
from megatron_fbt.errors import ConfigError, FBTError

MOST_NODES = 100_000
LOWEST_PORT = 10000
PORT_PAIRS = 11000
"""10000 to 31999: above what services use, below what Linux hands out for outgoing connections (32768 on)."""


def expand_node_list(text: str) -> List[str]:
    """Names of a node list as SLURM writes it, in its order.

    Args:
        text: for example `gpu[003-005,010],login1`; several brackets in one name vary like nested loops, and leading
            zeros are kept.

    Raises:
        ConfigError: it is no node list.
    """
    names: List[str] = []
    for item in _split(text):
        parts = re.split(r"\[([^\[\]]*)\]", item)
        # Even places hold text, odd ones what stood in brackets.
        choices = [_range(part, text) if place % 2 else [part] for place, part in enumerate(parts)]
        if not item or re.search(r"\s", item) or "[" in "".join(parts[::2]) or "]" in "".join(parts[::2]):
            raise ConfigError(f"node list {text!r}: cannot be read; give one as `scontrol show job` prints it")
        if len(names) + math.prod(map(len, choices)) > MOST_NODES:
            raise ConfigError(f"node list {text!r}: more than {MOST_NODES:,} nodes; give the nodes of one job")
        names += ["".join(choice) for choice in product(*choices)]
    return names


def _split(text: str) -> List[str]:
    """Items between commas that stand outside of brackets."""
    return re.split(r"\s*,\s*(?![^\[]*\])", text.strip())


def _range(text: str, whole: str) -> List[str]:
    """`003-005,010` as 003, 004, 005, 010."""
    found: List[str] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", item)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if not 0 <= int(last) - int(first) < MOST_NODES:
            raise ConfigError(f"node list {whole!r}: {item!r} is no range; give one as `scontrol show job` prints it")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def node_names(node_list: str) -> List[str]:
    """Names of a node list, by `scontrol` where it is there (it also knows a site's own forms)."""
    if shutil.which("scontrol"):
        result = subprocess.run(["scontrol", "show", "hostnames", node_list], capture_output=True, text=True)
        if result.returncode == 0 and result.stdout.split():
            return result.stdout.split()
    return expand_node_list(node_list)


def node_address(name: str) -> str:
    """The name if it resolves, else the address that SLURM has for it, else the name."""
    try:
        socket.getaddrinfo(name, None)
        return name
    except OSError:
        pass
    if shutil.which("scontrol"):
        result = subprocess.run(["scontrol", "show", "node", "-o", name], capture_output=True, text=True)
        match = re.search(r"\bNodeAddr=(\S+)", result.stdout)
        if match:
            return match[1]
    return name


def master_address(environment: Mapping[str, str]) -> str:
    """Where the ranks meet: MASTER_ADDR if it is set, else the job's first node.

    Raises:
        ConfigError: neither is known.
    """
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"]
    node_list = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    if not node_list:
        raise ConfigError("SLURM_JOB_NODELIST: not set; run this inside of a job, or set MASTER_ADDR")
    return node_address(node_names(node_list)[0])


def job_port(environment: Mapping[str, str], second: bool = False) -> int:
    """The port where the ranks of a job meet, the same on all its nodes.

    SLURM gives each task of a job array a job id of its own, so their ports differ, too. Two jobs have the same port
    only if their ids are 11000 apart or a multiple of that.

    Args:
        environment: with SLURM_JOB_ID.
        second: the port after it, which is the same job's as well.

    Raises:
        ConfigError: the job id is not known.
    """
    job = environment.get("SLURM_JOB_ID", "")
    if not job.isdecimal():
        raise ConfigError(f"SLURM_JOB_ID = {job!r}: not a job id; run this inside of a job")
    return LOWEST_PORT + 2 * (int(job) % PORT_PAIRS) + int(second)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Print the address or the port; the exit code."""
    asked = list(sys.argv[1:] if argv is None else argv)
    answers = {"address": master_address, "port": job_port}
    try:
        if len(asked) != 1 or asked[0] not in answers:
            raise ConfigError(f"arguments {' '.join(asked)!r}: give one of {', '.join(answers)}")
        print(answers[asked[0]](environ))
    except FBTError as error:
        return tell(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
