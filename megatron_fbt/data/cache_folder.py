"""Folders of flat files made once from input files, and found again by the content of these.

A folder is written under another name and renamed when all of it is there; report.json, written last, holds the sizes
of the files.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List

import numpy

from megatron_fbt.data.inputs import InputFile, read_blocks
from megatron_fbt.errors import DataError

logger = logging.getLogger(__name__)

REPORT = "report.json"


def cached_folder(
    cache: str, kind: str, made_with: Any, files: List[InputFile], write: Callable[[Path], Iterable[Any]]
) -> Iterator[str]:
    """Make a folder from files, unless the cache has it.

    Args:
        cache: folder of the cache.
        kind: first part of the folder's name.
        made_with: what the content depends on beside the files; its repr takes part in the name.
        files: what it is made from.
        write: writes everything, write_report last, into the folder that it is given; anything after each piece.

    Yields:
        "" after each piece of work, and at last the folder.

    Raises:
        DataError: A file cannot be read, or the folder not written.
    """
    digest = hashlib.sha256(repr(made_with).encode())
    for file in files:
        content = hashlib.sha256()
        for block, _ in read_blocks(file):
            content.update(block)
            yield ""
        digest.update(content.digest())
    folder = Path(cache) / f"{kind}-{digest.hexdigest()[:16]}"
    if not is_whole(folder):
        yield from _build(folder, write)
    yield str(folder)


def write_report(folder: Path, report: Dict[str, Any]) -> None:
    """Write the report of a folder whose other files are complete; their sizes are added to it."""
    sizes = {path.name: os.path.getsize(path) for path in sorted(folder.iterdir())}
    (folder / REPORT).write_text(json.dumps({**report, "sizes": sizes}, indent=2) + "\n", encoding="utf-8")


def read_report(folder: Path) -> Dict[str, Any]:
    """The report of a folder."""
    return json.loads((folder / REPORT).read_text(encoding="utf-8"))


def folders_made(cache: str) -> Dict[str, int]:
    """The folders of a cache, each with the time in ns at which it was made."""
    reports = Path(cache).glob(f"*/{REPORT}")
    return {str(report.parent): report.stat().st_mtime_ns for report in reports}


def read_array(path: Path, dtype: str, mmap: bool) -> numpy.ndarray:
    """The numbers of a flat file, [all], mapped into memory or read."""
    return numpy.memmap(path, mode="r", dtype=dtype) if mmap else numpy.fromfile(path, dtype=dtype)


def unreadable(folder: str, error: Exception) -> DataError:
    """What to raise where a process cannot read a folder that the first one has named."""
    return DataError(
        f"cache {folder}: cannot be read here ({error}); data.cache_dir must be a folder that all processes share, or "
        "a disk of their node"
    )


def is_whole(folder: Path) -> bool:
    """Whether a folder is there and its files have the sizes that they should have."""
    if not folder.is_dir():
        return False
    try:
        report = read_report(folder)
        sizes = {name: os.path.getsize(folder / name) for name in report["sizes"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("cache %s: damaged (%s), building it again", folder, error)
        return False
    if sizes != report["sizes"]:
        logger.warning("cache %s: damaged (sizes %s), building it again", folder, sizes)
    return sizes == report["sizes"]


def _build(folder: Path, write: Callable[[Path], Iterable[Any]]) -> Iterator[str]:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    except OSError as error:
        raise DataError(f"cache {folder.parent}: cannot be written: {error}") from error
    try:
        for _ in write(staging):
            yield ""
        if folder.exists() and not is_whole(folder):
            shutil.rmtree(folder)
        if not folder.exists():
            os.rename(staging, folder)
    except OSError as error:
        if not is_whole(folder):  # else another run was faster
            raise DataError(f"cache {folder}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
