"""What `srun` starts in each task: the launcher of a node, or the process of a device. Needs no torch.

`python -m megatron_fbt.slurm.task node --nproc_per_node 8 -m megatron_fbt.pretrain ...` becomes
megatron_fbt.launch with its node's place; with `device` instead, without a launcher's options, it becomes one rank;
`check` is `device` at the job's second port. SLURM may deliver one request twice, by itself and by srun, and ends a job
that does not leave: what is started so takes no signal for a person's second one.
"""

import os
import sys
from typing import Dict, List, Mapping, Optional, Sequence

from megatron_fbt.ending import tell
from megatron_fbt.errors import ConfigError, FBTError
from megatron_fbt.slurm.nodes import job_port, master_address
from megatron_fbt.training.signals import SUPERVISED


def slurm_number(environment: Mapping[str, str], *names: str) -> int:
    """The first of several variables that is set, as a number.

    Raises:
        ConfigError: none is, or it is no number.
    """
    for name in names:
        text = environment.get(name)
        if text is not None and text.isdecimal():
            return int(text)
        if text is not None:
            raise ConfigError(f"{name} = {text!r}: not a whole number; let srun start this command")
    raise ConfigError(f"{names[0]}: not set; let srun start this command, inside of a job")


def node_command(environment: Mapping[str, str], arguments: Sequence[str]) -> List[str]:
    """Arguments of the launcher of this node.

    Args:
        environment: of a task of srun.
        arguments: of megatron_fbt.launch, without those about nodes.

    Raises:
        ConfigError: srun started several tasks on a node, each of which would start all ranks.
    """
    tasks = slurm_number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    nodes = slurm_number(environment, "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES")
    if tasks != nodes:
        raise ConfigError(
            f"SLURM_STEP_NUM_TASKS = {tasks}: {nodes} nodes need {nodes} launchers; give srun --ntasks-per-node=1, or "
            "start one rank for each task with `device`"
        )
    place = {
        "--nnodes": nodes,
        "--node_rank": slurm_number(environment, "SLURM_NODEID"),
        "--master_addr": master_address(environment),
        "--master_port": job_port(environment),
    }
    options = [str(word) for pair in place.items() for word in pair]
    return ["-m", "megatron_fbt.launch", *options, *arguments]


def rank_environment(environment: Mapping[str, str], second_port: bool = False) -> Dict[str, str]:
    """What torch's env:// start wants to know, of a task of srun that is one rank.

    Args:
        environment: of a task of srun.
        second_port: meet at the job's second port.

    Raises:
        ConfigError: this is no task of srun.
    """
    nodes = slurm_number(environment, "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES")
    tasks = slurm_number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    return {
        "RANK": str(slurm_number(environment, "SLURM_PROCID")),
        "LOCAL_RANK": str(slurm_number(environment, "SLURM_LOCALID")),
        "WORLD_SIZE": str(tasks),
        "LOCAL_WORLD_SIZE": str(tasks // nodes),
        "MASTER_ADDR": master_address(environment),
        "MASTER_PORT": str(job_port(environment, second_port)),
    }


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Become the launcher or the rank; returns only if that cannot be."""
    kind, *arguments = list(sys.argv[1:] if argv is None else argv) or [""]
    try:
        if kind == "node":
            command, environment = node_command(os.environ, arguments), dict(os.environ)
        elif kind in ("device", "check"):
            command, environment = arguments, {**os.environ, **rank_environment(os.environ, kind == "check")}
        else:
            raise ConfigError(f"first argument {kind!r}: give node, device or check")
    except FBTError as error:
        return tell(error)
    os.execve(sys.executable, [sys.executable, *command], {**environment, SUPERVISED: "srun"})


if __name__ == "__main__":
    sys.exit(main())
