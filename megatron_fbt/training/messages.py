"""What reaches the user's console beside the run's own lines."""

import logging
import sys
import warnings

# Category, beginning of the message (a regular expression).
HINTS_FOR_DEVELOPERS = (
    (FutureWarning, ""),
    (DeprecationWarning, ""),
    (UserWarning, "(Transformer Engine and )?Apex (is|are) not installed"),
    (UserWarning, "full scope is deprecated"),
)
LOGGERS_FOR_DEVELOPERS = ("megatron.core.dist_checkpointing.strategies.common",)
HINT_FOR_GPUS = ".*CUDA_DEVICE_MAX_CONNECTIONS"


def set_up_messages(is_main: bool) -> None:
    """Show this package's messages and everybody's warnings, but not the libraries' notes on their own working.

    Ranks other than 0 show warnings of this package and errors of the libraries, which would otherwise come once for
    each rank. Python's own switch (-W, PYTHONWARNINGS) shows all of a library's warnings.

    Args:
        is_main: whether this is rank 0.
    """
    logging.basicConfig(level=logging.WARNING if is_main else logging.ERROR, format="%(message)s")
    logging.getLogger("megatron_fbt").setLevel(logging.INFO if is_main else logging.WARNING)
    if sys.warnoptions:
        return
    for name in LOGGERS_FOR_DEVELOPERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for category, message in HINTS_FOR_DEVELOPERS:
        warnings.filterwarnings("ignore", message, category)


def hide_gpu_hints() -> None:
    """Where there is no GPU, hints on its settings and its generators are about nothing."""
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", HINT_FOR_GPUS, UserWarning)
