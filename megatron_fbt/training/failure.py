"""How ranks fail together: one message, and nobody waits for a rank that has given up."""

import os
from typing import Callable, List, Optional

import torch.distributed as dist

from megatron_fbt.errors import CheckpointError

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


def on_first_rank(action: Callable[[], None]) -> None:
    """Do something on rank 0 while the others wait; collective.

    Raises:
        CheckpointError: it failed; on all ranks.
    """
    message: List[Optional[str]] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except CheckpointError as error:
            message[0] = str(error)
        except Exception as error:
            message[0] = f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(message, src=0)
    if message[0] is not None:
        raise CheckpointError(message[0])
