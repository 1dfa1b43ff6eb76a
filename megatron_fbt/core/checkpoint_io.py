"""Writing and reading Megatron-Core's distributed checkpoint format."""

from pathlib import Path

import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)


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


def save_tensors(sharded: dict, folder: Path) -> None:
    """Write sharded tensors; collective. The folder must exist."""
    dist_checkpointing.save(sharded, str(folder), sharded_strategy=InProcessSave("torch_dist", 1))


def load_tensors(sharded: dict, folder: Path) -> dict:
    """Read sharded tensors in this run's layout, whatever layout wrote them; collective."""
    return dist_checkpointing.load(sharded, str(folder))
