"""Where a run goes on: the checkpoint that `latest` names, or the one before if that is damaged.

Whatever cannot be told for certain is an error: a run never starts again over an old one.
"""

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import List, Optional, Sequence, Tuple

from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.core.manifest import check_content, check_sizes
from megatron_fbt.errors import CheckpointError, DamagedCheckpointError
from megatron_fbt.training.batch_size import run_length
from megatron_fbt.training.run_folder import (
    CONFIG_FILE,
    STATE_FILE,
    TRACKER,
    checkpoints_folder,
    read_trainer_state,
    step_folder,
    steps_and_samples,
    stored_phase_starts,
    written_config,
)

STEP_NAME = re.compile(r"step_\d{8,}")


@dataclass(frozen=True)
class ResumePoint:
    """From where a run goes on."""

    checkpoint: Optional[Path] = None
    """None = a new run."""
    remarks: List[str] = field(default_factory=list)
    """What the user should know about the choice."""


def find_resume_point(config: PretrainConfig) -> ResumePoint:
    """Where a run starts, by checkpoint.resume; sizes of files are checked, their content is not.

    Raises:
        CheckpointError: by checkpoint.resume there must or must not be a checkpoint; or it is not clear which one.
    """
    policy, folder = config.checkpoint.resume, checkpoints_folder(config)
    if policy == "never":
        _refuse_used_folder(Path(config.run.dir))
        return ResumePoint()
    point = latest_complete(folder)
    if policy == "auto" and point.checkpoint is None:
        _refuse_lost_checkpoints(Path(config.run.dir))
    if policy == "must" and point.checkpoint is None:
        raise CheckpointError(
            f"checkpoint.resume = 'must': there is no checkpoint in {folder}; set run.dir to the folder of the run, or "
            "checkpoint.resume to auto to start a new one"
        )
    return point


def _refuse_used_folder(run_dir: Path) -> None:
    """What a run leaves in its folder once its processes have met."""
    checkpoints = run_dir / "checkpoints"
    found = sorted(str(path) for path in checkpoints.iterdir()) if checkpoints.is_dir() else []
    found += [str(run_dir / name) for name in ("config.yaml", "metrics.jsonl") if (run_dir / name).exists()]
    if found:
        raise CheckpointError(
            f"checkpoint.resume = 'never': run.dir = {str(run_dir)!r} already holds {found[0]}; name a new folder, or "
            "set checkpoint.resume to auto to go on from its checkpoint"
        )


def _refuse_lost_checkpoints(run_dir: Path) -> None:
    """A run that had a checkpoint must not start again because its folder is not there, or not mounted."""
    status = run_dir / "status.json"
    try:
        name = json.loads(status.read_text(encoding="utf-8"))["last_checkpoint"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return
    if name is not None:
        raise CheckpointError(
            f"{run_dir / 'checkpoints'} holds no checkpoint, but {status} says that the run has written {name!r}. Put "
            f"the checkpoints back; to start the run afresh, remove {status} or choose another run.dir"
        )


def latest_complete(folder: Path) -> ResumePoint:
    """The checkpoint that `latest` names; if files of it are missing or cut, the newest complete one before.

    Args:
        folder: <run.dir>/checkpoints.

    Raises:
        CheckpointError: there are checkpoints, but it is not clear from which one to go on.
    """
    if os.path.lexists(folder) and not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder, or a symbolic link to one that is not there; mend it, or choose another run.dir"
        )
    steps = step_names(folder)
    tracker = folder / TRACKER
    if not tracker.is_file():
        return _without_tracker(folder, steps)
    name = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if name not in steps:
        raise CheckpointError(
            f"{tracker} names {name[:80]!r}, which is not a checkpoint in {folder}. "
            f"Write one of these into it: {_recommended(folder, steps)}; or choose another run.dir"
        )
    try:
        check_complete(folder / name)
    except DamagedCheckpointError as damage:
        return checkpoint_before(folder / name, damage)
    return ResumePoint(folder / name)


def checkpoint_before(damaged: Path, damage: DamagedCheckpointError) -> ResumePoint:
    """The newest complete checkpoint that is older than a damaged one.

    Raises:
        DamagedCheckpointError: the damage, if there is none.
    """
    remarks = [f"{damaged.name} cannot be used: {damage}"]
    for name in reversed([step for step in step_names(damaged.parent) if step < damaged.name]):
        try:
            check_complete(damaged.parent / name)
        except DamagedCheckpointError as error:
            remarks.append(f"{name} cannot be used: {error}")
            continue
        return ResumePoint(damaged.parent / name, [*remarks, f"going back to {name}, the complete checkpoint before"])
    raise damage


def refuse_other_plan(
    config: PretrainConfig,
    planned: Optional[Path],
    checkpoint: Path,
    phase_starts: Sequence[int],
    length: Tuple[int, int],
) -> None:
    """Refuse a checkpoint with another schedule of passes or another length than the plan was made for.

    Args:
        config: of the run.
        planned: the checkpoint that the plan was made for; None = a new run. The run that held the folder until now may
            have removed it since.
        checkpoint: from which the run goes on.
        phase_starts: first steps of the phases in the plan.
        length: steps and rows of the run in the plan.

    Raises:
        CheckpointError: it has.
    """
    remedy = f"have it named by {checkpoint.parent / TRACKER} and start again"
    stored = stored_phase_starts(config, checkpoint)
    if planned is not None and not planned.is_dir():
        same = stored is None or stored == list(phase_starts)
    else:
        same = stored == (None if planned is None else stored_phase_starts(config, planned))
    if not same:
        raise CheckpointError(
            f"going on from {checkpoint}, the phases of feedback.schedule start elsewhere than planned; {remedy}"
        )
    found = run_length(config.training, config.data.sequence_length, steps_and_samples(checkpoint))
    if found != tuple(length):
        raise CheckpointError(
            f"going on from {checkpoint}, the run has {found[0]:,} steps and {found[1]:,} rows instead of the planned "
            f"{length[0]:,} and {length[1]:,}; {remedy}"
        )


def check_complete(checkpoint: Path) -> None:
    """See that all files of a checkpoint are there in their sizes, and that counters and configuration are intact.

    A folder with the name of a step must hold that step: retention and going back follow the names.

    Raises:
        DamagedCheckpointError: naming the file.
    """
    manifest = check_sizes(checkpoint)
    for name in (CONFIG_FILE, STATE_FILE):
        check_content(checkpoint, name, manifest)
    try:
        step = read_trainer_state(checkpoint).step
        written_config(checkpoint)
    except CheckpointError as error:
        raise DamagedCheckpointError(str(error)) from error
    if STEP_NAME.fullmatch(checkpoint.name) and checkpoint.name != step_folder(step):
        raise DamagedCheckpointError(f"{checkpoint} holds step {step}: give it its name back, {step_folder(step)}")


def step_names(folder: Path) -> List[str]:
    """Names of a run's checkpoints in the order of their steps; a copy under another name is not one of them.

    Args:
        folder: <run.dir>/checkpoints.
    """
    names = [path.name for path in folder.glob("step_*")] if folder.is_dir() else []
    return sorted(name for name in names if STEP_NAME.fullmatch(name))


def _without_tracker(folder: Path, steps: List[str]) -> ResumePoint:
    """A kill may have come between the first checkpoint and the first tracker; anything else is unclear."""
    if not steps:
        return ResumePoint()
    if len(steps) == 1 and _is_complete(folder / steps[0]):
        return ResumePoint(
            folder / steps[0], [f"{folder / TRACKER} is missing; {steps[0]} is complete and the only checkpoint"]
        )
    raise CheckpointError(
        f"{folder / TRACKER} is missing, but {folder} holds checkpoints. To resume, write one name into it, such as "
        f"{_recommended(folder, steps)}; to start afresh, choose another run.dir"
    )


def _recommended(folder: Path, steps: List[str]) -> str:
    return ", ".join(step for step in steps if _is_complete(folder / step)) or "there is none"


def _is_complete(checkpoint: Path) -> bool:
    try:
        check_complete(checkpoint)
    except DamagedCheckpointError:
        return False
    return os.path.isdir(checkpoint)
