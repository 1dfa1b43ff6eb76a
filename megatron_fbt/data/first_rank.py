"""The first rank does something for all: tokens and indices are built once, and a failure ends every rank."""

import time
from typing import Callable, Iterator, List, Optional, Tuple, TypeVar

import torch.distributed as dist

from megatron_fbt.errors import ConfigError, DataError, FBTError

Result = TypeVar("Result")

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


def first_rank_first(build: Callable[[], Result]) -> Result:
    """Build on rank 0, then on the others, which find the index cache filled; collective if there is a process group.

    Raises:
        FBTError: a rank has failed; on all ranks.
    """
    if not dist.is_initialized():
        return build()
    result, failure = None, None
    for turn_of_first in (True, False):
        if (dist.get_rank() == 0) == turn_of_first:
            try:
                result = build()
            except Exception as error:  # the others are waiting, whatever went wrong
                failure = error
        _fail_together(failure)
    return result


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
