"""Checkpoint folders written by one process without a process group."""

import json
from pathlib import Path
from typing import Dict, Optional

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch import Tensor

from megatron_fbt.config.load import dump_yaml
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.core.manifest import hash_file, write_manifest


def write_checkpoint(folder: Path, weights: Dict[str, Tensor], config: PretrainConfig, state: Optional[dict] = None):
    """A step_... folder with these canonical weights, and an optimizer state that no export may touch."""
    folder.mkdir(parents=True)
    tensors = {**weights, "optimizer.exp_avg.decoder.final_layernorm.weight": torch.full((3,), float("nan"))}
    writer = torch_checkpoint.FileSystemWriter(str(folder), single_file_per_rank=True)
    torch_checkpoint.save(tensors, storage_writer=writer, no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({}, folder / "common.pt")
    write_manifest(folder, {path.name: hash_file(path) for path in folder.iterdir()}, {})
    (folder / "config.yaml").write_text(dump_yaml(config))
    if state is not None:
        (folder / "trainer_state.json").write_text(json.dumps(state))
