"""How a command tells its user of the error that ends it. Needs no torch."""

import os
import sys
import time
import traceback
from typing import Mapping

from megatron_fbt.errors import FBTError

SPEAKER_S = 10.0
"""By which the first rank of a machine may find an error later than another one."""


def tell(error: FBTError) -> int:
    """Write an error to standard error, and give its exit code.

    It is one write: under a launcher Python does not buffer, and the ranks of a node share a pipe.
    """
    _write(f"error: {error}\n")
    return error.exit_code


def end_rank(error: Exception, environment: Mapping[str, str] = os.environ) -> int:
    """Tell the user of what ends a rank if this one is to speak, and give the exit code.

    Ranks that have met have agreed in the error's attribute `speaks`; before that, the first one of a machine speaks.
    torchrun ends it as soon as another one has left, which therefore waits a while.

    Args:
        error: an FBTError is told without a traceback.
        environment: where torchrun says which rank this is.
    """
    first = environment.get("LOCAL_RANK", "0") == "0"
    known = isinstance(error, FBTError)
    if not getattr(error, "speaks", first):
        if not hasattr(error, "speaks") and "TORCHELASTIC_RUN_ID" in environment:
            time.sleep(SPEAKER_S)
        return error.exit_code if known else 1
    if known:
        return tell(error)
    _write("".join(traceback.format_exception(error)))
    return 1


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
