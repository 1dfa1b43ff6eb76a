"""Signals that ask a run to save and leave."""

import os
import signal
import time
from types import FrameType
from typing import Dict, Optional

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# A launcher and a job manager may each deliver one and the same request.
ECHO_SECONDS = 1.0


class SignalWatcher:
    """Context manager that turns SIGTERM, SIGINT and SIGUSR1 into a request that the training loop looks at.

    `requested` is the name of the first signal ("SIGTERM"), None before. Another one, a second or more later, ends the
    process at once, as it would without the watcher.
    """

    def __init__(self) -> None:
        self.requested: Optional[str] = None
        self.began = time.monotonic()
        """When the process began to watch."""
        self._requested_at = 0.0
        self._previous: Dict[int, object] = {}

    def __enter__(self) -> "SignalWatcher":
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        now = time.monotonic()
        if self.requested is None:
            self.requested, self._requested_at = signal.Signals(number).name, now
        elif now - self._requested_at >= ECHO_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
