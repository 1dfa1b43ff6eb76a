"""Signals that ask a run to save and leave."""

import os
import signal
import time
from types import FrameType
from typing import Dict, Mapping, Optional

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
IMPATIENT = (signal.SIGTERM, signal.SIGINT)
"""The second of these is a person's; warnings and the end of a terminal may come any number of times."""
ECHO_SECONDS = 1.0
"""A shell and its helpers, such as timeout, may each deliver one and the same request."""
SUPERVISED = "MEGATRON_FBT_SUPERVISED"
"""Environment variable of a process whose parent passes signals on, and ends it where it must end at once."""


def is_supervised(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher or a job manager passes signals on to this process, and has means of its own to end it."""
    return SUPERVISED in environment or "TORCHELASTIC_RUN_ID" in environment


def stays_ignored(number: int) -> bool:
    """Whether a signal was ignored on purpose: SIGHUP by nohup. Shells ignore SIGINT for whatever runs behind them."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


class Impatience:
    """Tells a person's second request from another delivery of the first one.

    Args:
        supervised: every request may come twice, the second time at any time later; none is a person's second one.
    """

    def __init__(self, supervised: bool):
        self._supervised = supervised
        self._first: Optional[float] = None

    def grows(self, number: int) -> bool:
        """Whether this signal asks to end at once: SIGTERM or SIGINT, a second or more after the first of them."""
        if self._supervised or number not in IMPATIENT:
            return False
        now = time.monotonic()
        if self._first is None:
            self._first = now
        return now - self._first >= ECHO_SECONDS


class SignalWatcher:
    """Context manager that turns SIGTERM, SIGINT, SIGUSR1 and SIGHUP into a request that the training loop looks at.

    `requested` is the name of the first signal ("SIGTERM"), None before. SIGTERM or SIGINT a second or more after the
    first of these two ends the process at once, as it would without the watcher; SIGUSR1 and SIGHUP never do.

    Under a launcher, or as a task of srun, no signal does: srun signals the ranks and the launcher, which signals the
    ranks again, on a busy machine much later. There the launcher ends them (see megatron_fbt.launch), or SLURM.
    SIGHUP that is ignored, as by nohup, stays so.
    """

    def __init__(self) -> None:
        self.requested: Optional[str] = None
        self.began = time.monotonic()
        """When the process began to watch."""
        self._impatience = Impatience(is_supervised())
        self._previous: Dict[int, object] = {}

    def __enter__(self) -> "SignalWatcher":
        for number in STOP_SIGNALS:
            if not stays_ignored(number):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        if self.requested is None:
            self.requested = signal.Signals(number).name
        if self._impatience.grows(number):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
