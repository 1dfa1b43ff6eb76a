"""What asks a run to save and leave: a signal, the wall clock, a file."""

import contextlib
import time
from pathlib import Path
from typing import Optional

from megatron_fbt.training.signals import SignalWatcher

STOP_FILE = "stop"


class StopRequests:
    """Looked at once in each step; on any rank a signal, on rank 0 the clock and the file <run.dir>/stop as well.

    Args:
        signals: already watching.
        run_dir: the run folder.
        wall_clock_limit_s: seconds since the process started to train; None = no limit.
        is_main: whether this is rank 0.
    """

    def __init__(self, signals: SignalWatcher, run_dir: Path, wall_clock_limit_s: Optional[float], is_main: bool):
        self.signals, self.is_main, self.limit = signals, is_main, wall_clock_limit_s
        self.file = Path(run_dir) / STOP_FILE

    @property
    def requested(self) -> Optional[str]:
        """What asks; None if nothing does."""
        if self.signals.requested is not None or not self.is_main:
            return self.signals.requested
        if self.limit is not None and time.monotonic() - self.signals.began >= self.limit:
            return "training.wall_clock_limit_s"
        return str(self.file) if self.file.exists() and not self.file.is_dir() else None

    def obeyed(self) -> None:
        """Remove the file, which would stop the resumed run as well; the run has saved and leaves, whatever comes."""
        if self.is_main:
            with contextlib.suppress(OSError):
                self.file.unlink()
