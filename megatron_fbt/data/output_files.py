"""Output files that are there whole or not at all, even if the process is killed or another one writes them, too."""

import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Dict

from megatron_fbt.core.manifest import sync_path
from megatron_fbt.data.output_lock import NO_LOCKS
from megatron_fbt.errors import ConfigError, DataError

_NAME_BYTES = 255 - len("-00000-of-00000.manifest.json.partial")
"""Bytes of a prefix's name that leave room for all that is added to it."""


def check_prefix(output: str) -> None:
    """Refuse what is no prefix of file names.

    Raises:
        ConfigError: It names no file, or is too long.
    """
    name = os.path.basename(output)
    if name in ("", ".", ".."):
        raise ConfigError(f"--output is '{output}': it must be the prefix of file names, such as data/train")
    if len(os.fsencode(name)) > _NAME_BYTES:
        raise ConfigError(f"--output: the name {name} has more than {_NAME_BYTES} bytes; give a shorter one")


def partial_path(path: Path) -> Path:
    """Name of a file before it is complete; always the same, so that the next run replaces what a killed one left."""
    return path.with_name(path.name + ".partial")


def open_alone(path: Path, wait: bool = False) -> BinaryIO:
    """Open an empty file for writing, unbuffered, that no other process writes at the same time.

    Args:
        path: Of the file; what it held goes.
        wait: Wait for another writer instead of failing.

    Raises:
        DataError: Another process is writing it.
        OSError: It cannot be opened.
    """
    while True:
        stream = open(path, "ab", buffering=0)
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if _is_at(stream, path):
                stream.truncate(0)
                return stream
            stream.close()  # the other writer has finished, and given it its name
        except BlockingIOError as error:
            stream.close()
            raise DataError(f"output {path}: another process is writing it; wait for it, or end it") from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                stream.close()
                raise
            stream.truncate(0)
            return stream


def _is_at(stream: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(stream.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def write_json(path, content: Dict[str, Any]) -> None:
    """Write a JSON file so that it is there whole, and safely on the disk, or not at all.

    Processes that write the same one at once wait for each other.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(path).absolute()
    partial = partial_path(path)
    with open_alone(partial, wait=True) as stream:
        try:
            data = memoryview(json.dumps(content, indent=1).encode("ascii") + b"\n")
            while data:
                data = data[stream.write(data) :]
            os.fsync(stream.fileno())
            os.replace(partial, path)
            sync_path(path.parent)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
