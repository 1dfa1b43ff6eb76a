"""Finding raw text files, each once."""

import glob
import logging
import os
import stat
from dataclasses import dataclass
from typing import Dict, List, NoReturn, Optional, Sequence, Tuple

from megatron_fbt.errors import DataError

JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
PARQUET_SUFFIX = ".parquet"
TWICE = "named more than once, read once"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class InputFile:
    """One file to read.

    Attributes:
        path: Where it is.
        size: Bytes on disk.
        mtime_ns: When it was last changed; -1 for a pipe, of which nothing tells whether it is the same again.
    """

    path: str
    size: int
    mtime_ns: int = -1


def find_inputs(
    paths: Sequence[str],
    input_format: str,
    suffixes: Sequence[str] = (),
    exclude: Sequence[str] = (),
    parquet: bool = False,
    left_out: Optional[List[str]] = None,
) -> List[InputFile]:
    """The files to read: those named or matched, and those inside such folders; hidden ones are left out.

    Args:
        paths: Files, folders, and patterns such as ``data/*.jsonl`` or ``data/**/part-?.jsonl`` that no shell has
            expanded. What a pattern matches, and what a folder holds, comes in sorted order.
        input_format: ``jsonl`` or ``files`` (each file is one document).
        suffixes: Endings of file names to take from folders; empty = .jsonl, .jsonl.gz, .jsonl.zst for ``jsonl`` and
            every file for ``files``.
        exclude: Names of folders and files to leave out, e.g. ``site-packages``.
        parquet: Take .parquet files from folders, too, where no suffixes are given.
        left_out: Gets a line for each link in a folder that is not followed.

    Raises:
        DataError: A path does not exist, a folder cannot be read, or nothing was found.
    """
    records = JSONL_SUFFIXES + ((PARQUET_SUFFIX,) if parquet else ())
    endings = tuple(suffixes) or (records if input_format == "jsonl" else ())
    found = []
    for path in paths:
        for match in _matches(str(path)):
            if os.path.isdir(match):
                found += _walk(match, endings, frozenset(exclude), [] if left_out is None else left_out)
            else:
                found.append(match)
    if not found:
        wanted = ", ".join(endings) if endings else "any name"
        raise DataError(f"input {', '.join(map(str, paths))}: no file to read was found (looked for {wanted})")
    return [input_file(path) for path in found]


def _matches(path: str) -> List[str]:
    """A path that exists, or what a pattern matches."""
    if os.path.exists(path):
        return [path]
    if not glob.has_magic(path):
        raise DataError(f"input {path}: no such file or folder")
    _check_folders(path)
    found = sorted(glob.glob(path, recursive=True), key=_by_parts)
    if not found:
        raise DataError(f"input {path}: no file or folder matches this pattern")
    return found


def _check_folders(pattern: str) -> None:
    """Raise DataError for a folder that cannot be read, which a pattern would leave out."""
    parts = pattern.split(os.sep)
    for i, part in enumerate(parts):
        above = os.sep.join(parts[:i]) or (os.sep if i else os.curdir)
        for folder in glob.glob(above, recursive=True) if glob.has_magic(part) else ():
            next(os.walk(folder, onerror=_unreadable) if os.path.isdir(folder) else iter(()), None)


def _unreadable(error: OSError) -> NoReturn:
    raise DataError(f"input {error.filename}: cannot be read: {error.strerror}") from error


def _by_parts(path: str) -> List[str]:
    return path.split(os.sep)


def input_file(path: str) -> InputFile:
    """The facts of a file.

    Raises:
        DataError: It cannot be looked at.
    """
    try:
        facts = os.stat(path)
    except OSError as error:
        _unreadable(error)
    return InputFile(path, facts.st_size, facts.st_mtime_ns if stat.S_ISREG(facts.st_mode) else -1)


def run_inputs(paths: Sequence[str]) -> List[InputFile]:
    """The .jsonl files of data.paths in their order, each once; what is left out is told.

    Raises:
        DataError: See find_inputs.
    """
    left_out: List[str] = []
    files, repeated = each_once(find_inputs(paths, "jsonl", left_out=left_out))
    for line in [*left_out, *(f"{path}: {TWICE}" for path in repeated)]:
        logger.warning("data.paths %s", line)
    return files


def sort_inputs(files: Sequence[InputFile]) -> Tuple[List[InputFile], List[str]]:
    """Files in the order of their paths, each once, whatever the order, overlap and links of what named them.

    Returns:
        See each_once.
    """
    return each_once(sorted(files, key=lambda file: _by_parts(os.path.abspath(file.path))))


def each_once(files: Sequence[InputFile]) -> Tuple[List[InputFile], List[str]]:
    """Files in their order, each once, whatever paths, links and hard links lead to it.

    Returns:
        The files, and the paths of those that were named more than once.
    """
    known: Dict[Tuple, InputFile] = {}
    repeated = set()
    for file in files:
        first = known.setdefault(_identity(file.path), file)
        if first is not file:
            repeated.add(first.path)
    return list(known.values()), sorted(repeated)


def _identity(path: str) -> Tuple:
    try:
        facts = os.stat(path)
    except OSError as error:
        _unreadable(error)
    if facts.st_nlink > 1:  # some file systems without hard links give one number to several files
        return facts.st_dev, facts.st_ino
    return (os.path.realpath(path),)


def _walk(folder: str, endings: Tuple[str, ...], exclude: frozenset, left_out: List[str]) -> List[str]:
    found = []
    for root, folders, names in os.walk(folder, onerror=_unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in exclude)
        links = (os.path.join(root, name) for name in folders if os.path.islink(os.path.join(root, name)))
        left_out += [f"{path}: left out, because it is a link to a folder; name it, too, to read it" for path in links]
        for name in sorted(names):
            path = os.path.join(root, name)
            if name.startswith(".") or name in exclude or (endings and not name.endswith(endings)):
                continue
            if os.path.isfile(path):
                found.append(path)
            else:
                left_out.append(f"{path}: left out, because it is no file, or a link to nothing")
    return sorted(found, key=_by_parts)
