"""Progress of a known number of equal pieces of work, on standard error; nothing for the first seconds."""

import sys
import time
from typing import Optional, TextIO

from megatron_fbt.data.progress import duration


class PieceProgress:
    """Counts pieces; use as a context manager.

    Args:
        total: Pieces of the whole work.
        what: What a piece is, in the plural.
        quiet_s: Seconds during which nothing is shown.
        interval_s: Seconds between two lines where standard error is no terminal.
    """

    def __init__(
        self, total: int, what: str, quiet_s: float = 5.0, interval_s: float = 10.0, stream: Optional[TextIO] = None
    ):
        self._total, self._what, self._interval = total, what, interval_s
        self._stream = sys.stderr if stream is None else stream
        self._begin = time.monotonic()
        self._next = self._begin + quiet_s
        self._done, self._shown = 0, False

    def __enter__(self) -> "PieceProgress":
        return self

    def __exit__(self, *exception) -> None:
        if self._shown and self._stream.isatty():
            self._stream.write("\r\033[K")

    def advance(self) -> None:
        """One piece more is done."""
        self._done += 1
        now = time.monotonic()
        if now < self._next or self._done >= self._total:
            return
        remaining = (now - self._begin) / self._done * (self._total - self._done)
        line = f"{self._done / self._total:4.0%}  {self._done:,} of {self._total:,} {self._what}"
        line += f"  ETA {duration(remaining)}"
        terminal, self._shown = self._stream.isatty(), True
        self._stream.write(f"\r\033[K{line}" if terminal else line + "\n")
        self._stream.flush()
        self._next = now + (0.2 if terminal else self._interval)
