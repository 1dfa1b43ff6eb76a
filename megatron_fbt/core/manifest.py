"""manifest.json: names, sizes and hashes of a checkpoint's files. Needs no torch.

Each process hashes what it writes while it writes it; rank 0 only gathers the entries.
"""

import hashlib
import json
import math
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Dict, Optional, Union

from megatron_fbt.errors import DamagedCheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
HASH = "sha256"
BLOCK = 8 << 20
"""Bytes read at once."""
BESIDE = 512 << 10
"""Writes of at least so many bytes are hashed beside the write."""


@dataclass(frozen=True)
class FileEntry:
    """What the manifest says about a file."""

    size: int
    """Bytes."""
    digest: str
    """SHA-256, in hexadecimal digits, as `sha256sum` prints it."""


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
    """A file opened for writing, hashed on the way; large blocks are hashed in a thread beside their write."""

    def __init__(self, file: BinaryIO):
        self._file, self._hash, self._size = file, hashlib.new(HASH), 0
        self._pool: Optional[ThreadPoolExecutor] = None
        self.failure: Optional[OSError] = None
        """Why a write failed; torch's own error would say that a position is unexpected."""

    def write(self, data: Union[bytes, memoryview]) -> int:
        """Append a block."""
        block = memoryview(data).cast("B")
        if len(block) < BESIDE:
            self._hash.update(block)
            self._write_all(block)
        else:
            self._pool = self._pool or ThreadPoolExecutor(1)
            hashed = self._pool.submit(self._hash.update, block)
            try:
                self._write_all(block)
            finally:
                hashed.result()
        self._size += len(block)
        return len(block)

    def _write_all(self, block: memoryview) -> None:
        try:
            while block:
                block = block[self._file.write(block) :]
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
        """Hand what is buffered to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._pool is not None:
            self._pool.shutdown()
        self._file.close()

    @property
    def entry(self) -> FileEntry:
        """Size and hash of what was written."""
        return FileEntry(self._size, self._hash.hexdigest())


class Progress:
    """How far a file has been read, for others who wait for it."""

    def __init__(self) -> None:
        self._changed, self._done = threading.Condition(), 0.0

    def reached(self, place: float) -> None:
        """Tell that the bytes before a place have been read; infinity: nobody shall wait any longer."""
        with self._changed:
            self._done = place
            self._changed.notify_all()

    def wait_for(self, place: int) -> None:
        """Wait until the bytes before a place have been read."""
        with self._changed:
            self._changed.wait_for(lambda: self._done >= place)


def hash_file(path: Path, progress: Optional[Progress] = None) -> FileEntry:
    """Size and hash of a file as it is on the disk; a block is hashed while the next one is read.

    Args:
        path: the file.
        progress: told how far it is.

    Raises:
        OSError: it cannot be read.
    """
    digest, size = hashlib.new(HASH), 0
    with open(path, "rb", buffering=0) as file:
        length = min(BLOCK, os.fstat(file.fileno()).st_size + 1)
        block, other = bytearray(length), bytearray(length)
        with ThreadPoolExecutor(1) as reader:
            count = file.readinto(block)
            while count:
                following = reader.submit(file.readinto, other)
                digest.update(memoryview(block)[:count])
                size += count
                if progress is not None:
                    progress.reached(size)
                count, block, other = following.result(), other, block
    return FileEntry(size, digest.hexdigest())


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


def check_content(folder: Path, name: str, manifest: Manifest, progress: Optional[Progress] = None) -> None:
    """See that a file holds what was written.

    Args:
        folder: the checkpoint.
        name: of the file.
        manifest: of the checkpoint.
        progress: told how far it is; nobody waits for it after the end.

    Raises:
        DamagedCheckpointError: naming the file.
    """
    try:
        check_size(folder, name, manifest)
        intact = hash_file(folder / name, progress) == manifest.files[name]
    except OSError as error:
        raise DamagedCheckpointError(f"{folder / name} cannot be read: {error}; resume from an older one") from error
    finally:
        if progress is not None:
            progress.reached(math.inf)
    if not intact:
        raise DamagedCheckpointError(
            f"{folder / name} is not what was written (its {HASH} differs from {MANIFEST}): the checkpoint is damaged; "
            "resume from an older one"
        )
