"""manifest.json: names, sizes and hashes of a checkpoint's files. Needs no torch.

Each process hashes what it writes while it writes it; rank 0 only gathers the entries.
"""

import contextlib
import json
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, Optional, Union

import xxhash

from megatron_fbt.errors import DamagedCheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
HASH = "xxh3_128"
BLOCK = 8 << 20
"""Bytes read at once."""
AHEAD = 32 << 20
"""Bytes that the disk reads ahead."""
HASHED_AT_ONCE = 1 << 20
"""Bytes that stay in the processor's cache."""
SYNCED_AT_ONCE = 64 << 20
"""Bytes after which the disk begins to write."""


@dataclass(frozen=True)
class FileEntry:
    """What the manifest says about a file."""

    size: int
    """Bytes."""
    digest: str
    """XXH3 of 128 bits, in hexadecimal digits, as `xxhsum -H2` prints it: it finds damage, at the speed of memory."""


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json."""

    files: Dict[str, FileEntry]
    """By name; every file of the checkpoint but the manifest itself."""
    facts: Dict[str, Any]
    """What else was written into it: step, layout, versions, ..."""

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(entry.size for entry in self.files.values())


class HashingFile:
    """A file opened for writing, hashed on the way.

    The disk begins to write long before the end, so that the last sync has little left to wait for.
    """

    def __init__(self, file: BinaryIO):
        self._file, self._hash, self._size = file, xxhash.xxh3_128(), 0
        self._pool = ThreadPoolExecutor(1)
        self._syncing: Optional[Future] = None
        self._handed_over = 0
        """Bytes that the disk has been asked to write."""
        self.failure: Optional[OSError] = None
        """Why a write failed; torch's own error would say that a position is unexpected."""

    def write(self, data: Union[bytes, memoryview]) -> int:
        """Append bytes, in blocks that are still in the processor's cache when they are written after hashing."""
        whole = memoryview(data).cast("B")
        for begin in range(0, len(whole), HASHED_AT_ONCE):
            block = whole[begin : begin + HASHED_AT_ONCE]
            self._hash.update(block)
            self._write_all(block)
            self._size += len(block)
            self._begin_sync()
        return len(whole)

    def _write_all(self, block: memoryview) -> None:
        with self._noting_failure():
            while block:
                block = block[self._file.write(block) :]

    def _begin_sync(self) -> None:
        busy = self._syncing is not None and not self._syncing.done()
        if not busy and self._size - self._handed_over >= SYNCED_AT_ONCE:
            self._end_sync()
            self._syncing, self._handed_over = self._pool.submit(os.fdatasync, self._file.fileno()), self._size

    def _end_sync(self) -> None:
        """Wait for the disk; the system tells an error once, so it must not get lost here."""
        syncing, self._syncing = self._syncing, None
        with self._noting_failure():
            if syncing is not None:
                syncing.result()

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = error
            raise

    def tell(self) -> int:
        """Bytes written so far."""
        return self._size

    def fileno(self) -> int:
        """The operating system's number."""
        return self._file.fileno()

    def flush(self) -> None:
        """Nothing is buffered here. torch flushes after every tensor, so this must not wait for the disk."""

    def close(self) -> None:
        """Wait for the syncs that were begun, and close the file.

        Raises:
            OSError: one of them failed.
        """
        try:
            self._end_sync()
        finally:
            self._pool.shutdown()
            self._file.close()

    @property
    def entry(self) -> FileEntry:
        """Size and hash of what was written."""
        return FileEntry(self._size, self._hash.hexdigest())


class HashingReader:
    """A file that is read from front to back; every byte is hashed once, from the memory that it was read into.

    Args:
        file: opened without buffering; others may read from it, too.
    """

    def __init__(self, file: BinaryIO):
        self._file, self._hash, self._passed = file, xxhash.xxh3_128(), 0
        self._block = bytearray(min(BLOCK, os.fstat(file.fileno()).st_size))

    def read_into(self, place: int, memory: memoryview) -> None:
        """Fill memory with the file's bytes from a place on.

        Raises:
            EOFError: The file ends before.
        """
        if place < self._passed:  # was read for somebody else, and hashed
            read_into(self._file, place, memory)
            return
        self._pass_to(place)
        for begin in range(0, len(memory), BLOCK):
            self._pass(memory[begin : begin + BLOCK])

    def _pass_to(self, place: int) -> None:
        while self._passed < place:
            self._pass(memoryview(self._block)[: place - self._passed])

    def _pass(self, memory: memoryview) -> None:
        """The disk reads ahead beyond this block, while it is hashed and others look elsewhere in the file."""
        os.posix_fadvise(self._file.fileno(), self._passed + len(memory), AHEAD, os.POSIX_FADV_WILLNEED)
        read_into(self._file, self._passed, memory)
        self._hash.update(memory)
        self._passed += len(memory)

    def finish(self) -> FileEntry:
        """Read what is left; size and hash of the file.

        Raises:
            EOFError: The file has become shorter.
        """
        self._pass_to(os.fstat(self._file.fileno()).st_size)
        return FileEntry(self._passed, self._hash.hexdigest())


def read_into(file: BinaryIO, place: int, memory: memoryview) -> None:
    """Fill memory with a file's bytes from a place on.

    Args:
        file: opened without buffering.
        place: in bytes.
        memory: of bytes.

    Raises:
        EOFError: the file ends before.
    """
    file.seek(place)
    while memory:
        count = file.readinto(memory)
        if not count:
            raise EOFError("the file ends too early")
        memory = memory[count:]


def hash_file(path: Path) -> FileEntry:
    """Size and hash of a file as it is on the disk.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb", buffering=0) as file:
        return HashingReader(file).finish()


def sync_path(path: Path) -> None:
    """Have the operating system put a file, or the names in a folder, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(folder: Path, files: Dict[str, FileEntry], facts: Dict[str, Any]) -> None:
    """Write the manifest of a checkpoint whose other files are complete."""
    content = {
        "format": FORMAT,
        **facts,
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "files": {name: {"bytes": entry.size, HASH: entry.digest} for name, entry in sorted(files.items())},
    }
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        DamagedCheckpointError: it is missing or damaged.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        files = {name: FileEntry(int(entry["bytes"]), str(entry[HASH])) for name, entry in content["files"].items()}
        if content["format"] != FORMAT or any(Path(name).name != name for name in files):
            raise ValueError(f"not of format {FORMAT}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DamagedCheckpointError(f"{path} cannot be read: {reason}; resume from an older checkpoint") from error
    return Manifest(files, {name: value for name, value in content.items() if name not in ("files", "format")})


def check_sizes(folder: Path) -> Manifest:
    """See that every file of a checkpoint is there and has its size; reads nothing but the manifest.

    Raises:
        DamagedCheckpointError: naming the file that is missing or of another size.
    """
    manifest = read_manifest(folder)
    for name in manifest.files:
        check_size(folder, name, manifest)
    return manifest


def check_size(folder: Path, name: str, manifest: Manifest) -> None:
    """See that a file belongs to a checkpoint, is there and has its size.

    Raises:
        DamagedCheckpointError: naming the file.
    """
    path, entry = folder / name, manifest.files.get(name)
    if entry is None:
        raise DamagedCheckpointError(f"{path} is not in {MANIFEST}; resume from an older checkpoint")
    found = os.path.getsize(path) if path.is_file() else None
    if found != entry.size:
        state = "is missing" if found is None else f"has {found:,} bytes instead of {entry.size:,}"
        raise DamagedCheckpointError(f"{path} {state}: the checkpoint is damaged; resume from an older one")


def check_content(folder: Path, name: str, manifest: Manifest) -> None:
    """See that a file holds what was written.

    Args:
        folder: the checkpoint.
        name: of the file.
        manifest: of the checkpoint.

    Raises:
        DamagedCheckpointError: naming the file.
    """
    try:
        check_size(folder, name, manifest)
        found = hash_file(folder / name)
    except (OSError, EOFError) as error:
        raise DamagedCheckpointError(f"{folder / name} cannot be read: {error}; resume from an older one") from error
    check_entry(folder, name, manifest, found)


def check_entry(folder: Path, name: str, manifest: Manifest, found: FileEntry) -> None:
    """See that a file that was read holds what was written.

    Raises:
        DamagedCheckpointError: naming the file.
    """
    if found != manifest.files[name]:
        raise DamagedCheckpointError(
            f"{folder / name} is not what was written (its {HASH} differs from {MANIFEST}): the checkpoint is damaged; "
            "resume from an older one"
        )
