"""Checkpoints of a run: Megatron-Core's distributed format, readable in any layout.

    <run.dir>/checkpoints/step_00000100/    weights and optimizer state, config.yaml, trainer_state.json
    <run.dir>/checkpoints/latest            name of the newest complete checkpoint

A checkpoint is written under a temporary name and renamed when all of it is there; then `latest` is replaced.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Dict, Optional

import torch
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

from megatron_fbt.core.checkpoint_io import check_files, load_tensors, read_tensors, save_tensors
from megatron_fbt.core.grad_sync import FUSION_GROUP
from megatron_fbt.core.optimizer_state import MASTER, read_state, set_group_steps, state_kinds, write_state
from megatron_fbt.core.parallel import Layout
from megatron_fbt.core.stage import FBTStage
from megatron_fbt.errors import CheckpointError
from megatron_fbt.training.failure import on_first_rank
from megatron_fbt.training.metrics import replace_file
from megatron_fbt.training.optimizer import Optimizer
from megatron_fbt.training.run_folder import (
    CONFIG_FILE,
    STATE_FILE,
    TRACKER,
    TrainerState,
    read_trainer_state,
    step_folder,
    written_config,
)

VOCABULARY_WEIGHTS = {"embedding.word_embeddings.weight", "output_layer.weight"}


class Checkpointer:
    """Writes and reads the checkpoints of one run. Every method is collective.

    Args:
        folder: <run.dir>/checkpoints.
        keep_last: newest checkpoints kept; None = all.
        layout: this process's place.
    """

    def __init__(self, folder: Path, keep_last: Optional[int], layout: Layout):
        self.folder, self.keep_last, self.layout = folder, keep_last, layout

    def save(self, stage: FBTStage, optimizer: Optimizer, state: TrainerState, config_yaml: str) -> Path:
        """Write the checkpoint of state.step and return its folder.

        Raises:
            CheckpointError: it could not be written; the previous one is untouched.
        """
        final = self.folder / step_folder(state.step)
        temporary = self.folder / f".{final.name}.tmp"
        content = {**_model_state(stage, self.layout), **_optimizer_state(stage, optimizer, self.layout)}
        on_first_rank(lambda: self._make_room(temporary))
        save_tensors(content, temporary)
        on_first_rank(lambda: self._publish(temporary, final, state, config_yaml))
        return final

    def _make_room(self, temporary: Path) -> None:
        """An empty folder; what interrupted saves left behind goes."""
        try:
            self._sweep()
            temporary.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"cannot write the checkpoint {temporary}: {error}") from error

    def _sweep(self) -> None:
        for leftover in self.folder.glob(".step_*.tmp"):
            shutil.rmtree(leftover)

    def _publish(self, temporary: Path, final: Path, state: TrainerState, config_yaml: str) -> None:
        try:
            replace_file(temporary / CONFIG_FILE, config_yaml)
            replace_file(temporary / STATE_FILE, json.dumps(dataclasses.asdict(state), indent=2) + "\n")
            if final.exists():  # out of the way at once; removed when its successor is in place
                final.rename(self.folder / f".{final.name}.old.tmp")
            temporary.rename(final)
            replace_file(self.folder / TRACKER, final.name + "\n")
            if self.keep_last is not None:
                for old in sorted(self.folder.glob("step_*"))[: -self.keep_last]:
                    if old != final:
                        shutil.rmtree(old)
            self._sweep()
        except OSError as error:
            raise CheckpointError(f"cannot write the checkpoint {final}: {error}; free space and resume") from error

    def load(self, checkpoint: Path, stage: FBTStage, optimizer: Optimizer) -> TrainerState:
        """Read weights and optimizer state into place.

        Raises:
            CheckpointError: a file is missing or damaged, or the checkpoint is of another model.
        """
        on_first_rank(lambda: check_files(checkpoint))
        state = read_trainer_state(checkpoint)
        wanted = {**_model_state(stage, self.layout), **_optimizer_template(stage, optimizer, self.layout)}
        content = load_tensors(wanted, checkpoint)
        states = {name: content.pop(name) for name in list(content) if name.startswith("optimizer.")}
        stage.load_state_dict(content)
        optimizer.updates, optimizer.fusion_updates = state.updates, state.fusion_updates
        for name, param in stage.named_parameters():
            kinds = state_kinds(optimizer.megatron, param)
            values = {kind: states[f"optimizer.{kind}.{name}"] for kind in kinds}
            fusion = name.startswith("fusion.")
            write_state(optimizer.megatron, param, values, state.fusion_updates if fusion else state.updates)
        groups = optimizer.param_groups
        counts = [state.fusion_updates if group.get(FUSION_GROUP) else state.updates for group in groups]
        set_group_steps(optimizer.megatron, counts)
        return state

    @torch.no_grad()
    def load_weights(self, checkpoint: Path, stage: FBTStage, optimizer: Optimizer) -> None:
        """Read the weights alone into place, from the float32 master weights of whatever number format wrote them.

        Raises:
            CheckpointError: a file is missing or damaged, or the checkpoint is of another model.
        """
        on_first_rank(lambda: check_files(checkpoint))
        params = dict(stage.named_parameters())
        empty = {name: {MASTER: torch.empty(param.shape, dtype=torch.float32)} for name, param in params.items()}
        content = load_tensors(_sharded_like_weights(stage, self.layout, empty), checkpoint)
        for name, param in params.items():
            master = content[f"optimizer.{MASTER}.{name}"]
            param.copy_(master)
            write_state(optimizer.megatron, param, {MASTER: master}, updates=0)


def _model_state(stage: FBTStage, layout: Layout) -> dict:
    metadata = {"non_homogeneous_layers": True, "dp_cp_group": layout.data_group}
    return stage.sharded_state_dict(metadata=metadata)


def _optimizer_state(stage: FBTStage, optimizer: Optimizer, layout: Layout) -> dict:
    tensors: Dict[str, Dict[str, torch.Tensor]] = {
        name: read_state(optimizer.megatron, param, layout.data_group) for name, param in stage.named_parameters()
    }
    return _sharded_like_weights(stage, layout, tensors)


def _optimizer_template(stage: FBTStage, optimizer: Optimizer, layout: Layout) -> dict:
    tensors = {
        name: {kind: torch.empty(param.shape, dtype=torch.float32) for kind in state_kinds(optimizer.megatron, param)}
        for name, param in stage.named_parameters()
    }
    return _sharded_like_weights(stage, layout, tensors)


def _sharded_like_weights(stage: FBTStage, layout: Layout, tensors: Dict[str, Dict[str, torch.Tensor]]) -> dict:
    """Describe optimizer tensors to Megatron-Core as it describes the weights that they belong to."""
    weights = _model_state(stage, layout)
    described = {}
    for name, values in tensors.items():
        for kind, tensor in values.items():
            described[f"optimizer.{kind}.{name}"] = make_sharded_optimizer_tensor(
                weights[name], tensor, prefix=f"optimizer.{kind}"
            )
    return described


def read_weights(checkpoint: Path) -> Dict[str, torch.Tensor]:
    """All weights of a checkpoint by global name, whole, on the CPU and without padded vocabulary rows.

    Needs no process group.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    weights = read_tensors(checkpoint, without="optimizer.")
    vocab_size = written_config(checkpoint).model.vocab_size
    for name in VOCABULARY_WEIGHTS.intersection(weights):
        weights[name] = weights[name][:vocab_size].clone()
    return weights
