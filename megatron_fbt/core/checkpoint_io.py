"""Writing and reading Megatron-Core's distributed checkpoint format."""

import contextlib
import json
import os
from pathlib import Path
from typing import Callable, Dict, Iterator

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_fbt.errors import CheckpointError

INDEX = ".metadata"
"""File with the place of every tensor."""
COMMON_FILE = "common.pt"
"""State that is no tensor; there is none."""
SMALL_FILES: Dict[str, Callable[[Path], object]] = {
    "metadata.json": lambda path: json.loads(path.read_text()),
    COMMON_FILE: lambda path: torch.load(path, map_location="cpu", weights_only=False),
}
"""What Megatron-Core writes beside the tensors."""


class InProcessSave(TorchDistSaveShardedStrategy):
    """The `torch_dist` format, written by each rank's own process.

    Megatron-Core's own writer forks; a forked copy of a process that runs gloo's threads never ends.
    """

    def save(self, sharded_state_dict, checkpoint_dir) -> None:
        """Write this rank's part of the tensors and, on rank 0, the index of all."""
        tensors, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(tensors, False),
            storage_writer=torch_checkpoint.FileSystemWriter(str(checkpoint_dir), single_file_per_rank=True),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
        )
        common = Path(checkpoint_dir) / COMMON_FILE
        if dist.get_rank() == 0 and not common.exists():  # later releases keep it in the index; earlier ones need it
            torch.save({}, common)


def save_tensors(sharded: dict, folder: Path) -> None:
    """Write sharded tensors; collective. The folder must exist and be empty.

    Raises:
        CheckpointError: on every rank that takes part in what failed.
    """
    with _as_checkpoint_error(f"cannot write the checkpoint {folder}", "free space or mend the disk, and resume"):
        dist_checkpointing.save(sharded, str(folder), sharded_strategy=InProcessSave("torch_dist", 1))


def load_tensors(sharded: dict, folder: Path) -> dict:
    """Read sharded tensors in this run's layout, whatever layout wrote them; collective.

    Raises:
        CheckpointError: a file is damaged, or the tensors are not those of this model.
    """
    with _as_checkpoint_error(f"cannot read the checkpoint {folder}", "resume from an older checkpoint"):
        return dist_checkpointing.load(sharded, str(folder))


def read_tensors(folder: Path, prefix: str = "", without: str = "") -> Dict[str, torch.Tensor]:
    """Read whole tensors to the CPU; needs no process group.

    Args:
        folder: the checkpoint.
        prefix: read the tensors whose names begin with this.
        without: and do not begin with this ("" = no restriction).

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    index = check_files(folder)
    entries = {
        name: entry
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(prefix)
    }
    names = [name for name in entries if not (without and name.startswith(without))]
    tensors = {name: torch.empty(entries[name].size, dtype=entries[name].properties.dtype) for name in names}
    with _as_checkpoint_error(f"cannot read the checkpoint {folder}", "use an older checkpoint"):
        torch_checkpoint.load(tensors, storage_reader=torch_checkpoint.FileSystemReader(str(folder)), no_dist=True)
    return tensors


def check_files(folder: Path) -> Metadata:
    """See that every file of a checkpoint is there, and as long as the index says.

    Returns:
        The index.

    Raises:
        CheckpointError: naming the file that is missing or too short.
    """
    for name, read in SMALL_FILES.items():
        with _as_checkpoint_error(f"{folder / name} cannot be read", "resume from an older checkpoint"):
            read(folder / name)
    path = folder / INDEX
    with _as_checkpoint_error(f"{path} cannot be read", "resume from an older checkpoint"):
        index = torch_checkpoint.FileSystemReader(str(folder)).read_metadata()
        ends: Dict[str, int] = {}
        for place in index.storage_data.values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, wanted in sorted(ends.items()):
        found = os.path.getsize(folder / name) if (folder / name).is_file() else None
        if found is None or found < wanted:
            state = "is missing" if found is None else f"has {found:,} bytes instead of {wanted:,}"
            raise CheckpointError(f"{folder / name} {state}: the checkpoint is damaged; resume from an older one")
    return index


@contextlib.contextmanager
def _as_checkpoint_error(what: str, remedy: str) -> Iterator[None]:
    """Turn whatever the libraries raise (torch's own exception is no Exception) into one line."""
    try:
        yield
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{what}: {_reason(error)}; {remedy}") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__
