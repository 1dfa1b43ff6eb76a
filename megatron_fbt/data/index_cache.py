"""Megatron-Core's data sets with an index cache that survives interruption, damage and several writers.

The indices are built under a folder of their own and moved into the cache file by file, so a file in the cache is
always whole; files that were damaged later are noticed when they are opened, and built again.
"""

import copy
import logging
import os
import pickle
import shutil
import tempfile
from typing import Callable

import torch.distributed as dist

from megatron_fbt.data.indexed import quiet_megatron

with quiet_megatron():
    from megatron.core.datasets.blended_dataset import BlendedDataset
    from megatron.core.datasets.gpt_dataset import GPTDataset

logger = logging.getLogger(__name__)


class CachedGPTDataset(GPTDataset):
    """Megatron-Core's GPTDataset; only the handling of its cache differs."""

    def _build_document_sample_shuffle_indices(self):
        return _load_or_build(self, 4, super()._build_document_sample_shuffle_indices)


class CachedBlendedDataset(BlendedDataset):
    """Megatron-Core's BlendedDataset; without a process group its indices stay in memory."""

    def _build_indices(self):
        if dist.is_initialized():
            return _load_or_build(self, 3, super()._build_indices)
        upstream = logging.getLogger(BlendedDataset.__module__)
        level = upstream.level
        upstream.setLevel(logging.ERROR)  # it warns that nothing is cached, which is meant here
        try:
            return _with_cache(self, None, super()._build_indices)
        finally:
            upstream.setLevel(level)


def _load_or_build(dataset, files: int, build: Callable):
    """What ``build`` loads from the cache, after building it there on the first rank if it is missing or damaged.

    Other ranks must come after the first one (megatron_fbt.data.dataset sees to that).

    Args:
        dataset: A data set in construction.
        files: Number of files that a complete entry has.
        build: Megatron-Core's method that loads the entry if all its files are there, and else writes it.
    """
    folder, key = dataset.config.path_to_cache, dataset.unique_description_hash
    if dist.is_initialized() and dist.get_rank() != 0:
        return build()
    os.makedirs(folder, exist_ok=True)
    if sum(name.startswith(f"{key}-") for name in os.listdir(folder)) == files:
        try:
            return build()
        except (ValueError, EOFError, OSError, pickle.UnpicklingError) as error:
            logger.warning("index cache %s/%s-*: damaged (%s), building it again", folder, key, error)
    staging = tempfile.mkdtemp(prefix=".building-", dir=folder)
    try:
        _with_cache(dataset, staging, build)
        for name in sorted(os.listdir(staging)):
            os.replace(os.path.join(staging, name), os.path.join(folder, name))
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return build()


def _with_cache(dataset, folder, build: Callable):
    """``build`` with another cache folder."""
    config = dataset.config
    dataset.config = copy.copy(config)
    dataset.config.path_to_cache = folder
    try:
        return build()
    finally:
        dataset.config = config
