"""Checkpoints of a run: Megatron-Core's distributed format, readable in any layout.

    <run.dir>/checkpoints/step_00000100/    weights and optimizer state, config.yaml, trainer_state.json
    <run.dir>/checkpoints/latest            name of the newest complete checkpoint

Each rank writes its own file and hashes it on the way; rank 0 gathers the hashes and makes the checkpoint visible.
"""

import copy
import threading
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

from megatron_fbt import __version__
from megatron_fbt.config.checkpoint import CheckpointConfig
from megatron_fbt.core.checkpoint_io import check_files, load_tensors, read_tensors
from megatron_fbt.core.checkpoint_write import PlannedSave, Written, plan_save
from megatron_fbt.core.grad_sync import FUSION_GROUP
from megatron_fbt.core.optimizer_state import MASTER, read_state, set_group_steps, state_kinds, write_state
from megatron_fbt.core.parallel import Layout
from megatron_fbt.core.stage import FBTStage
from megatron_fbt.errors import BadNumbersError, CheckpointError
from megatron_fbt.training.checkpoint_folder import CheckpointFolder
from megatron_fbt.training.failure import on_all_ranks, on_first_rank
from megatron_fbt.training.optimizer import Optimizer
from megatron_fbt.training.run_folder import TrainerState, read_trainer_state, written_config

VOCABULARY_WEIGHTS = {"embedding.word_embeddings.weight", "output_layer.weight"}


class PendingSave:
    """A checkpoint of which this rank writes its part, in a thread if training is to go on meanwhile."""

    def __init__(self, planned: PlannedSave, state: TrainerState, config_yaml: str, facts: Dict[str, Any]):
        self.planned, self.state, self.config_yaml, self.facts = planned, state, config_yaml, facts
        self._written: Optional[Written] = None
        self._error: Optional[Exception] = None
        self._thread: Optional[threading.Thread] = None

    def start(self) -> None:
        """Begin to write, in a thread."""
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether the thread still writes."""
        return self._thread is not None and self._thread.is_alive()

    def result(self) -> Written:
        """Write this rank's part, or wait for the thread that does.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._thread is None:
            self._write()
        else:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._written

    def _write(self) -> None:
        try:
            self._written = self.planned.write()
        except Exception as error:
            self._error = error


class Checkpointer:
    """Writes and reads the checkpoints of one run. Every method is collective.

    Args:
        folder: <run.dir>/checkpoints.
        config: the checkpoint section; None = its defaults.
        layout: this process's place.
    """

    def __init__(self, folder: Path, config: Optional[CheckpointConfig], layout: Layout):
        self.config, self.layout, self.group = config or CheckpointConfig(), layout, layout.cpu_group
        self.folder = CheckpointFolder(folder, self.config)
        self.facts: Dict[str, Any] = {}
        """More that the manifest is to hold."""
        self.guard: Callable[[], None] = lambda: None
        """Called on rank 0 before something is changed in the folder."""
        self._pending: Optional[PendingSave] = None

    def save(self, stage: FBTStage, optimizer: Optimizer, state: TrainerState, config_yaml: str) -> Path:
        """Write the checkpoint of state.step and return its folder.

        Raises:
            CheckpointError: it could not be written; the previous one is untouched.
            BadNumbersError: a weight is not finite; nothing was written.
        """
        self.begin(stage, optimizer, state, config_yaml, background=False)
        return self.finish()

    def begin(
        self, stage: FBTStage, optimizer: Optimizer, state: TrainerState, config_yaml: str, background: bool = True
    ) -> None:
        """Copy what the checkpoint of state.step is to hold, and begin to write it; `finish` must follow.

        Args:
            stage: the model.
            optimizer: its optimizer.
            state: of the run.
            config_yaml: its configuration.
            background: write in a thread, while training goes on.

        Raises:
            CheckpointError: it cannot be written.
            BadNumbersError: a weight is not finite; nothing was written.
        """
        on_all_ranks(lambda: _refuse_bad_weights(stage, state.step), self.group)
        weights = _model_state(stage, self.layout)
        if background:
            _detach_from_training(weights)
        content = {**weights, **_optimizer_state(stage, optimizer, self.layout)}
        temporary = on_first_rank(lambda: self._make_room(state.step), self.group)
        planned = plan_save(content, temporary, self.group)
        self._pending = PendingSave(planned, copy.deepcopy(state), config_yaml, self._facts())
        if background:
            self._pending.start()

    @property
    def pending(self) -> bool:
        """Whether a checkpoint was begun and not finished; the same on all ranks."""
        return self._pending is not None

    @property
    def busy(self) -> bool:
        """Whether this rank still writes its part; not collective."""
        return self._pending is not None and self._pending.busy

    def finish(self) -> Path:
        """Wait until all ranks have written their parts, make the checkpoint visible and return its folder.

        Raises:
            CheckpointError: it could not be written; the previous one is untouched.
        """
        pending, self._pending = self._pending, None
        try:
            parts = on_all_ranks(pending.result, self.group)
            return on_first_rank(lambda: self._publish(pending, parts), self.group)
        except CheckpointError:
            if dist.get_rank() == 0:
                self.folder.give_up(pending.planned.folder)
            raise

    def _make_room(self, step: int) -> Path:
        self.guard()
        return self.folder.make_room(step)

    def _publish(self, pending: PendingSave, parts: List[Written]) -> Path:
        self.guard()
        try:
            files = pending.planned.finish(parts)
        except OSError as error:
            raise CheckpointError(
                f"cannot write the checkpoint {pending.planned.folder}: {error}; free space and resume"
            ) from error
        return self.folder.publish(pending.planned.folder, pending.state, pending.config_yaml, files, pending.facts)

    def _facts(self) -> Dict[str, Any]:
        """What the manifest tells about the run that writes."""
        layout = self.layout
        return {
            **self.facts,
            "layout": {"tensor": layout.tensor_size, "pipeline": layout.pipeline_size, "data": layout.data_size},
            "versions": {
                "megatron_fbt": __version__,
                "megatron_core": metadata.version("megatron-core"),
                "torch": torch.__version__,
            },
        }

    def load(self, checkpoint: Path, stage: FBTStage, optimizer: Optimizer) -> TrainerState:
        """Read weights and optimizer state into place.

        Raises:
            DamagedCheckpointError: a file is missing or damaged, or the checkpoint is of another model.
        """
        state = read_trainer_state(checkpoint)
        wanted = {**_model_state(stage, self.layout), **_optimizer_template(stage, optimizer, self.layout)}
        content = self._read(wanted, checkpoint)
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

    def _read(self, wanted: dict, checkpoint: Path) -> dict:
        """Read tensors; every rank checks the files that it reads, rank 0 that none is missing."""
        verify, content = self.config.verify_on_load, {}
        on_first_rank(lambda: check_files(checkpoint, verify) and None, self.group)
        on_all_ranks(lambda: content.update(load_tensors(wanted, checkpoint, verify)), self.group)
        return content

    @torch.no_grad()
    def load_weights(self, checkpoint: Path, stage: FBTStage, optimizer: Optimizer) -> None:
        """Read the weights alone into place, from the float32 master weights of whatever number format wrote them.

        Raises:
            CheckpointError: a file is missing or damaged, or the checkpoint is of another model.
        """
        params = dict(stage.named_parameters())
        empty = {name: {MASTER: torch.empty(param.shape, dtype=torch.float32)} for name, param in params.items()}
        content = self._read(_sharded_like_weights(stage, self.layout, empty), checkpoint)
        for name, param in params.items():
            master = content[f"optimizer.{MASTER}.{name}"]
            param.copy_(master)
            write_state(optimizer.megatron, param, {MASTER: master}, updates=0)


def _model_state(stage: FBTStage, layout: Layout) -> dict:
    metadata = {"non_homogeneous_layers": True, "dp_cp_group": layout.data_group}
    return stage.sharded_state_dict(metadata=metadata)


@torch.no_grad()
def _refuse_bad_weights(stage: FBTStage, step: int) -> None:
    for name, param in stage.named_parameters():
        if not torch.isfinite(param).all():
            raise BadNumbersError(
                f"step {step}: weight {name} holds numbers that are not finite; no checkpoint was written. Resume from "
                "the one before, with a lower optimizer.lr"
            )


def _detach_from_training(weights: dict) -> None:
    """Replace tensors that training changes by copies on the CPU; optimizer states are copies already."""
    for entry in weights.values():
        if torch.is_tensor(getattr(entry, "data", None)):
            entry.data = entry.data.detach().to("cpu", copy=True)


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
