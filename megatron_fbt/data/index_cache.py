"""Row indices of data sets in a cache that survives interruption, damage, several writers and a change of the data.

    <folder>/<key>-<class>-<split>-<name>.npy      the arrays of an entry
                                  -description.txt what the entry is of
                                  -sums.json       sizes and XXH3 of these files, put into its place last

An entry is built under a folder of its own and moved into the cache file by file. It counts if all its files are there
with their sizes and sums, which the processes that build compare when they open it; others map it unseen.
"""

import contextlib
import copy
import glob
import json
import logging
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import numpy
import xxhash

from megatron_fbt.core.manifest import HASH
from megatron_fbt.data.indexed import quiet_megatron
from megatron_fbt.errors import DataError

with quiet_megatron():
    from megatron.core.datasets.blended_dataset import BlendedDataset
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

logger = logging.getLogger(__name__)

LEFTOVER_S = 86400.0
"""Age in seconds of a folder of an unfinished entry after which its builder is taken to be dead."""
_STAGING = ".building-"
_BLOCK = 8 << 20
"""Bytes hashed at once."""
SUMS, DESCRIPTION = "sums.json", "description.txt"
ROW_ARRAYS = ("document_index", "sample_index", "shuffle_index")
"""Order of the documents, where each row begins in it, order of the rows."""


@dataclass
class IndexLog:
    """What became of the entries that a process needed."""

    built: List[str] = field(default_factory=list)
    found: List[str] = field(default_factory=list)


@dataclass
class IndexConfig(GPTDatasetConfig):
    """Megatron-Core's settings of a data set, and this process's part in its cache."""

    builds: bool = True
    """Whether this process builds entries that are missing or damaged; if not, another one has before."""
    log: Optional[IndexLog] = None


class CachedGPTDataset(GPTDataset):
    """Megatron-Core's GPTDataset; only the handling of its cache differs."""

    def _build_document_sample_shuffle_indices(self):
        build = super()._build_document_sample_shuffle_indices
        return cached_arrays(self, ROW_ARRAYS, lambda: _in_memory(self, build))

    def _get_num_epochs(self, num_tokens_per_epoch: int) -> int:
        """Megatron-Core counts them up one by one."""
        return max(1, -(-(self.num_samples * self.config.sequence_length + 1) // num_tokens_per_epoch))


class CachedBlendedDataset(BlendedDataset):
    """Megatron-Core's BlendedDataset; only the handling of its cache differs."""

    def _build_indices(self):
        build = super()._build_indices
        return cached_arrays(self, ("dataset_index", "dataset_sample_index"), lambda: _in_memory(self, build))


def cached_arrays(dataset, names: Sequence[str], build: Callable[[], Sequence[numpy.ndarray]]) -> Tuple:
    """The arrays of a data set's entry, mapped into memory, after building it if this process is to.

    Args:
        dataset: Megatron-Core's data set in construction, with its config (an IndexConfig) and description.
        names: Of the arrays.
        build: Makes them.

    Raises:
        DataError: The entry is neither there nor can it be built here.
    """
    config = dataset.config
    split = getattr(dataset, "index_split", None) or dataset.split
    entry = _Entry(config.path_to_cache, f"{dataset.unique_description_hash}-{type(dataset).__name__}-{split.name}")
    files = [f"{name}.npy" for name in names]
    if config.builds and not entry.is_whole([*files, DESCRIPTION]):
        arrays = dict(zip(files, build(), strict=True))
        entry.write(arrays, dataset.unique_description)
        del arrays
        _note(config.log, "built", entry)
    elif config.builds:
        _note(config.log, "found", entry)
    return tuple(entry.load(file) for file in files)


def _note(log: Optional[IndexLog], what: str, entry: "_Entry") -> None:
    if log is not None:
        getattr(log, what).append(entry.base)


class _Entry:
    """The files of one data set's indices."""

    def __init__(self, folder: str, name: str):
        self.folder, self.base = folder, os.path.join(folder, name)

    def path(self, file: str) -> str:
        return f"{self.base}-{file}"

    def is_whole(self, files: Sequence[str]) -> bool:
        """Whether the entry can be used; says so if it is there and damaged."""
        if not os.path.exists(self.path(SUMS)):
            if any(os.path.exists(self.path(file)) for file in files):
                logger.warning("index cache %s-*: damaged (not all of it is there), building it again", self.base)
            return False
        try:
            with open(self.path(SUMS), encoding="utf-8") as file:
                sums = json.load(file)
            wrong = [name for name in files if _sum(self.path(name), sums[name]["bytes"]) != sums[name]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("index cache %s-*: damaged (%s), building it again", self.base, error)
            return False
        if wrong:
            logger.warning("index cache %s-*: damaged (%s), building it again", self.base, ", ".join(wrong))
        return not wrong

    def write(self, arrays: Dict[str, numpy.ndarray], description: str) -> None:
        """Put the entry into the cache; processes that do so at once write the same.

        Raises:
            DataError: The cache cannot be written.
        """
        try:
            os.makedirs(self.folder, exist_ok=True)
            _remove_leftovers(self.folder)
            staging = tempfile.mkdtemp(prefix=_STAGING, dir=self.folder)
            try:
                self._fill(staging, arrays, description)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
        except OSError as error:
            raise DataError(
                f"index cache {self.folder}: the entry {os.path.basename(self.base)} is missing or damaged and cannot "
                f"be written: {error}; build the cache with tools/prepare_cache.py where it can, or set data.cache_dir"
            ) from error

    def _fill(self, staging: str, arrays: Dict[str, numpy.ndarray], description: str) -> None:
        name = os.path.basename(self.base)
        sums = {}
        for file, array in arrays.items():
            numpy.save(os.path.join(staging, f"{name}-{file}"), array, allow_pickle=False)
        with open(os.path.join(staging, f"{name}-{DESCRIPTION}"), "w", encoding="utf-8") as file:
            file.write(description)
        for file in [*arrays, DESCRIPTION]:
            path = os.path.join(staging, f"{name}-{file}")
            sums[file] = _sum(path, os.path.getsize(path))
        with open(os.path.join(staging, f"{name}-{SUMS}"), "w", encoding="utf-8") as file:
            json.dump(sums, file, indent=1)
        for file in [*arrays, DESCRIPTION, SUMS]:
            os.replace(os.path.join(staging, f"{name}-{file}"), self.path(file))

    def load(self, file: str) -> numpy.ndarray:
        """An array of the entry.

        Raises:
            DataError: It is not there.
        """
        try:
            return numpy.load(self.path(file), mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(
                f"index cache {self.path(file)}: cannot be read here ({error}); data.cache_dir must be a folder that "
                "all processes share, or a disk of their node"
            ) from error


def _remove_leftovers(folder: str) -> None:
    """Remove what builders that were killed have left."""
    for left in glob.glob(os.path.join(glob.escape(folder), f"{_STAGING}*")):
        with contextlib.suppress(OSError):  # its builder has just ended
            if time.time() - os.path.getmtime(left) > LEFTOVER_S:
                shutil.rmtree(left, ignore_errors=True)


def _sum(path: str, expected_bytes: int) -> Optional[Dict]:
    """Size and XXH3 of a file; of one that has another size than expected, only that."""
    size = os.path.getsize(path)
    if size != expected_bytes:
        return {"bytes": size}
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return {"bytes": size, HASH: digest.hexdigest()}


@contextlib.contextmanager
def _only_errors(name: str):
    """Megatron-Core warns that nothing is cached, which is meant here."""
    upstream = logging.getLogger(name)
    level = upstream.level
    upstream.setLevel(logging.ERROR)
    try:
        yield
    finally:
        upstream.setLevel(level)


def _in_memory(dataset, build: Callable):
    """What Megatron-Core's ``build`` makes when it has no cache, whatever the rank."""
    config = dataset.config
    dataset.config = copy.copy(config)
    dataset.config.path_to_cache = ""
    try:
        with _only_errors(build.__module__):
            return build()
    finally:
        dataset.config = config
