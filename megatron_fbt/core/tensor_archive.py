"""A stored chunk of a tensor is a torch.save archive inside a larger file; here its bytes are found and read.

The archive holds the elements uncompressed, so that rows of the chunk are one stretch of bytes in the file.
"""

import pickle
import zipfile
from io import RawIOBase
from typing import Optional, Tuple

import torch
from torch import Tensor

_LOCAL_HEADER = 30
"""Bytes of a zip entry's own header, before its name and extra field."""
_BLOCK = 1 << 20
_END = 4096
"""Bytes at either end of an archive."""


class FileSlice(RawIOBase):
    """Part of an open file, as a file of its own. Both ends, which tell of an archive's content, are read once."""

    def __init__(self, file, begin: int, length: int):
        self._file, self._begin, self._length, self._at = file, begin, length, 0
        self._ends = {place: self._read(place, min(_END, length)) for place in (0, max(0, length - _END))}

    def _read(self, place: int, count: int) -> bytes:
        self._file.seek(self._begin + place)
        return self._file.read(count)

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
        for place, content in self._ends.items():
            if place <= self._at and self._at + wanted <= place + len(content):
                buffer[:wanted] = content[self._at - place : self._at - place + wanted]
                self._at += wanted
                return wanted
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


def find_elements(archive: FileSlice, sizes: Tuple[int, ...], size: int, check: bool = True) -> Optional[int]:
    """Where the elements begin in a torch.save archive.

    Args:
        archive: The chunk.
        sizes: Shape of its tensor.
        size: Bytes of it.
        check: Read them all and compare their check sum.

    Returns:
        None if they do not lie there row after row.

    Raises:
        zipfile.BadZipFile: The archive is damaged.
    """
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
        if layout != (0, tuple(sizes), torch.empty(sizes, device="meta").stride()):
            return None
        if check:
            with listing.open(data) as content:
                while content.read(_BLOCK):  # raises BadZipFile at the end if the check sum is another
                    pass
        archive.seek(data.header_offset)
        header = archive.read(_LOCAL_HEADER)
        names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        return data.header_offset + _LOCAL_HEADER + names


def memory_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes, to be read into.

    Args:
        tensor: Contiguous, on the CPU.
    """
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())
