"""Runs a function in several real gloo processes and brings back values, tracebacks and what they print."""

import contextlib
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any, Callable, Iterator, List

_GRACE_S = 2.0
"""After the first failure the other ranks get this long to report theirs, which often names the real cause."""


class DistributedFailure(AssertionError):
    """At least one rank raised, died or did not finish; the message holds every traceback known."""


def run_distributed(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60, init_group: bool = True
) -> List[Any]:
    """Call ``function(rank, world_size, *args)`` in ``world_size`` processes of their own.

    Args:
        function: Importable by name from its module.
        world_size: Number of processes, each with one thread.
        args: Picklable arguments.
        timeout: Seconds for the whole call, start of the processes included.
        init_group: Give each process an initialised gloo group. Without it, RANK, WORLD_SIZE, LOCAL_RANK,
            MASTER_ADDR and MASTER_PORT are set all the same; the store behind that address belongs to the caller.

    Returns:
        The return values in the order of the ranks; they must be picklable (tensors are).

    Raises:
        DistributedFailure: A rank raised, died or was still running at the timeout.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=timeout), wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preload"])
    payload = pickle.dumps((function, args))
    environment = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    processes, receivers = [], []
    deadline = time.monotonic() + timeout
    with _shown_here() as logs:
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_worker,
                    args=(rank, world_size, payload, sender, logs, environment, timeout, init_group),
                )
                process.start()
                sender.close()
                processes.append(process)
                receivers.append(receiver)
            return _collect(processes, receivers, deadline, timeout)
        finally:
            _end(processes)


@contextlib.contextmanager
def _shown_here() -> Iterator[List[str]]:
    """Files for what processes print and complain; afterwards it is said again, by this process.

    Processes of the fork server would write to wherever it wrote when it began, in an earlier test.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [os.path.join(folder, name) for name in ("stdout", "stderr")]
        try:
            yield logs
        finally:
            for path, stream in zip(logs, (sys.stdout, sys.stderr)):
                with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8", errors="replace") as file:
                    stream.write(file.read())
                stream.flush()


def _worker(rank, world_size, payload, sender, logs, environment, timeout, init_group):
    for descriptor, path in enumerate(logs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    # TCPStore of the parent process: keeps torch's env:// start from opening a second one on rank 0.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        import torch

        torch.set_num_threads(1)
        if init_group:
            torch.distributed.init_process_group(
                "gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
            )
        function, args = pickle.loads(payload)
        # Plain pickle: torch's own reduction would pass file descriptors that die with this process.
        result = pickle.dumps(("value", function(rank, world_size, *args)))
    except BaseException:
        sender.send_bytes(pickle.dumps(("error", traceback.format_exc())))
        sender.close()
        os._exit(1)
    sender.send_bytes(result)
    sender.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _collect(processes, receivers, deadline, timeout) -> List[Any]:
    """Wait for one message or the death of every rank; raise with all that is known after a failure."""
    waiting = {receiver: rank for rank, receiver in enumerate(receivers)}
    values, errors, failed = {}, {}, False
    while waiting:
        remaining = deadline - time.monotonic()
        ready = wait(list(waiting), timeout=max(remaining, 0))
        if not ready:
            break
        for receiver in ready:
            rank = waiting.pop(receiver)
            try:
                kind, content = pickle.loads(receiver.recv_bytes())
            except EOFError:
                processes[rank].join(5)
                kind, content = "error", f"died without a word, exit code {processes[rank].exitcode}"
            (values if kind == "value" else errors)[rank] = content
        if errors and not failed:
            failed = True
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    if errors or waiting:
        parts = [f"--- rank {rank} ---\n{text}" for rank, text in sorted(errors.items())]
        if waiting:
            reason = f"stopped {_GRACE_S:g} s after the first failure" if failed else f"not finished in {timeout:g} s"
            parts.append(f"--- ranks {sorted(waiting.values())}: {reason} ---")
        raise DistributedFailure("\n" + "\n".join(parts))
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return [values[rank] for rank in range(len(processes))]


def _end(processes) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()
