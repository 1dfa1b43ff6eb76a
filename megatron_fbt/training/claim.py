"""The start of a run in its folder: take the lease, find the checkpoint to go on from, load it. Collective."""

import time
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Union

import torch.distributed as dist

from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.errors import DamagedCheckpointError
from megatron_fbt.training.failure import on_first_rank
from megatron_fbt.training.fingerprint import refuse_other_data
from megatron_fbt.training.lease import Lease
from megatron_fbt.training.metrics import replace_file
from megatron_fbt.training.reporter import Reporter
from megatron_fbt.training.resume import ResumePoint, checkpoint_before, find_resume_point, refuse_other_plan
from megatron_fbt.training.run_folder import TRACKER, changed_fields, read_trainer_state, refuse_another_model
from megatron_fbt.training.trainer import Trainer

WAIT_S = 0.5
"""Between two looks at somebody else's lease."""


def claim_run_folder(
    config: PretrainConfig, lease: Lease, say: Callable[[str], None], group: Optional[dist.ProcessGroup]
) -> ResumePoint:
    """Take the lease on rank 0 and find where the run goes on, the same for all ranks.

    Raises:
        CheckpointError: another run has the folder; or see find_resume_point.
    """

    def attempt() -> Union[str, ResumePoint]:
        return lease.try_to_take() or find_resume_point(config)

    said = False
    while isinstance(found := on_first_rank(attempt, group), str):
        if not said:
            say(f"{found}; waiting to see whether that run still lives")
        said = True
        time.sleep(WAIT_S)
    return found


def resume(
    config: PretrainConfig,
    trainer: Trainer,
    point: ResumePoint,
    planned: Optional[Path],
    fingerprint: Dict[str, Any],
    reporter: Reporter,
) -> None:
    """Load a checkpoint; if it is damaged, the complete one before.

    Args:
        config: of the run.
        trainer: new.
        point: with a checkpoint.
        planned: the checkpoint for which the plan was made.
        fingerprint: of the data.
        reporter: tells the user.

    Raises:
        CheckpointError: it is of another model or other data, or none can be read.
    """
    group = trainer.layout.cpu_group
    while True:
        checkpoint = point.checkpoint
        for remark in point.remarks:
            reporter.say(remark)
        if checkpoint != planned:
            plan = trainer.plan
            length = plan.train_steps, plan.train_samples
            refuse_other_plan(config, planned, checkpoint, plan.phase_start_steps, length)
        refuse_another_model(config, checkpoint)
        refuse_other_data(config, checkpoint, fingerprint)
        reporter.resuming(checkpoint, read_trainer_state(checkpoint), changed_fields(config, checkpoint))
        try:
            trainer.resume(checkpoint)
            break
        except DamagedCheckpointError as damage:
            point = on_first_rank(lambda bad=checkpoint, why=damage: checkpoint_before(bad, why), group)
    on_first_rank(lambda: _name_in_tracker(checkpoint), group)


def _name_in_tracker(checkpoint: Path) -> None:
    """After a return to an older checkpoint, the damaged one is not tried again."""
    tracker = checkpoint.parent / TRACKER
    if not tracker.is_file() or tracker.read_text(encoding="utf-8").strip() != checkpoint.name:
        replace_file(tracker, checkpoint.name + "\n")
