"""Checkpoints of a run: Megatron-Core's distributed format, readable in any layout.

    <run.dir>/checkpoints/step_00000100/    weights and optimizer state, config.yaml, trainer_state.json
    <run.dir>/checkpoints/latest            name of the newest complete checkpoint

Each rank writes its own file and hashes it on the way; rank 0 gathers the hashes and makes the checkpoint visible.
"""

import copy
import dataclasses
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from megatron_fbt import __version__
from megatron_fbt.config.checkpoint import CheckpointConfig
from megatron_fbt.core.checkpoint_io import check_files, read_pieces, read_tensors
from megatron_fbt.core.checkpoint_write import Written, plan_save
from megatron_fbt.core.fp8 import fp8_pieces
from megatron_fbt.core.grad_sync import FUSION_GROUP
from megatron_fbt.core.optimizer_state import MASTER
from megatron_fbt.core.parallel import Layout
from megatron_fbt.core.pieces import Piece, pieces_to_write, range_pieces, weight_pieces, without_memory
from megatron_fbt.core.stage import FBTStage
from megatron_fbt.errors import BadNumbersError, CheckpointError
from megatron_fbt.training.checkpoint_folder import CheckpointFolder
from megatron_fbt.training.failure import on_all_ranks, on_first_rank
from megatron_fbt.training.optimizer import Optimizer
from megatron_fbt.training.pending_save import PendingSave, Staging
from megatron_fbt.training.run_folder import TrainerState, read_trainer_state, written_config

VOCABULARY_WEIGHTS = {"embedding.word_embeddings.weight", "output_layer.weight"}


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
        self.before_publishing: Callable[[], None] = lambda: None
        """Called on rank 0 before a checkpoint becomes visible."""
        self._pending: Optional[PendingSave] = None
        self._staging = Staging()

    def save(self, stage: FBTStage, optimizer: Optimizer, state: TrainerState, config_yaml: str) -> Path:
        """Write the checkpoint of state.step and return its folder.

        Raises:
            CheckpointError: it could not be written; the previous one is untouched.
            BadNumbersError: a weight is not finite; nothing was written.
        """
        self.begin(stage, optimizer, state, config_yaml, background=False)
        return self.finish()

    def wait_for_copy(self) -> None:
        """Wait until weights and optimizer states may change: a save in the background copies them first."""
        if self._pending is not None:
            self._pending.wait_for_copy()

    def begin(
        self, stage: FBTStage, optimizer: Optimizer, state: TrainerState, config_yaml: str, background: bool = True
    ) -> None:
        """Begin to write the checkpoint of state.step; `finish` must follow.

        Args:
            stage: the model.
            optimizer: its optimizer.
            state: of the run.
            config_yaml: its configuration.
            background: copy and write in a thread, while training goes on up to `wait_for_copy`.

        Raises:
            CheckpointError: it cannot be written.
        """
        described = _describe(stage, optimizer, self.layout)
        weights = _weight_pieces(described, stage, optimizer)
        pieces = [*_flat(weights), *_flat(_state_pieces(described, stage, optimizer)), *fp8_pieces(stage)]
        own = pieces_to_write(pieces, self.layout.data_rank, self.layout.data_size)
        temporary = on_first_rank(lambda: self._make_room(state.step), self.group)
        planned = plan_save(own, temporary, self.group)
        self._pending = PendingSave(planned, own, _flat(weights), copy.deepcopy(state), config_yaml, self._facts())
        if background:
            self._pending.start(self._staging)

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
            BadNumbersError: a weight is not finite; nothing was written.
        """
        pending, self._pending = self._pending, None
        try:
            parts = on_all_ranks(pending.result, self.group)
            return on_first_rank(lambda: self._publish(pending, parts), self.group)
        except (CheckpointError, BadNumbersError):
            if dist.get_rank() == 0:
                self.folder.give_up(pending.planned.folder)
            raise

    def _make_room(self, step: int) -> Path:
        self.guard()
        return self.folder.make_room(step)

    def _publish(self, pending: PendingSave, parts: List[Written]) -> Path:
        self.guard()
        self.before_publishing()
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
        optimizer.updates, optimizer.fusion_updates = state.updates, state.fusion_updates
        if optimizer.scaler is not None and state.loss_scaler:
            optimizer.scaler.restore(state.loss_scaler)
        self._read_into(checkpoint, stage, optimizer, state, [], fp8_pieces(stage))
        groups = optimizer.param_groups
        counts = [state.fusion_updates if group.get(FUSION_GROUP) else state.updates for group in groups]
        optimizer.set_group_steps(counts)
        return state

    def load_weights(self, checkpoint: Path, stage: FBTStage, optimizer: Optimizer) -> None:
        """Read the weights alone into place, in float32 where the checkpoint has that.

        Raises:
            CheckpointError: a file is missing or damaged, or the checkpoint is of another model.
        """
        self._read_into(checkpoint, stage, optimizer, TrainerState(), [f"optimizer.{MASTER}."])

    def _read_into(
        self,
        checkpoint: Path,
        stage: FBTStage,
        optimizer: Optimizer,
        state: TrainerState,
        better: List[str],
        optional: Sequence[Piece] = (),
    ) -> None:
        """Read weights and the states that they have after so many updates.

        Every rank checks the files that it reads, rank 0 that none is missing.

        Args:
            checkpoint: where from.
            stage: the model.
            optimizer: its optimizer.
            state: says how many updates there were.
            better: prefixes of names that weights are read from where the checkpoint has them.
            optional: more to be read where the checkpoint has it in this shape; left as it is where not.
        """
        verify = self.config.verify_on_load
        on_first_rank(lambda: check_files(checkpoint, verify) and None, self.group)

        def read() -> None:
            index = check_files(checkpoint, verify=False)
            optimizer.before_loading()
            described = _describe(stage, optimizer, self.layout)
            wanted = _state_pieces(described, stage, optimizer, state)
            for name, pieces in _weight_pieces(described, stage, optimizer).items():
                own_master = all(piece.tensor.dtype == torch.float32 for piece in pieces)
                wanted[f"weight {name}"] = _from(pieces, [f"optimizer.{MASTER}."] if own_master else better, index)
            pieces = [_without_master(piece, index) for piece in _flat(wanted)]
            read_pieces(pieces + [piece for piece in optional if _is_stored(piece, index)], checkpoint, index, verify)

        on_all_ranks(read, self.group)
        optimizer.after_loading()


def _describe(stage: FBTStage, optimizer: Optimizer, layout: Layout) -> Dict[str, Any]:
    """Megatron-Core's description of the weights."""
    metadata = {"non_homogeneous_layers": True, "dp_cp_group": layout.data_group}
    with optimizer.whole_shapes():
        described = stage.sharded_state_dict(metadata=metadata)
        for name, param in stage.named_parameters():
            if optimizer.owned_weight(param) is not None:
                described[name] = without_memory(described[name])
    return described


def _weight_pieces(described: Dict[str, Any], stage: FBTStage, optimizer: Optimizer) -> Dict[str, List[Piece]]:
    """Pieces of the weights; where data-parallel ranks share them out, this rank's."""
    params = dict(stage.named_parameters())
    owned = {name: optimizer.owned_weight(param) for name, param in params.items()}
    whole = {name: entry for name, entry in described.items() if owned.get(name) is None}
    ranges = {
        name: range_pieces(described[name], "", part.begin, part.values[""], True)
        for name, part in owned.items()
        if part is not None
    }
    return {**weight_pieces(whole), **ranges}


def _flat(pieces: Dict[str, List[Piece]]) -> List[Piece]:
    return [piece for found in pieces.values() for piece in found]


def _state_pieces(
    described: Dict[str, Any], stage: FBTStage, optimizer: Optimizer, state: Optional[TrainerState] = None
) -> Dict[str, List[Piece]]:
    """Pieces of the optimizer's states.

    Args:
        described: the weights.
        stage: the model.
        optimizer: its optimizer.
        state: give parameters the states that they have after its updates, to be filled; None = states as they are.
    """
    found = {}
    for name, param in stage.named_parameters():
        if state is None:
            owned = optimizer.owned_state(param)
        else:
            updates = state.fusion_updates if name.startswith("fusion.") else state.updates
            owned = optimizer.make_state(param, updates)
        for kind, values in owned.values.items():
            prefix = f"optimizer.{kind}."
            found[prefix + name] = range_pieces(described[name], prefix, owned.begin, values, optimizer.is_sharded)
    return found


def _from(pieces: List[Piece], prefixes: List[str], index: Metadata) -> List[Piece]:
    """The same pieces under the first of the prefixes with which the checkpoint has them."""
    for prefix in prefixes:
        if all(prefix + piece.name in index.state_dict_metadata for piece in pieces):
            return [dataclasses.replace(piece, name=prefix + piece.name) for piece in pieces]
    return pieces


def _is_stored(piece: Piece, index: Metadata) -> bool:
    """Whether the checkpoint has a tensor of a piece's name and size."""
    return tuple(getattr(index.state_dict_metadata.get(piece.name), "size", ())) == piece.size


def _without_master(piece: Piece, index: Metadata) -> Piece:
    """Checkpoints of float32 weights hold no masters: these are the weights."""
    weight = piece.name.removeprefix(f"optimizer.{MASTER}.")
    return piece if piece.name in index.state_dict_metadata else dataclasses.replace(piece, name=weight)


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
