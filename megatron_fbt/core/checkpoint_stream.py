"""Writing a checkpoint's tensors one after another, by one process and without holding the model."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, Mapping, Tuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.planner import WriteItem

from megatron_fbt.core.checkpoint_write import PlannedSave
from megatron_fbt.core.manifest import FileEntry
from megatron_fbt.errors import CheckpointError


@dataclass(frozen=True)
class TensorSource:
    """A tensor that is read when its turn comes."""

    shape: Tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """The tensor on the CPU, in any number format that converts to `dtype`."""


class _OnDemand(DefaultSavePlanner):
    """Plans with shapes alone, and reads each tensor when it is written."""

    def __init__(self, sources: Mapping[str, TensorSource], progress: Callable[[int], None]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.sources, self.progress = sources, progress

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The tensor of an item."""
        source = self.sources[write_item.index.fqn]
        tensor = source.read().to(source.dtype).contiguous()
        assert tuple(tensor.shape) == source.shape, write_item.index.fqn
        self.progress(tensor.nbytes)
        return tensor


def stream_tensors(
    sources: Mapping[str, TensorSource], folder: Path, progress: Callable[[int], None] = lambda count: None
) -> Dict[str, FileEntry]:
    """Write whole tensors in Megatron-Core's distributed format, in order; needs no process group.

    Args:
        sources: By name.
        folder: Exists and holds no tensors.
        progress: Told the bytes of each tensor before it is written.

    Returns:
        All files by name, for the manifest.

    Raises:
        CheckpointError: A tensor cannot be read, or the folder not be written.
    """
    planner = _OnDemand(sources, progress)
    shapes = {name: torch.empty(source.shape, dtype=source.dtype, device="meta") for name, source in sources.items()}
    planner.set_up_planner(shapes, is_coordinator=True)
    plans, index = planner.create_global_plan([planner.create_local_plan()])
    plan = dataclasses.replace(planner.finish_plan(plans[0]), storage_data=_StoragePrefix("__0_"))
    save = PlannedSave(folder, planner, [plan], index)
    try:
        return save.finish([save.write()])
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder} cannot be written: {error}. Free space, or choose another folder.") from error
