"""torchrun whose exit code is the workers' own, and which lets them save when it is asked to stop.

torchrun ends with 1 whatever a worker's code was, and turns a signal into a kill 30 seconds later. Here
the exit code of the failed worker is passed on (128 + n for a death by signal n), and SIGTERM, SIGINT, SIGUSR1 and
SIGHUP (as SIGTERM) are handed to the workers, which have --stop_grace_s seconds to write a checkpoint and leave.
SIGTERM or SIGINT a second or more after the first of these two ends the workers at once, unless srun has started the
launcher (megatron_fbt.slurm.task): then SLURM does that. The workers themselves leave repeated signals to the launcher.
"""

import logging
import math
import os
import signal
import sys
import time
import uuid
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from types import FrameType
from typing import Dict, List, Optional, Sequence

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from megatron_fbt.errors import BadNumbersError, CheckpointError, ConfigError, DataError, StoppedBySignal
from megatron_fbt.training.signals import SUPERVISED, Impatience, stays_ignored

EXAMPLE = """example:
  python -m megatron_fbt.launch --nproc_per_node 4 -m megatron_fbt.pretrain --config examples/configs/tiny_cpu.yaml

exit code: 0 done, 2 configuration, 3 data, 4 checkpoint, 5 bad numbers, 75 stopped by a signal and resumable,
128 + n a worker died of signal n, otherwise the failed worker's own code
"""
# What each stop signal becomes for the workers.
FORWARDED = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGHUP: signal.SIGTERM,
}
RESUMABLE = StoppedBySignal.exit_code
# Starting again would not help against these, and must not undo a stop.
FINAL_CODES = {error.exit_code for error in (ConfigError, DataError, CheckpointError, BadNumbersError, StoppedBySignal)}


def choose_exit_code(codes: Sequence[int]) -> int:
    """The launcher's exit code.

    Args:
        codes: exit codes of the failed workers, -n for a death by signal n, first failure first.

    Returns:
        The first worker's code, 128 + n for signal n. But 1, which is also what the peers of a failed worker end with,
        and 75 give way to a more telling code; and 75 wins over 1 and over a death by a signal after the save.
    """
    telling = [code for code in codes if code > 1 and code != RESUMABLE]
    resumable = [code for code in codes if code == RESUMABLE]
    code = (telling or resumable or list(codes) or [0])[0]
    return code if code >= 0 else 128 - code


def peek_exit_code(pid: int) -> Optional[int]:
    """Exit code of an ended child (-n for signal n), which stays to be reaped; None if it runs or has been reaped."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


class StoppableAgent(LocalElasticAgent):
    """torchrun's agent of one node, which passes stop signals on and then waits for its workers."""

    def __init__(self, spec: WorkerSpec, stop_grace_s: float, **options: object) -> None:
        """Set up the agent of this node.

        Args:
            spec: the workers.
            stop_grace_s: seconds between a stop signal and SIGKILL.
            **options: those of LocalElasticAgent.
        """
        super().__init__(spec, **options)
        self._stop_grace_s = stop_grace_s
        self._deadline: Optional[float] = None
        self._received: List[signal.Signals] = []
        self._impatience = Impatience(SUPERVISED in os.environ)
        self._insisted: Optional[signal.Signals] = None
        self._starting = False

    def receive(self, number: int, frame: Optional[FrameType]) -> None:
        """Signal handler: note the signal for the monitoring loop; before there are workers, leave at once."""
        if not self._starting:
            sys.exit(128 + number)
        if self._impatience.grows(number):
            self._insisted = signal.Signals(number)
        else:
            self._received.append(FORWARDED[signal.Signals(number)])

    def _start_workers(self, worker_group: WorkerGroup) -> Dict[int, int]:
        self._starting = True
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        pids = [worker.id for worker in worker_group.workers]
        while self._received:
            self._forward(self._received.pop(0), pids)
        if self._insisted is not None:
            say(f"{self._insisted.name} after an earlier request: ending the workers")
            self._deadline, self._insisted = math.inf, None
            signal_workers(signal.SIGKILL, pids)
        if self._deadline is not None and self._wait_for_the_rest(pids):
            return RunResult(state=WorkerState.HEALTHY)
        result = super()._monitor_workers(worker_group)
        codes = {failure.exitcode for failure in result.failures.values()}
        if self._deadline is not None or codes & FINAL_CODES:
            self._remaining_restarts = 0
        return result

    def _shutdown(self, *args: object, **options: object) -> None:
        super()._shutdown(*args, **options)
        if self._starting:
            # Processes that a worker had started and that outlived it.
            signal_workers(signal.SIGKILL, [worker.id for worker in self.get_worker_group().workers if worker.id])

    def _forward(self, number: signal.Signals, pids: List[int]) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + self._stop_grace_s
        say(f"passing {number.name} on to the workers, which have {self._stop_grace_s:g} s to save and leave")
        signal_workers(number, pids)

    def _wait_for_the_rest(self, pids: List[int]) -> bool:
        """Whether some workers have left with 75 or 0 and the others may still take their time.

        The agent ends the rest 30 s after the first worker that leaves with another code than 0.
        """
        codes = [peek_exit_code(pid) for pid in pids]
        if None not in codes:
            return False
        if time.monotonic() >= self._deadline:
            say(f"workers are still running {self._stop_grace_s:g} s after the signal (--stop_grace_s): killing them")
            signal_workers(signal.SIGKILL, pids)
            self._deadline = math.inf
            return False
        return all(code in (None, 0, RESUMABLE) for code in codes)


def signal_workers(number: signal.Signals, pids: Sequence[int]) -> None:
    """Send a signal to the process groups of workers, except of those that have ended and are not reaped yet."""
    for pid in pids:
        try:
            if peek_exit_code(pid) is None:
                os.killpg(pid, number)
        except ProcessLookupError:
            pass


def describe_exit(code: int) -> str:
    """How a worker ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def say(message: str) -> None:
    """Print a line for the user, on standard error."""
    print(f"megatron_fbt.launch: {message}", file=sys.stderr, flush=True)


def build_parser() -> ArgumentParser:
    """torchrun's own parser with --stop_grace_s."""
    parser = torchrun.get_args_parser()
    parser.prog = "python -m megatron_fbt.launch"
    parser.epilog = EXAMPLE
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument(
        "--stop-grace-s",
        "--stop_grace_s",
        type=float,
        default=600.0,
        help="Seconds that the workers have to save and leave after a stop signal, before they are killed.",
    )
    return parser


def build_agent(args: Namespace) -> StoppableAgent:
    """The agent that torchrun would make from these arguments."""
    one_node = torchrun.parse_min_max_nnodes(args.nnodes)[1] == 1
    alone = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None and one_node
    if args.standalone or alone:
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = 29500
    config, command, command_args = torchrun.config_from_args(args)
    rendezvous = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    master_addr, master_port = None, None
    if config.rdzv_backend == "static":
        master_addr, master_port = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=-1)
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=command,
        args=tuple(command_args),
        rdzv_handler=get_rendezvous_handler(rendezvous),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=master_addr,
        master_port=master_port,
        local_addr=config.local_addr,
    )
    return StoppableAgent(
        spec,
        args.stop_grace_s,
        logs_specs=config.logs_specs,
        start_method=config.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
    )


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the workers of this node to their end.

    Args:
        argv: torchrun's arguments; None = the command line's.

    Returns:
        The exit code, see `choose_exit_code`.
    """
    agent = build_agent(build_parser().parse_args(argv))
    # It calls every code but 0 a failure, a stop too; how the workers ended is said below.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    # The agent would raise inside its own code on the signals listed here; ours are only noted.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    for number in FORWARDED:
        if not stays_ignored(number):
            signal.signal(number, agent.receive)
    try:
        result = agent.run()
    except SignalException as ended:
        return 128 + ended.sigval
    finally:
        agent.get_worker_group().spec.rdzv_handler.shutdown()
    if result is None:
        say("another node closed the rendezvous before this one could join: start all nodes again")
        return 1
    exit_code = choose_exit_code([failure.exitcode for failure in result.failures.values()])
    if exit_code == RESUMABLE:
        say(f"stopped by a signal; the same command goes on from the checkpoint (exit code {RESUMABLE})")
    for rank, failure in result.failures.items():
        if failure.exitcode != RESUMABLE:
            say(f"rank {rank} (pid {failure.pid}) {describe_exit(failure.exitcode)}")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
