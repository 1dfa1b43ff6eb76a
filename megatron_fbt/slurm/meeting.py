"""How the nodes of a preflight tell each other what they found: a store on the first node, and pair by pair."""

import json
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Callable, List, Optional, Tuple

import torch
import torch.distributed as dist

from megatron_fbt.slurm.node_facts import NodeFacts
from megatron_fbt.training.machine import median_seconds

MEGABYTES = {"cpu": 4, "cuda": 256}
"""10^6 bytes of what is sent to a neighbour and reduced."""
REPEATS = 3
POLL_S = 0.05
FOLDER_WAIT_S = 20.0
"""A shared folder may show another node's file so much later."""


class Meeting:
    """All nodes, one process each; every method is called by all of them.

    Args:
        address: of the first node.
        port: free there.
        rank: of this node.
        size: number of nodes.
        timeout_s: seconds to wait for a node.
    """

    def __init__(self, address: str, port: int, rank: int, size: int, timeout_s: float):
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        wait = timedelta(seconds=1.5 * timeout_s)  # the first node's word on who is missing comes after its own wait
        self.store = dist.TCPStore(address, port, size, rank == 0, wait, wait_for_workers=False)

    def gather(self, name: str, facts: NodeFacts) -> Tuple[List[NodeFacts], List[int]]:
        """On the first node what all found, and the numbers of those that did not answer in time; elsewhere nothing."""
        self.store.set(f"{name}/{self.rank}", json.dumps(asdict(facts)))
        if self.rank:
            return [], []
        deadline = time.monotonic() + self.timeout_s
        waiting = set(range(self.size))
        while waiting and time.monotonic() < deadline:
            waiting -= {rank for rank in waiting if self.store.check([f"{name}/{rank}"])}
            time.sleep(POLL_S)
        there = [rank for rank in range(self.size) if rank not in waiting]
        return [NodeFacts(**json.loads(self.store.get(f"{name}/{rank}"))) for rank in there], sorted(waiting)

    def tell(self, name: str, code: Optional[int] = None) -> int:
        """A number from the first node to all; nobody leaves before all have it."""
        if self.rank == 0:
            self.store.set(name, str(code))
        told = int(self.store.get(name))
        self.store.add(f"{name}/heard", 1)
        deadline = time.monotonic() + min(self.timeout_s, 10.0)
        while self.rank == 0 and self.store.add(f"{name}/heard", 0) < self.size and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return told

    def clock_skew(self) -> float:
        """Seconds by which this node's clock is surely off the first node's: what the answer's way may explain is 0."""
        if self.rank:
            self.store.get(f"ping/{self.rank}")
            self.store.set(f"pong/{self.rank}", repr(time.time()))
            return float(self.store.get(f"skew/{self.rank}"))
        for rank in range(1, self.size):
            asked = time.time()
            self.store.set(f"ping/{rank}", "?")
            theirs = float(self.store.get(f"pong/{rank}"))
            answered = time.time()
            skew = max(theirs - answered, 0.0) + min(theirs - asked, 0.0)
            self.store.set(f"skew/{rank}", repr(skew))
        return 0.0

    def sees_folder(self, folder: Path) -> bool:
        """Whether the first node's file is seen here and this node's file there."""
        if self.rank == 0:
            marks = {rank: folder / str(rank) for rank in range(self.size)}
            seen = {rank for rank in marks if _appears(marks[rank])}
            for rank in marks:
                self.store.set(f"seen/{rank}", str(int(rank in seen)))
            return True
        here = _appears(folder / "0")
        return self.store.get(f"seen/{self.rank}") == b"1" and here

    def speeds(self) -> Tuple[float, float]:
        """GB/s with the better neighbour, and of an all-reduce over all nodes."""
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        wait = timedelta(seconds=self.timeout_s)
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = dist.PrefixStore("group", self.store)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=wait)
        try:
            tensor = torch.ones(MEGABYTES[device.type] * 250_000, device=device)
            pairs = [self._exchange(tensor, phase) for phase in (0, 1)]
            reduced = _gb_s(lambda: dist.all_reduce(tensor), tensor)
            return max(pairs), reduced
        finally:
            dist.destroy_process_group()

    def _exchange(self, tensor: torch.Tensor, phase: int) -> float:
        """GB/s with the neighbour of a phase: (0, 1), (2, 3) ... or (1, 2), (3, 4) ...; 0 for a node left over."""
        dist.barrier()
        forward = self.rank % 2 == phase
        partner = self.rank + (1 if forward else -1)
        if not 0 <= partner < self.size:
            return 0.0
        received = torch.empty_like(tensor)

        def swap() -> None:
            operations = [dist.P2POp(dist.isend, tensor, partner), dist.P2POp(dist.irecv, received, partner)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        return _gb_s(swap, tensor)


def _gb_s(action: Callable[[], object], tensor: torch.Tensor) -> float:
    """10^9 bytes per second: a tensor's bytes over the median duration of an action."""
    return tensor.nbytes / median_seconds(action, tensor.device, REPEATS) / 1e9


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + FOLDER_WAIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
