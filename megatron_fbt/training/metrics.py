"""metrics.jsonl: one JSON object for each executed training step."""

import contextlib
import json
import math
import os
import sys
from collections import deque
from pathlib import Path
from typing import Any, Deque, Dict, List, Mapping, Optional, Union


def json_ready(value: Any) -> Any:
    """Turn a value into what strict JSON can hold.

    Args:
        value: numbers, strings, None, lists, tuples and mappings of them; NumPy scalars and one-element tensors too.

    Returns:
        The same structure; NaN and the infinities, for which JSON has no spelling, become None.

    Raises:
        TypeError: for any other type.
    """
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if hasattr(value, "item"):
        return json_ready(value.item())
    raise TypeError(f"cannot write a {type(value).__name__} as JSON: {value!r}")


def replace_file(path: Union[str, Path], text: str, durable: bool = True) -> None:
    """Write a file so that readers see the old content or the new one, never a part.

    Args:
        path: the file; its folder must exist.
        text: the whole new content.
        durable: wait until it is on the disk, so that it survives a loss of power.

    Raises:
        OSError: with the path of the file, which is as before.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:  # of a full disk the system tells no path
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def number(value: Any) -> Optional[float]:
    """A finite number of a row that may have been written by anything; None for all else."""
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return value if usable else None


def read_metrics(path: Union[str, Path]) -> List[Dict[str, Any]]:
    """Read the rows of a metrics.jsonl, in file order; a torn line (from a killed run) is left out.

    Args:
        path: the file; a missing one has no rows.
    """
    path = Path(path)
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


class MetricsLog:
    """Append-only log of training steps, one JSON object a line.

    Only one process of a run writes it. Every row has the field `step`. A row that cannot be written waits for the next
    attempt, so that none is lost while a disk is full.
    """

    def __init__(self, path: Union[str, Path]) -> None:
        self._path = Path(path)
        self._file = None
        self._waiting: Deque[str] = deque()

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row and hand it to the operating system at once.

        Args:
            row: field names and values, see `json_ready`; a non-finite number is written as null.

        Raises:
            OSError: with the path of the file; the row waits.
        """
        self._waiting.append(json.dumps(json_ready(row), allow_nan=False) + "\n")
        self.flush()

    def flush(self) -> None:
        """Write the rows that wait.

        Raises:
            OSError: with the path of the file; those that could not be written go on waiting.
        """
        try:
            while self._waiting:
                if self._file is None:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    self._mend_last_line()
                    self._file = open(self._path, "a", encoding="utf-8")
                self._file.write(self._waiting[0])
                self._file.flush()
                self._waiting.popleft()
        except OSError as error:
            with contextlib.suppress(OSError):  # the row's part that is still in the file's buffer
                self.close()
            self._file = None
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def cut_after(self, step: int) -> int:
        """Drop the rows of steps that a resumed run will execute again.

        Args:
            step: `step` of the last row to keep; -1 drops every row.

        Returns:
            The number of rows dropped; torn lines go too and are not counted.
        """
        self.close()
        if not self._path.exists():
            return 0
        rows = read_metrics(self._path)
        kept = [row for row in rows if isinstance(row.get("step"), int) and row["step"] <= step]
        replace_file(self._path, "".join(json.dumps(json_ready(row)) + "\n" for row in kept))
        return len(rows) - len(kept)

    def close(self) -> None:
        """Close the file; a later append opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _mend_last_line(self) -> None:
        """Cut a last line without its newline, so that the next row does not end up behind half a row."""
        if not self._path.exists():
            return
        with open(self._path, "rb+") as file:
            content = file.read()
            if content and not content.endswith(b"\n"):
                file.truncate(content.rfind(b"\n") + 1)
