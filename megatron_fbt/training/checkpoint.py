"""Checkpoints of a run: Megatron-Core's distributed format, readable in any layout.

    <run.dir>/checkpoints/step_00000100/    weights and optimizer state, config.yaml, trainer_state.json
    <run.dir>/checkpoints/latest            name of the newest complete checkpoint

A checkpoint is written under a temporary name and renamed when all of it is there; then `latest` is replaced.
"""

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

from megatron_fbt.config.load import load_yaml
from megatron_fbt.core.checkpoint_io import load_tensors, save_tensors
from megatron_fbt.core.grad_sync import FUSION_GROUP
from megatron_fbt.core.optimizer_state import read_state, set_group_steps, write_state
from megatron_fbt.core.parallel import Layout
from megatron_fbt.core.stage import FBTStage
from megatron_fbt.errors import CheckpointError
from megatron_fbt.training.metrics import replace_file
from megatron_fbt.training.optimizer import Optimizer

TRACKER = "latest"
VOCABULARY_WEIGHTS = {"embedding.word_embeddings.weight", "output_layer.weight"}


@dataclass
class TrainerState:
    """What a run must remember beside weights and optimizer state."""

    step: int = 0
    """Steps executed."""
    consumed_samples: int = 0
    """Rows read; the next row's sample number."""
    token_equivalents: int = 0
    """Tokens times passes so far."""
    fusion_active: bool = False
    """Whether a multi-pass batch has come."""
    updates: int = 0
    """Optimizer updates made."""
    fusion_updates: int = 0
    """Updates of the fusion layer."""
    skipped: int = 0
    """Steps skipped because of bad numbers."""
    bad_in_a_row: int = 0
    """Of these, the last ones without a good step between."""


def step_folder(step: int) -> str:
    """Name of the checkpoint after so many steps."""
    return f"step_{step:08d}"


def latest_checkpoint(folder: Path) -> Optional[Path]:
    """The checkpoint that a run resumes from; None if the folder holds none.

    Args:
        folder: <run.dir>/checkpoints.

    Raises:
        CheckpointError: there are checkpoints but `latest` does not lead to one.
    """
    tracker = folder / TRACKER
    steps = sorted(path.name for path in folder.glob("step_*")) if folder.is_dir() else []
    if not tracker.is_file():
        if not steps:
            return None
        raise CheckpointError(
            f"{tracker} is missing, but {folder} holds checkpoints. To resume, write one name into it: "
            f"echo {steps[-1]} > {tracker}; to start afresh, choose another run.dir"
        )
    name = tracker.read_text(encoding="utf-8", errors="replace").strip()
    checkpoint = folder / name
    if name not in steps or not (checkpoint / "trainer_state.json").is_file():
        raise CheckpointError(
            f"{tracker} names {name!r}, which is not a complete checkpoint in {folder}. "
            f"Write one of these into it: {', '.join(steps) or 'there is none'}; or choose another run.dir"
        )
    return checkpoint


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
        try:
            if dist.get_rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
                (temporary / "config.yaml").write_text(config_yaml, encoding="utf-8")
            dist.barrier()
            save_tensors(content, temporary)
        except OSError as error:
            raise CheckpointError(f"cannot write the checkpoint {final}: {error}; free space and resume") from error
        dist.barrier()
        if dist.get_rank() == 0:
            self._publish(temporary, final, state)
        dist.barrier()
        return final

    def _publish(self, temporary: Path, final: Path, state: TrainerState) -> None:
        replace_file(temporary / "trainer_state.json", json.dumps(dataclasses.asdict(state), indent=2) + "\n")
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        replace_file(self.folder / TRACKER, final.name + "\n")
        if self.keep_last is not None:
            for old in sorted(self.folder.glob("step_*"))[: -self.keep_last]:
                if old != final:
                    shutil.rmtree(old)

    def load(self, checkpoint: Path, stage: FBTStage, optimizer: Optimizer) -> TrainerState:
        """Read weights and optimizer state into place.

        Raises:
            CheckpointError: a file is missing or damaged, or the checkpoint is of another model.
        """
        try:
            state = TrainerState(**json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8")))
            wanted = {**_model_state(stage, self.layout), **_optimizer_template(stage, self.layout)}
            content = load_tensors(wanted, checkpoint)
        except Exception as error:  # whatever the readers of a damaged file raise
            raise CheckpointError(
                f"cannot read the checkpoint {checkpoint}: {type(error).__name__}: {error}"
            ) from error
        states = {name: content.pop(name) for name in list(content) if name.startswith("optimizer.")}
        stage.load_state_dict(content)
        optimizer.updates, optimizer.fusion_updates = state.updates, state.fusion_updates
        for name, param in stage.named_parameters():
            values = {kind: states[f"optimizer.{kind}.{name}"] for kind in ("master", "exp_avg", "exp_avg_sq")}
            fusion = name.startswith("fusion.")
            write_state(optimizer.megatron, param, values, state.fusion_updates if fusion else state.updates)
        groups = optimizer.param_groups
        counts = [state.fusion_updates if group.get(FUSION_GROUP) else state.updates for group in groups]
        set_group_steps(optimizer.megatron, counts)
        return state


def _model_state(stage: FBTStage, layout: Layout) -> dict:
    metadata = {"non_homogeneous_layers": True, "dp_cp_group": layout.data_group}
    return stage.sharded_state_dict(metadata=metadata)


def _optimizer_state(stage: FBTStage, optimizer: Optimizer, layout: Layout) -> dict:
    tensors: Dict[str, Dict[str, torch.Tensor]] = {
        name: read_state(optimizer.megatron, param, layout.data_group) for name, param in stage.named_parameters()
    }
    return _sharded_like_weights(stage, layout, tensors)


def _optimizer_template(stage: FBTStage, layout: Layout) -> dict:
    kinds = ("master", "exp_avg", "exp_avg_sq")
    tensors = {
        name: {kind: torch.empty(param.shape, dtype=torch.float32) for kind in kinds}
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
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint import load as load_distributed
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        reader = FileSystemReader(str(checkpoint))
        entries = reader.read_metadata().state_dict_metadata
        names: List[str] = [
            name
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata) and not name.startswith("optimizer.")
        ]
        weights = {name: torch.empty(entries[name].size, dtype=entries[name].properties.dtype) for name in names}
        load_distributed(weights, storage_reader=reader, no_dist=True)
    except Exception as error:  # whatever the readers of a damaged file raise
        raise CheckpointError(f"cannot read the checkpoint {checkpoint}: {type(error).__name__}: {error}") from error
    vocab_size = load_yaml(checkpoint / "config.yaml").model.vocab_size
    for name in VOCABULARY_WEIGHTS.intersection(weights):
        weights[name] = weights[name][:vocab_size].clone()
    return weights
