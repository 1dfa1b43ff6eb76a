"""Check the nodes of a job before a run starts: one process on each node, started by srun.

It compares devices, free disk, the shared run folder, clocks, versions, the speed of matrix products and of the
network, names the bad nodes and says what to give sbatch. Without a launcher it checks this machine alone.
"""

import os
import shutil
import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from typing import List, Optional, Sequence

from torch.distributed import DistError

from megatron_fbt.config.checks import launcher_number
from megatron_fbt.config.rules import raise_problems
from megatron_fbt.errors import ConfigError, FBTError
from megatron_fbt.slurm.job import PreflightConfig
from megatron_fbt.slurm.judge import Limits, describe, judge
from megatron_fbt.slurm.meeting import Meeting
from megatron_fbt.slurm.node_facts import NodeFacts, node_name, own_facts
from megatron_fbt.slurm.nodes import node_names
from megatron_fbt.slurm.requeue import BAD_NODE

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
    parser.add_argument("--devices", type=int, default=Limits.devices, help="GPUs on each node; 0 = CPUs (default)")
    parser.add_argument("--min_free_gb", type=float, default=Limits.min_free_gb, help="10^9 bytes")
    parser.add_argument("--max_clock_skew_s", type=float, default=Limits.max_clock_skew_s, help="seconds")
    parser.add_argument("--slow_factor", type=float, default=Limits.slow_factor, help="part of the median that is slow")
    parser.add_argument("--timeout_s", type=float, default=300.0, help="seconds to wait for a node")
    return parser


def check_options(options: Namespace) -> None:
    """Refuse limits with which no node or every node would be a bad one.

    Raises:
        ConfigError: naming each option, with a remedy.
    """
    limits = PreflightConfig(True, options.min_free_gb, options.max_clock_skew_s, options.slow_factor)
    raise_problems([problem.replace("preflight.", "--") for problem in limits.problems()])
    if options.devices < 0:
        raise ConfigError(f"--devices {options.devices}: give 0 (CPUs) or the number of GPUs")
    if not 0 < options.timeout_s <= 86_400:
        raise ConfigError(f"--timeout_s {options.timeout_s}: give seconds, above 0 and at most a day")
    if not options.run_dir.strip():
        raise ConfigError("--run_dir: empty; give the run folder")


def check_alone(options: Namespace, limits: Limits) -> int:
    """This machine only."""
    folder = Path(options.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".preflight-", dir=folder) as marks:
        facts = own_facts(folder, Path(marks) / "0")
    return report([facts], limits, [])


def check_together(options: Namespace, limits: Limits, rank: int, size: int) -> int:
    """All nodes of the job; the first one reports, all end with its exit code."""
    run_dir = Path(options.run_dir)
    marks = run_dir / f".preflight-{os.environ.get('SLURM_JOB_ID', 'x')}-{os.environ.get('SLURM_RESTART_COUNT', 0)}"
    facts = own_facts(run_dir, marks / str(rank))
    meeting = Meeting(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank, size, options.timeout_s)
    try:
        there, missing = meeting.gather("arrived", facts)
        if meeting.tell("complete", len(missing)):
            return report(there, limits, missing) if rank == 0 else BAD_NODE
        facts.clock_skew_s = meeting.clock_skew()
        facts.sees_folder = meeting.sees_folder(marks)
        facts.link_gb_s, facts.all_reduce_gb_s = meeting.speeds()
        there, missing = meeting.gather("measured", facts)
        return meeting.tell("verdict", report(there, limits, missing) if rank == 0 else None)
    finally:
        if rank == 0:
            shutil.rmtree(marks, ignore_errors=True)


def report(nodes: List[NodeFacts], limits: Limits, missing: Sequence[int]) -> int:
    """Print what was found; the exit code."""
    bad = judge(nodes, limits)
    if missing:
        known = node_names(os.environ["SLURM_JOB_NODELIST"]) if "SLURM_JOB_NODELIST" in os.environ else []
        names = [known[rank] if rank < len(known) else f"number {rank}" for rank in missing]
        bad.update({name: ["no answer"] for name in names})
    print(describe(nodes, bad), flush=True)
    return BAD_NODE if bad else 0


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Check; the exit code."""
    options = build_parser().parse_args(argv)
    limits = Limits(options.devices, options.min_free_gb, options.max_clock_skew_s, options.slow_factor)
    try:
        check_options(options)
        size = launcher_number(os.environ, "WORLD_SIZE") or 1
        rank = launcher_number(os.environ, "RANK") or 0
        return check_alone(options, limits) if size == 1 else check_together(options, limits, rank, size)
    except FBTError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except (OSError, RuntimeError, DistError) as error:
        first = " ".join(str(error).split())[:300]
        print(f"error: preflight on {node_name()}: {type(error).__name__}: {first}", file=sys.stderr, flush=True)
        return BAD_NODE


if __name__ == "__main__":
    sys.exit(main())
