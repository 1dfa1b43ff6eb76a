"""How ranks fail together: one message, and nobody waits for a rank that has given up."""

import os
from typing import Any, Callable, List, Optional, TypeVar

import torch.distributed as dist

from megatron_fbt.errors import CheckpointError, FBTError

T = TypeVar("T")
_CLAIM = "megatron_fbt/failure"


def speaks_first() -> bool:
    """Whether this rank tells the user about the failure that it is in: the first one to fail does.

    The others fail because of it, with errors about closed connections. The question goes to the store through which
    the ranks met, so that no rank has to wait for another one.
    """
    if not dist.is_initialized():
        return os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        return dist.distributed_c10d._get_default_store().add(_CLAIM, 1) == 1
    except Exception:  # the store went away with a failed rank: better two messages than none
        return True


def on_first_rank(action: Callable[[], T], group: Optional[dist.ProcessGroup] = None) -> T:
    """Do something on rank 0 while the others wait; collective.

    Returns:
        What the action returned, on all ranks.

    Raises:
        FBTError: it failed; on all ranks. A CheckpointError unless it raised another one itself.
    """
    results: List[T] = []
    failure = _failure_of(lambda: results.append(action())) if dist.get_rank() == 0 else None
    told = [(failure, results)]
    dist.broadcast_object_list(told, src=0, group=group)
    failure, results = told[0]
    if failure is not None:
        raise failure
    return results[0]


def on_all_ranks(action: Callable[[], T], group: Optional[dist.ProcessGroup] = None) -> Optional[List[T]]:
    """Do something on every rank, each by itself; collective.

    Returns:
        On rank 0 what the ranks returned, in their order; None on the others.

    Raises:
        FBTError: it failed on some rank; on all ranks, with the message of the first of those that failed.
    """
    results: List[T] = []
    failure = _failure_of(lambda: results.append(action()))
    first = dist.get_rank() == 0
    outcomes = [None] * dist.get_world_size() if first else None
    dist.gather_object((failure, results), outcomes, dst=0, group=group)
    if first:
        failure = next((outcome[0] for outcome in outcomes if outcome[0] is not None), None)
    told = [failure]
    dist.broadcast_object_list(told, src=0, group=group)
    if told[0] is not None:
        raise told[0]
    return [outcome[1][0] for outcome in outcomes] if first else None


def _failure_of(action: Callable[[], Any]) -> Optional[FBTError]:
    """What an action raises, as something that can be told to other ranks."""
    try:
        action()
    except FBTError as error:
        return type(error)(str(error))
    except Exception as error:
        return CheckpointError(f"{type(error).__name__}: {error}")
    return None
