"""Writing Megatron-Core's distributed checkpoint format, in three parts of which only the middle one is slow.

Planning and finishing are collective; in between each rank writes its own file, by itself, so that a thread can do it.
Megatron-Core's own writer forks, and a forked copy of a process that runs gloo's threads never ends.
"""

import contextlib
import dataclasses
import itertools
import math
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem, _StoragePrefix
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from megatron_fbt.core.manifest import FileEntry, HashingFile, hash_file, sync_path
from megatron_fbt.core.pieces import Piece
from megatron_fbt.errors import CheckpointError

COMMON_FILE = "common.pt"
"""State that is no tensor; there is none, but Megatron-Core reads the file."""
FORMAT_FILE = "metadata.json"
"""Names the format for Megatron-Core."""
FILES_AT_ONCE = 2
"""Files that a rank writes at the same time: torch's check sums take a processor as long as a fast disk takes."""


class HashingFileSystem(FileSystem):
    """Hashes every file that is written through it."""

    def __init__(self) -> None:
        self.entries: Dict[str, FileEntry] = {}
        """Of the complete files, by name."""

    @contextlib.contextmanager
    def create_stream(self, path: os.PathLike, mode: str) -> Iterator[Any]:
        """Open a file."""
        if "w" not in mode:
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        file = HashingFile(open(path, mode, buffering=0))
        try:
            yield file
        except Exception as error:
            raise file.failure or error from None
        finally:
            file.close()
        self.entries[Path(path).name] = file.entry

    def rename(self, path: os.PathLike, new_path: os.PathLike) -> None:
        """Rename a file."""
        super().rename(path, new_path)
        if Path(path).name in self.entries:
            self.entries[Path(new_path).name] = self.entries.pop(Path(path).name)


@dataclass
class Written:
    """What a rank has written."""

    results: List[Any]
    """The places of its tensors."""
    files: Dict[str, FileEntry]


class PlannedSave:
    """A rank's part of a checkpoint.

    Args:
        folder: exists and is empty.
        planner: holds the tensors.
        plans: what this rank writes; each goes to a file of its own, all of them at the same time.
        index: on rank 0, of all tensors.
    """

    def __init__(self, folder: Path, planner: SavePlanner, plans: Sequence[SavePlan], index: Optional[Metadata]):
        self.folder, self.planner, self.plans, self.index = folder, planner, plans, index
        self.writer = torch_checkpoint.FileSystemWriter(str(folder), single_file_per_rank=True)
        self.writer.fs = HashingFileSystem()

    def write(self) -> Written:
        """Write this rank's tensors onto the disk; no other rank takes part.

        Raises:
            CheckpointError: it could not be done; with the sizes.
        """
        if not self.plans:
            return Written([], {})
        try:
            with ThreadPoolExecutor(len(self.plans)) as pool:  # whose end waits for every file, whatever fails
                written = list(pool.map(lambda plan: self.writer.write_data(plan, self.planner).value(), self.plans))
        except (OSError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise CheckpointError(
                f"cannot write the checkpoint {self.folder}: {reason} (this process writes {self.size:,} bytes, "
                f"{free_bytes(self.folder)} free there); free space or mend the disk, and resume"
            ) from error
        return Written(list(itertools.chain(*written)), dict(self.writer.fs.entries))

    @property
    def size(self) -> int:
        """Bytes of this rank's tensors."""
        return sum(_item_size(item) for plan in self.plans for item in plan.items)

    def finish(self, parts: List[Written]) -> Dict[str, FileEntry]:
        """Write index and format; on rank 0, when all ranks have written.

        Returns:
            All files by name.

        Raises:
            OSError: it could not be done.
        """
        files = {name: entry for part in parts for name, entry in part.files.items()}
        self.writer.finish(self.index, [part.results for part in parts])
        torch.save({}, self.folder / COMMON_FILE)
        save_config(CheckpointingConfig("torch_dist", 1), str(self.folder))
        own = {name: finished_file(self.folder / name) for name in (COMMON_FILE, FORMAT_FILE)}
        return {**files, **self.writer.fs.entries, **own}


def split_plan(plan: SavePlan, most: int) -> List[SavePlan]:
    """The plans of up to so many files of about equal size, none of them empty.

    Args:
        plan: of a rank; its prefix begins the names of all files.
        most: files.
    """
    items: List[List[WriteItem]] = [[] for _ in range(most)]
    sizes = [0] * most
    for item in sorted(plan.items, key=_item_size, reverse=True):
        smallest = sizes.index(min(sizes))
        items[smallest].append(item)
        sizes[smallest] += _item_size(item)
    prefix = plan.storage_data.prefix
    return [
        dataclasses.replace(plan, items=part, storage_data=_StoragePrefix(f"{prefix}{number or ''}"))
        for number, part in enumerate(items)
        if part
    ]


def _item_size(item: WriteItem) -> int:
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def free_bytes(folder: Path) -> str:
    """Free space on the file system of a folder, for a person."""
    try:
        return f"{shutil.disk_usage(folder).free:,} bytes"
    except OSError:
        return "an unknown number of bytes"


def finished_file(path: Path) -> FileEntry:
    """Put a small file onto the disk and hash it."""
    sync_path(path)
    return hash_file(path)


class PiecePlanner(DefaultSavePlanner):
    """Plans to write pieces as they are.

    Args:
        pieces: what this rank writes.
    """

    def __init__(self, pieces: Sequence[Piece]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.take(pieces)
        self.plan = SavePlan([_write_item(piece) for piece in pieces])

    def take(self, pieces: Sequence[Piece]) -> None:
        """Write these: the planned pieces, or copies of them."""
        self.tensors = {piece.key: piece.tensor for piece in pieces}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The tensor of an item; torch's writer would copy one that is part of a larger storage."""
        return own_storage(self.tensors[write_item.index.fqn, tuple(write_item.index.offset)])


def own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, where it is one stretch of a CPU's, under a storage that holds nothing else."""
    tensor = tensor.detach()
    if not (tensor.is_cpu and tensor.is_contiguous() and tensor.numel()):
        return tensor
    memory = torch.from_numpy(tensor.view(-1).view(torch.uint8).numpy())
    return memory.view(tensor.dtype).view(tensor.shape)


def _write_item(piece: Piece) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.size())
    data = TensorWriteData(chunk, TensorProperties(dtype=piece.tensor.dtype), torch.Size(piece.size))
    return WriteItem(MetadataIndex(piece.name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def plan_save(pieces: Sequence[Piece], folder: Path, group: Optional[dist.ProcessGroup]) -> PlannedSave:
    """Plan to write pieces, and on rank 0 the index of those of all ranks; collective.

    Args:
        pieces: what this rank writes; of all ranks together, whole tensors.
        folder: exists and is empty.
        group: all ranks, over CPUs; None = the default group.
    """
    planner = PiecePlanner(pieces)
    rank, first = dist.get_rank(), dist.get_rank() == 0
    plans = [None] * dist.get_world_size() if first else None
    dist.gather_object(planner.plan, plans, dst=0, group=group)
    index = create_default_global_save_plan(plans)[1] if first else None
    if first:
        _see_whole_tensors(index)
    plan = dataclasses.replace(planner.plan, storage_data=_StoragePrefix(f"__{rank}_"))
    return PlannedSave(folder, planner, split_plan(plan, FILES_AT_ONCE), index)


def _see_whole_tensors(index: Metadata) -> None:
    for name, entry in index.state_dict_metadata.items():
        covered = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        assert covered == math.prod(entry.size), f"{name}: {covered} elements of {tuple(entry.size)} are planned"
