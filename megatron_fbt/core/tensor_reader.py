"""Rows of a checkpoint's tensors, read one piece at a time: memory does not grow with the tensors.

Each stored chunk holds a check sum of its elements, which is compared at the first read. (The manifest's hashes are
those of whole files, with the optimizer's states: several times as much to read.)
"""

import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Tuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron_fbt.core.checkpoint_io import check_files
from megatron_fbt.core.manifest import read_into
from megatron_fbt.core.tensor_archive import FileSlice, find_elements, memory_of
from megatron_fbt.errors import CheckpointError


@dataclass(frozen=True)
class _Chunk:
    """A box of a tensor in a file: its first index and its size, and where its archive lies."""

    offsets: Tuple[int, ...]
    sizes: Tuple[int, ...]
    path: Path
    begin: int
    length: int


class TensorReader:
    """The tensors of a checkpoint; needs no process group.

    Args:
        folder: The checkpoint.
        first_rows: Of the tensors of these names only so many rows exist for the caller; what follows is padding.
        without: Leave out the tensors whose names begin with this.

    Attributes:
        shapes: Shape of every tensor, by name.
        dtypes: Number format of every tensor.

    Raises:
        CheckpointError: A file is missing or damaged.
    """

    def __init__(self, folder: Path, first_rows: Optional[Dict[str, int]] = None, without: str = "optimizer."):
        index = check_files(folder)
        self.folder = folder
        self.shapes: Dict[str, Tuple[int, ...]] = {}
        self.dtypes: Dict[str, torch.dtype] = {}
        self._chunks: Dict[str, List[_Chunk]] = {}
        self._data_begins: Dict[Tuple[Path, int], Optional[int]] = {}
        for name, entry in index.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata) or name.startswith(without):
                continue
            rows = (first_rows or {}).get(name, entry.size[0])
            self.shapes[name] = (min(rows, entry.size[0]), *entry.size[1:])
            self.dtypes[name] = entry.properties.dtype
            self._chunks[name] = []
            for chunk in entry.chunks:
                place = index.storage_data[MetadataIndex(name, chunk.offsets)]
                box = (tuple(chunk.offsets), tuple(chunk.sizes))
                self._chunks[name].append(_Chunk(*box, folder / place.relative_path, place.offset, place.length))

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start to stop (the first dimension) of a tensor, whole in the others.

        Raises:
            CheckpointError: A file cannot be read, or does not hold what the index says.
        """
        shape = self.shapes[name]
        found = torch.empty((stop - start, *shape[1:]), dtype=self.dtypes[name])
        covered = 0
        for chunk in self._chunks[name]:
            low, high = max(start, chunk.offsets[0]), min(stop, chunk.offsets[0] + chunk.sizes[0])
            if low >= high:
                continue
            part = self._read(chunk, self.dtypes[name], low - chunk.offsets[0], high - chunk.offsets[0])
            inner = (slice(a, a + n) for a, n in zip(chunk.offsets[1:], chunk.sizes[1:], strict=True))
            found[(slice(low - start, high - start), *inner)] = part
            covered += part.numel()
        if covered != found.numel():
            remedy = "the checkpoint is damaged; use an older one"
            raise CheckpointError(f"{self.folder}: rows {start} to {stop} of {name} are not all stored: {remedy}")
        return found

    def _read(self, chunk: _Chunk, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """Rows of one chunk."""
        key = (chunk.path, chunk.begin)
        row = torch.Size(chunk.sizes[1:]).numel()
        try:
            with open(chunk.path, "rb", buffering=0) as file:
                if key not in self._data_begins:
                    size = torch.Size(chunk.sizes).numel() * dtype.itemsize
                    self._data_begins[key] = find_elements(
                        FileSlice(file, chunk.begin, chunk.length), chunk.sizes, size
                    )
                begin = self._data_begins[key]
                if begin is None:
                    archive = FileSlice(file, chunk.begin, chunk.length)
                    return torch.load(archive, map_location="cpu", weights_only=True)[start:stop]
                part = torch.empty((stop - start, *chunk.sizes[1:]), dtype=dtype)
                read_into(file, chunk.begin + begin + start * row * dtype.itemsize, memory_of(part))
                return part
        except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{chunk.path} cannot be read: {reason}; use an older checkpoint") from error


class HeldTensors:
    """Tensors in memory, with the face of a TensorReader."""

    def __init__(self, tensors: Dict[str, Tensor]):
        self.tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """See TensorReader."""
        return self.tensors[name][start:stop]
