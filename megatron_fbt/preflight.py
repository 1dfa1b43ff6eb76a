"""Check the nodes of a job before a run starts: one process on each node, started by srun.

It compares devices, free disk, the shared run folder, clocks, versions, the speed of matrix products and of the
network, names the bad nodes and says what to give sbatch. Without a launcher it checks this machine alone.
"""

import contextlib
import json
import os
import shutil
import sys
import uuid
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import List, Mapping, Optional, Sequence

from torch.distributed import DistError

from megatron_fbt.config.rules import raise_problems
from megatron_fbt.ending import tell
from megatron_fbt.errors import ConfigError, FBTError
from megatron_fbt.slurm.job import PreflightConfig
from megatron_fbt.slurm.judge import describe, excluded, judge
from megatron_fbt.slurm.meeting import Meeting
from megatron_fbt.slurm.node_facts import NodeFacts, own_facts
from megatron_fbt.slurm.nodes import node_names
from megatron_fbt.slurm.requeue import BAD_NODE
from megatron_fbt.training.machine import node_name
from megatron_fbt.training.metrics import json_ready

EXAMPLE = """example:
  srun --ntasks-per-node=1 python -m megatron_fbt.slurm.task check -m megatron_fbt.preflight \\
      --run_dir runs/x --devices 8
  python -m megatron_fbt.preflight --run_dir runs/x

exit code: 0 all nodes are good, 2 command line, 69 a bad node
"""


def build_parser() -> ArgumentParser:
    """The command line."""
    parser = ArgumentParser(
        prog="python -m megatron_fbt.preflight",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--run_dir", required=True, help="the run folder, which all nodes must share")
    limits = PreflightConfig
    parser.add_argument("--devices", type=int, default=0, help="GPUs on each node; 0 = CPUs (default)")
    parser.add_argument("--min_free_gb", type=float, default=limits.min_free_gb, help="10^9 bytes")
    parser.add_argument("--max_clock_skew_s", type=float, default=limits.max_clock_skew_s, help="seconds")
    parser.add_argument("--slow_factor", type=float, default=limits.slow_factor, help="part of the median that is slow")
    parser.add_argument("--timeout_s", type=float, default=300.0, help="seconds to wait for a node")
    parser.add_argument("--json", action="store_true", help="print one JSON object: nodes, bad, exclude")
    return parser


def limits_of(options: Namespace) -> PreflightConfig:
    """What a node must have.

    Raises:
        ConfigError: no node or every node would be a bad one; naming each option, with a remedy.
    """
    limits = PreflightConfig(True, options.min_free_gb, options.max_clock_skew_s, options.slow_factor)
    raise_problems([problem.replace("preflight.", "--") for problem in limits.problems()])
    if options.devices < 0:
        raise ConfigError(f"--devices {options.devices}: give 0 (CPUs) or the number of GPUs")
    if not 0 < options.timeout_s <= 86_400:
        raise ConfigError(f"--timeout_s {options.timeout_s}: give seconds, above 0 and at most a day")
    if not options.run_dir.strip():
        raise ConfigError("--run_dir: empty; give the run folder")
    return limits


@dataclass(frozen=True)
class Place:
    """Where this process is among those of all nodes."""

    rank: int = 0
    size: int = 1
    address: str = ""
    """Where they meet, at `port`."""
    port: int = 0


def place_of(environment: Mapping[str, str]) -> Place:
    """This process's place, as a launcher's variables say; alone where there are none.

    Raises:
        ConfigError: one is missing or makes no sense.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
    if not any(name in environment for name in names[:2]):
        return Place()
    texts = {name: environment.get(name, "") for name in names}
    numbers = {name: int(texts[name]) if texts[name].isdecimal() else -1 for name in names}
    size = numbers["WORLD_SIZE"]
    wrong = {
        "WORLD_SIZE": "not the number of nodes" if size < 1 else "",
        "RANK": "" if 0 <= numbers["RANK"] < max(size, 1) else f"not a number below WORLD_SIZE = {size}",
    }
    if size > 1:
        wrong["MASTER_ADDR"] = "" if texts["MASTER_ADDR"].strip() else "no address"
        wrong["MASTER_PORT"] = "" if 0 < numbers["MASTER_PORT"] < 65536 else "no port, which is 1 to 65535"
    for name, why in wrong.items():
        if why:
            said = f" = {texts[name]!r}: {why}" if name in environment else ": not set"
            remedy = "let srun start `python -m megatron_fbt.slurm.task check -m megatron_fbt.preflight`, which sets it"
            raise ConfigError(f"environment variable {name}{said}; {remedy}, or unset RANK and WORLD_SIZE")
    return Place(numbers["RANK"], size, texts["MASTER_ADDR"], numbers["MASTER_PORT"])


def check_alone(options: Namespace, limits: PreflightConfig) -> int:
    """This machine only."""
    _require_folder(options.run_dir)
    marks = Path(options.run_dir) / f".preflight-{uuid.uuid4().hex}"
    try:
        facts = own_facts(Path(options.run_dir), marks / "0")
    finally:
        shutil.rmtree(marks, ignore_errors=True)
    return report([facts], [], options, limits)


def check_together(options: Namespace, limits: PreflightConfig, place: Place) -> int:
    """All nodes of the job; the first one reports, all end with its exit code."""
    run_dir, first = Path(options.run_dir), place.rank == 0
    marks = run_dir / f".preflight-{os.environ.get('SLURM_JOB_ID', 'x')}-{os.environ.get('SLURM_RESTART_COUNT', 0)}"
    try:
        facts = own_facts(run_dir, marks / str(place.rank))
        meeting = Meeting(place.address, place.port, place.rank, place.size, options.timeout_s)
        there, missing = meeting.gather("arrived", facts)
        # What the first node lacks was mistyped; what only others lack is not shared.
        told = meeting.tell("complete", BAD_NODE * bool(missing) if run_dir.is_dir() else ConfigError.exit_code)
        if told == ConfigError.exit_code and first:
            _require_folder(options.run_dir)
        if told:
            return report(there, missing, options, limits) if first else told
        facts.clock_skew_s = meeting.clock_skew()
        facts.sees_folder = meeting.sees_folder(marks)
        facts.link_gb_s, facts.all_reduce_gb_s = meeting.speeds()
        there, missing = meeting.gather("measured", facts)
        return meeting.tell("verdict", report(there, missing, options, limits) if first else None)
    finally:
        if first:
            shutil.rmtree(marks, ignore_errors=True)
        else:  # the first node may be absent
            with contextlib.suppress(OSError):
                (marks / str(place.rank)).unlink(missing_ok=True)
                marks.rmdir()


def _require_folder(run_dir: str) -> None:
    if not Path(run_dir).is_dir():
        raise ConfigError(f"--run_dir {run_dir}: no such folder; make it, or correct the path")


def report(nodes: List[NodeFacts], missing: Sequence[int], options: Namespace, limits: PreflightConfig) -> int:
    """Print what was found; the exit code."""
    bad = judge(nodes, limits, options.devices)
    if missing:
        known = node_names(os.environ["SLURM_JOB_NODELIST"]) if "SLURM_JOB_NODELIST" in os.environ else []
        names = [known[rank] if rank < len(known) else f"number {rank}" for rank in missing]
        bad.update({name: ["no answer"] for name in names})
    found = {"nodes": [asdict(node) for node in nodes], "bad": bad, "exclude": excluded(bad)}
    print(json.dumps(json_ready(found)) if options.json else describe(nodes, bad), flush=True)
    return BAD_NODE if bad else 0


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Check; the exit code."""
    options = build_parser().parse_args(argv)
    try:
        limits, place = limits_of(options), place_of(os.environ)
        return check_alone(options, limits) if place.size == 1 else check_together(options, limits, place)
    except FBTError as error:
        return tell(error)
    except (OSError, RuntimeError, DistError) as error:
        first = " ".join(str(error).split())[:300]
        tell(FBTError(f"preflight on {node_name()}: {type(error).__name__}: {first}"))
        return BAD_NODE


if __name__ == "__main__":
    sys.exit(main())
