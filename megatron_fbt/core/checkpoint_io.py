"""Reading Megatron-Core's distributed checkpoint format; what is read is checked first, and none of it is executed."""

import contextlib
import json
from pathlib import Path
from typing import Any, Dict, Iterator, Optional

import torch
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from megatron_fbt.core.checkpoint_write import COMMON_FILE, FORMAT_FILE
from megatron_fbt.core.manifest import check_content, check_size, check_sizes, read_manifest
from megatron_fbt.core.safe_index import INDEX, read_index
from megatron_fbt.errors import CheckpointError, DamagedCheckpointError


class CheckedReader(torch_checkpoint.FileSystemReader):
    """PyTorch's reader of a checkpoint, with an index that executes nothing, and files that are what was written.

    Args:
        folder: the checkpoint.
        verify: see that each file that is read has the manifest's hash, before anything of it is used; without it, only
            that it has its size.

    Raises:
        DamagedCheckpointError: a file is missing or not what was written.
    """

    def __init__(self, folder: Path, verify: bool = True):
        super().__init__(str(folder))
        self.folder, self.verify = Path(folder), verify
        self.manifest = read_manifest(self.folder)
        self._index: Optional[Metadata] = None
        self._intact: set = set()

    def read_metadata(self, *arguments: Any, **options: Any) -> Metadata:
        """The index."""
        if self._index is None:
            self._check(INDEX)
            self._index = read_index(self.folder)
            self._index.storage_meta = self._index.storage_meta or StorageMeta()
            self._index.storage_meta.load_id = self.load_id
        return self._index

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Read what a plan asks for, after the check of its files."""
        names = {self.storage_data[item.storage_index].relative_path for item in plan.items}
        for name in sorted(names - self._intact):
            self._check(name)
        return super().read_data(plan, planner)

    def _check(self, name: str) -> None:
        (check_content if self.verify else check_size)(self.folder, name, self.manifest)
        self._intact.add(name)


def load_tensors(sharded: dict, folder: Path, verify: bool = True) -> dict:
    """Read sharded tensors in this run's layout, whatever layout wrote them; collective.

    Args:
        sharded: Megatron-Core's description of this rank's tensors.
        folder: the checkpoint.
        verify: compare hashes of the files that this rank reads.

    Raises:
        DamagedCheckpointError: a file is damaged, or the tensors are not those of this model.
    """

    with _as_checkpoint_error(f"cannot read the checkpoint {folder}", "resume from an older checkpoint"):
        with _checked_readers(verify):
            return dist_checkpointing.load(sharded, str(folder))


@contextlib.contextmanager
def _checked_readers(verify: bool) -> Iterator[None]:
    """Have Megatron-Core read through a CheckedReader."""
    plain = torch_strategies._get_filesystem_reader
    torch_strategies._get_filesystem_reader = lambda folder, *_, **__: CheckedReader(Path(folder), verify)
    try:
        yield
    finally:
        torch_strategies._get_filesystem_reader = plain


def read_tensors(folder: Path, prefix: str = "", without: str = "") -> Dict[str, torch.Tensor]:
    """Read whole tensors to the CPU; needs no process group.

    Args:
        folder: the checkpoint.
        prefix: read the tensors whose names begin with this.
        without: and do not begin with this ("" = no restriction).

    Raises:
        DamagedCheckpointError: a file is missing or damaged.
    """
    check_files(folder)
    reader = CheckedReader(folder)
    entries = {
        name: entry
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(prefix)
    }
    names = [name for name in entries if not (without and name.startswith(without))]
    tensors = {name: torch.empty(entries[name].size, dtype=entries[name].properties.dtype) for name in names}
    with _as_checkpoint_error(f"cannot read the checkpoint {folder}", "use an older checkpoint"):
        torch_checkpoint.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def check_files(folder: Path, verify: bool = True) -> Metadata:
    """See that every file of a checkpoint is there in its size, and that the small ones can be read.

    Args:
        folder: the checkpoint.
        verify: compare the hashes of the small files, too.

    Returns:
        The index.

    Raises:
        DamagedCheckpointError: naming the file.
    """
    manifest = check_sizes(folder)
    for name in (INDEX, COMMON_FILE, FORMAT_FILE):
        (check_content if verify else check_size)(folder, name, manifest)
    with _as_checkpoint_error(f"{folder / FORMAT_FILE} cannot be read", "resume from an older checkpoint"):
        json.loads((folder / FORMAT_FILE).read_text())
    with _as_checkpoint_error(f"{folder / COMMON_FILE} cannot be read", "resume from an older checkpoint"):
        torch.load(folder / COMMON_FILE, map_location="cpu", weights_only=True)
    return read_index(folder)


@contextlib.contextmanager
def _as_checkpoint_error(what: str, remedy: str) -> Iterator[None]:
    """Turn whatever the libraries raise (torch's own exception is no Exception) into one line."""
    try:
        yield
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:
        error = _cause(error)
        if isinstance(error, CheckpointError):
            raise error from None
        raise DamagedCheckpointError(f"{what}: {_reason(error)}; {remedy}") from error


def _cause(error: BaseException) -> BaseException:
    """Of several ranks' failures the first."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__
