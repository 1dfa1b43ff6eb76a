"""Progress on standard error: a bar in a terminal, plain lines elsewhere, nothing for short work."""

import sys
import time
from typing import Optional


class Progress:
    """Reports bytes, rate and remaining time of a long piece of work.

    Use as a context manager; ``update`` is cheap.
    """

    def __init__(self, total_bytes: int, quiet_s: float = 3.0, interval_s: float = 10.0, stream=None):
        """
        Args:
            total_bytes: Bytes on disk that the work will use.
            quiet_s: Seconds during which nothing is shown.
            interval_s: Seconds between two plain lines.
            stream: Where to write; standard error by default.
        """
        self._total = max(total_bytes, 1)
        self._stream = stream or sys.stderr
        self._begin = time.monotonic()
        self._next = self._begin + quiet_s
        self._interval = interval_s
        self._bar = None
        self._task: Optional[int] = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done_bytes: int, documents: int, tokens: int) -> None:
        """Tell how far the work is.

        Args:
            done_bytes: Bytes on disk used so far.
            documents: Documents written so far.
            tokens: Tokens written so far.
        """
        now = time.monotonic()
        if now < self._next:
            return
        if self._stream.isatty():
            self._show_bar(done_bytes, documents, tokens)
            self._next = now + 0.1
            return
        rate = done_bytes / (now - self._begin)
        remaining = duration((self._total - done_bytes) / rate) if rate > 0 else "unknown"
        print(
            f"{done_bytes / self._total:4.0%}  {documents:,} documents  {tokens:,} tokens  "
            f"{done_bytes / 1e6:,.1f} of {self._total / 1e6:,.1f} MB  {rate / 1e6:.2f} MB/s  ETA {remaining}",
            file=self._stream,
            flush=True,
        )
        self._next = now + self._interval

    def _show_bar(self, done_bytes: int, documents: int, tokens: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar

        if self._bar is None:
            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TextColumn("ETA"), TimeRemainingColumn())
            self._bar = Bar(*columns, TextColumn("{task.description}"), console=Console(file=self._stream))
            self._task = self._bar.add_task("", total=self._total)
            self._bar.start()
        self._bar.update(self._task, completed=done_bytes, description=f"{documents:,} documents, {tokens:,} tokens")


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, e.g. ``1:02:03``."""
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
