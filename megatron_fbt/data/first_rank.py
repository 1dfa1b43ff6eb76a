"""The first rank does something for all: tokens and indices are built once, and a failure ends every rank.

Where a cache is on a disk of each node, the first rank of each other node finds nothing and does it again for its node.
"""

import socket
import time
from collections import deque
from typing import Callable, Iterator, List, Optional, Tuple, TypeVar

import torch.distributed as dist

from megatron_fbt.errors import ConfigError, DataError, FBTError

Result = TypeVar("Result")

RANK_0, NODE_FIRST, OTHER = range(3)
"""When a rank builds: rank 0 first, then the first ranks of the other nodes."""
SIGN_OF_LIFE_S = 20.0
"""Seconds after which a working first rank lets the waiting ones know, whose collectives would time out."""


def is_first_rank() -> bool:
    """Whether this process is the one that does what needs doing once."""
    return not dist.is_initialized() or dist.get_rank() == 0


def from_first_rank(work: Callable[[], Iterator[str]]) -> str:
    """What work on rank 0 comes to, on all ranks; collective if there is a process group.

    Args:
        work: gives "" after each piece of work, and at last its result.

    Raises:
        FBTError: the work has failed; on all ranks.
    """
    result, failure = "", None
    if is_first_rank():
        try:
            result = _work_with_signs_of_life(work)
        except Exception as error:  # the others are waiting, whatever went wrong
            failure = error
    if not dist.is_initialized():
        if failure is not None:
            raise failure
        return result
    message: List[Optional[str]] = [result if failure is None else None]
    waiting = True
    while waiting:
        dist.broadcast_object_list(message, src=0)
        waiting = message[0] == "" and dist.get_rank() != 0
    _fail_together(failure)
    return message[0] or ""


def _work_with_signs_of_life(work: Callable[[], Iterator[str]]) -> str:
    result, told = "", time.monotonic()
    for result in work():
        if not result and dist.is_initialized() and time.monotonic() - told > SIGN_OF_LIFE_S:
            dist.broadcast_object_list([""], src=0)
            told = time.monotonic()
    return result


def first_rank_first(build: Callable[[bool], Result]) -> Result:
    """Build on rank 0, then on the first rank of every other node, then on the others; collective if there is a group.

    Each finds what those before it have put into the cache.

    Args:
        build: gets whether this rank puts into the cache what it does not find there.

    Raises:
        FBTError: a rank has failed; on all ranks.
    """
    if not dist.is_initialized():
        return build(True)
    result, failure = None, None
    mine = _turn()
    for turn in (RANK_0, NODE_FIRST, OTHER):
        if turn == mine:
            try:
                result = build(mine != OTHER)
            except Exception as error:  # the others are waiting, whatever went wrong
                failure = error
        _fail_together(failure)
    return result


def on_other_nodes(missing: Callable[[], bool], work: Callable[[], Iterator[str]]) -> None:
    """Do on the first rank of every other node what rank 0 has done, where it is missing; collective, if there is a
    group.

    Raises:
        FBTError: a rank has failed; on all ranks.
    """
    if not dist.is_initialized():
        return
    failure = None
    if _turn() == NODE_FIRST:
        try:
            if missing():
                deque(work(), maxlen=0)
        except Exception as error:  # the others are waiting, whatever went wrong
            failure = error
    _fail_together(failure)


def _turn() -> int:
    """When this rank builds; collective."""
    nodes: List[Optional[str]] = [None] * dist.get_world_size()
    dist.all_gather_object(nodes, node_name())
    rank = dist.get_rank()
    return RANK_0 if rank == 0 else NODE_FIRST if nodes[rank] not in nodes[:rank] else OTHER


def node_name() -> str:
    """What tells this node from the others."""
    return socket.gethostname()


def _fail_together(failure: Optional[Exception]) -> None:
    messages: List[Optional[Tuple[str, bool]]] = [None] * dist.get_world_size()
    mine = None if failure is None else (str(failure), isinstance(failure, ConfigError))
    dist.all_gather_object(messages, mine)
    if failure is not None:
        if isinstance(failure, FBTError):
            raise failure
        raise DataError(f"the data sets cannot be built: {type(failure).__name__}: {failure}") from failure
    for rank, message in enumerate(messages):
        if message is not None:
            raise (ConfigError if message[1] else DataError)(f"rank {rank}: {message[0]}")
