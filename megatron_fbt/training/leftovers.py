"""What kills leave behind in a run folder: half-written files, and checkpoints that were being removed. No torch."""

import contextlib
import os
from pathlib import Path

from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.errors import CheckpointError
from megatron_fbt.training.checkpoint_folder import CheckpointFolder
from megatron_fbt.training.lease import Lease
from megatron_fbt.training.run_folder import checkpoints_folder


def remove_drafts(run_dir: Path) -> None:
    """Remove files that other processes, which are no more, were about to put into their places.

    Args:
        run_dir: a run folder whose lease this process holds.
    """
    for draft in run_dir.glob(".*.tmp"):
        if draft.is_file() and f".{os.getpid()}." not in draft.name:
            draft.unlink(missing_ok=True)


def tidy_up(config: PretrainConfig) -> None:
    """Remove what a kill at the very end of a finished run left behind, if nobody else is at work in the folder."""
    run_dir = Path(config.run.dir)
    lease = Lease(run_dir, config.checkpoint.lease_seconds)
    with contextlib.suppress(CheckpointError, OSError):
        if lease.try_to_take() is None:
            try:
                remove_drafts(run_dir)
                CheckpointFolder(checkpoints_folder(config), config.checkpoint).sweep()
            finally:
                lease.release()
