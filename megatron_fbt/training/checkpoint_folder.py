"""How a checkpoint becomes visible, and which ones go; on rank 0, without torch.

A checkpoint is written under a temporary name and renamed when all of it is on the disk; then `latest` is replaced. A
kill at any instant leaves the checkpoint that `latest` names.
"""

import contextlib
import dataclasses
import json
import secrets
import shutil
from pathlib import Path
from typing import Any, Dict, Optional

from megatron_fbt.config.checkpoint import CheckpointConfig
from megatron_fbt.core.manifest import FileEntry, hash_file, read_manifest, sync_path, write_manifest
from megatron_fbt.errors import CheckpointError, DamagedCheckpointError
from megatron_fbt.training.metrics import replace_file
from megatron_fbt.training.retention import expendable
from megatron_fbt.training.run_folder import CONFIG_FILE, STATE_FILE, TRACKER, TrainerState, step_folder


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        folder: <run.dir>/checkpoints.
        config: says which ones are kept.
    """

    def __init__(self, folder: Path, config: CheckpointConfig):
        self.folder, self.config = folder, config
        self.attached: Optional[Path] = None
        """Folder of which every checkpoint holds a copy, file by file: the tokenizer's."""

    def final(self, step: int) -> Path:
        """The checkpoint of a step."""
        return self.folder / step_folder(step)

    def make_room(self, step: int) -> Path:
        """An empty folder to write into; what interrupted saves left behind goes.

        Each save has a folder of its own, so that a process left over from a killed run cannot write into it.

        Raises:
            CheckpointError: it cannot be made.
        """
        temporary = self.folder / f".{step_folder(step)}.{secrets.token_hex(4)}.tmp"
        try:
            self.sweep()
            temporary.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"cannot write the checkpoint {temporary}: {error}") from error
        return temporary

    def publish(
        self, temporary: Path, state: TrainerState, config_yaml: str, files: Dict[str, FileEntry], facts: Dict[str, Any]
    ) -> Path:
        """Complete a checkpoint whose tensors are written, make it visible and remove those that are not kept.

        Args:
            temporary: the folder with them, from make_room.
            state: of the run at that step.
            config_yaml: its configuration.
            files: what is in that folder.
            facts: for the manifest.

        Raises:
            CheckpointError: it could not be done; the checkpoint before is untouched.
        """
        final = self.final(state.step)
        try:
            own = {CONFIG_FILE: config_yaml, STATE_FILE: json.dumps(dataclasses.asdict(state), indent=2) + "\n"}
            for name, text in own.items():
                replace_file(temporary / name, text)
                files = {**files, name: hash_file(temporary / name)}
            for path in sorted(self.attached.iterdir()) if self.attached and self.attached.is_dir() else []:
                shutil.copyfile(path, temporary / path.name)
                sync_path(temporary / path.name)
                files = {**files, path.name: hash_file(temporary / path.name)}
            write_manifest(temporary, files, {"step": state.step, **facts})
            sync_path(temporary)
            if final.exists():  # out of the way at once; removed when its successor is in place
                final.rename(self.folder / f".{final.name}.old.tmp")
            temporary.rename(final)
            sync_path(self.folder)
            replace_file(self.folder / TRACKER, final.name + "\n")
            sync_path(self.folder)
            self._thin_out(state.step)
            self.sweep()
        except OSError as error:
            raise CheckpointError(f"cannot write the checkpoint {final}: {error}; free space and resume") from error
        return final

    def give_up(self, temporary: Path) -> None:
        """Free the space of a checkpoint that could not be completed."""
        with contextlib.suppress(OSError):
            shutil.rmtree(temporary)

    def _thin_out(self, newest: int) -> None:
        """Take checkpoints that are not kept out of the way, each at once; they are removed with the leftovers."""
        folders = {int(path.name.removeprefix("step_")): path for path in self.folder.glob("step_" + "[0-9]" * 8)}
        losses = {step: _validation_loss(path) for step, path in folders.items()} if self.config.keep_best else {}
        for step in expendable(list(folders), newest, losses, self.config):
            folders[step].rename(self.folder / f".{folders[step].name}.old.tmp")

    def sweep(self) -> None:
        """Remove what interrupted saves left behind, and checkpoints that are out of the way.

        Raises:
            OSError: it cannot be done.
        """
        for leftover in self.folder.glob(".*.tmp"):
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink(missing_ok=True)


def _validation_loss(checkpoint: Path) -> Optional[float]:
    """What the manifest says; None if nothing was measured at that step, or the checkpoint is damaged."""
    try:
        loss = read_manifest(checkpoint).facts.get("validation_loss")
    except DamagedCheckpointError:
        return None
    return loss if isinstance(loss, float) else None
