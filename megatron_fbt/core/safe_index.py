"""The index of a checkpoint (`.metadata`), read without executing what it holds.

PyTorch reads this file with plain pickle, which runs any code that a file asks for.
"""

import pathlib
import pickle
from pathlib import Path
from typing import Any, Dict, Tuple

import torch
from torch.distributed.checkpoint import filesystem, metadata

from megatron_fbt.errors import DamagedCheckpointError

INDEX = ".metadata"
"""File with the place of every tensor."""


def _allowed() -> Dict[Tuple[str, str], Any]:
    """What an index consists of: PyTorch's records of it, types and sizes of tensors, and the checkpoint's path."""
    records = (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
    known = {(metadata.__name__, name): getattr(metadata, name) for name in records}
    known[filesystem.__name__, "_StorageInfo"] = filesystem._StorageInfo
    known["torch", "Size"] = torch.Size
    known["torch.serialization", "_get_layout"] = torch.serialization._get_layout
    for module in ("pathlib", "pathlib._local"):
        known[module, "PosixPath"] = pathlib.PosixPath
    dtypes = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    return known | {("torch", name): value for name, value in dtypes.items()}


class IndexUnpickler(pickle.Unpickler):
    """Knows plain containers and the classes of an index, and refuses every other name."""

    allowed = _allowed()

    def find_class(self, module: str, name: str) -> Any:
        """Look up a name that the file uses."""
        try:
            return self.allowed[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into an index") from None


def read_index(folder: Path) -> metadata.Metadata:
    """The index of a checkpoint.

    Raises:
        DamagedCheckpointError: it is missing, damaged, or holds anything but an index.
    """
    path = folder / INDEX
    try:
        with open(path, "rb") as file:
            index = IndexUnpickler(file).load()
        if not isinstance(index, metadata.Metadata) or not isinstance(index.storage_data, dict):
            raise ValueError("it holds no index")
        for place in index.storage_data.values():
            if Path(place.relative_path).name != place.relative_path:
                raise ValueError(f"it names a file elsewhere: {place.relative_path!r}")
    except Exception as error:  # a damaged pickle raises anything
        text = " ".join(str(error).split())[:300]
        reason = f"{type(error).__name__}: {text}; resume from an older checkpoint"
        raise DamagedCheckpointError(f"{path} cannot be read: {reason}") from error
    return index
