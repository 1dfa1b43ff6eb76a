"""One process at a time for each output: a lock on a file of its own, freed however its holder ends."""

import errno
import fcntl
import os
import socket
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Iterator, Sequence

from megatron_fbt.errors import DataError

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems without locks say."""


def lock_path(prefix) -> Path:
    """The file whose lock is that of an output."""
    return Path(f"{prefix}.lock")


@contextmanager
def locked(*prefixes: str) -> Iterator[None]:
    """Hold outputs, so that no other process writes or removes them.

    Only who holds a lock removes its file, as the last thing; what a killed process left of it locks nothing.

    Args:
        prefixes: Paths without .bin and .idx.

    Raises:
        DataError: Another process has one of them, or the folder cannot be written.
    """
    with ExitStack() as held:
        for prefix in prefixes:
            held.enter_context(_locked(prefix))
        yield


def remove_left_locks(prefixes: Sequence[str]) -> None:
    """Remove the lock files that killed processes left of these outputs."""
    for prefix in prefixes:
        if lock_path(prefix).exists():
            with suppress(DataError), _locked(prefix):
                pass


@contextmanager
def _locked(prefix: str) -> Iterator[None]:
    path = lock_path(prefix)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = _acquire(path, prefix)
    except OSError as error:
        raise DataError(f"output {prefix}: cannot be written: {error.strerror or error}") from error
    with stream:
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _acquire(path: Path, prefix: str) -> BinaryIO:
    while True:
        stream = open(path, "a+b", buffering=0)  # noqa: SIM115
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            with stream:
                raise DataError(
                    f"output {prefix}: another process{_holder(stream)} is writing it; wait for it, or end it"
                ) from error
        except OSError as error:
            if error.errno in NO_LOCKS:
                return stream
            stream.close()
            raise
        if _is_at(stream, path):
            _tell_holder(stream)
            return stream
        stream.close()  # the other process was just done with it


def _is_at(stream: BinaryIO, path: Path) -> bool:
    """Whether the path still leads to this file; it is opened again, as network file systems look anew only then."""
    try:
        with open(path, "rb") as again:
            return os.path.samestat(os.fstat(stream.fileno()), os.fstat(again.fileno()))
    except FileNotFoundError:
        return False


def _tell_holder(stream: BinaryIO) -> None:
    with suppress(OSError):  # on a full disk the lock holds without
        stream.truncate(0)
        stream.write(f"{os.getpid()} on {socket.gethostname()}".encode())


def _holder(stream: BinaryIO) -> str:
    with suppress(OSError):
        stream.seek(0)
        name = stream.read(300).decode("utf-8", "replace")
        return f" ({name})" if name else ""
    return ""
