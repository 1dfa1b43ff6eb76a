"""Rows of a checkpoint's tensors, read one piece at a time: memory does not grow with the tensors.

Each stored chunk of a tensor is a torch.save archive inside a larger file. The archive holds the elements uncompressed,
so that a row range is one stretch of bytes in the file, and their check sum, which is compared at the first read. (The
manifest's hashes are those of whole files, with the optimizer's states: several times as much to read.)
"""

import pickle
import zipfile
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Dict, List, Optional, Tuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron_fbt.core.checkpoint_io import check_files
from megatron_fbt.errors import CheckpointError

_LOCAL_HEADER = 30
"""Bytes of a zip entry's own header, before its name and extra field."""


_BLOCK = 1 << 20


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
                    self._data_begins[key] = _data_begin(_FileSlice(file, chunk.begin, chunk.length), chunk.sizes, size)
                begin = self._data_begins[key]
                if begin is None:
                    archive = _FileSlice(file, chunk.begin, chunk.length)
                    return torch.load(archive, map_location="cpu", weights_only=True)[start:stop]
                part = torch.empty((stop - start, *chunk.sizes[1:]), dtype=dtype)
                file.seek(chunk.begin + begin + start * row * dtype.itemsize)
                _fill(file, memoryview(part.view(-1).view(torch.uint8).numpy()))
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


class _FileSlice(RawIOBase):
    """Part of an open file, as a file of its own."""

    def __init__(self, file, begin: int, length: int):
        self._file, self._begin, self._length, self._at = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def readinto(self, buffer) -> int:
        wanted = max(0, min(len(buffer), self._length - self._at))
        self._file.seek(self._begin + self._at)
        count = self._file.readinto(memoryview(buffer)[:wanted])
        self._at += count
        return count


class _LayoutReader(pickle.Unpickler):
    """Reads how an archive's tensor lies in its storage: (storage offset, size, stride). Builds nothing else."""

    def find_class(self, module, name):
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, stride, *rest: (offset, tuple(size), tuple(stride))
        if (module, name) == ("collections", "OrderedDict") or (module == "torch" and name.endswith("Storage")):
            return dict
        raise pickle.UnpicklingError(f"{module}.{name} is not what a stored tensor consists of")

    def persistent_load(self, pid):
        return None


def _data_begin(archive: _FileSlice, sizes: Tuple[int, ...], size: int) -> Optional[int]:
    """Where the elements begin in a torch.save archive; None if they do not lie there row after row."""
    with zipfile.ZipFile(archive) as listing:
        entries = {entry.filename.partition("/")[2]: entry for entry in listing.infolist()}
        data = entries.get("data/0")
        stored = data is not None and data.compress_type == zipfile.ZIP_STORED and data.file_size == size
        if not stored or "data.pkl" not in entries:
            return None
        try:
            little = "byteorder" not in entries or listing.read(entries["byteorder"]) == b"little"
            layout = _LayoutReader(listing.open(entries["data.pkl"])).load() if little else None
        except (pickle.UnpicklingError, zipfile.BadZipFile):  # torch can write archives without check sums
            return None
        if layout != (0, sizes, torch.empty(sizes, device="meta").stride()):
            return None
        with listing.open(data) as content:
            while content.read(_BLOCK):  # raises BadZipFile at the end if the check sum is another
                pass
        archive.seek(data.header_offset)
        header = archive.read(_LOCAL_HEADER)
        names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        return data.header_offset + _LOCAL_HEADER + names


def _fill(file, buffer: memoryview) -> None:
    """Read until the buffer is full."""
    at = 0
    while at < len(buffer):
        count = file.readinto(buffer[at:])
        if not count:
            raise EOFError("the file ends too early")
        at += count
