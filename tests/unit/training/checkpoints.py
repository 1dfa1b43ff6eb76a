"""Checkpoints without tensors, published as a run publishes its own."""

from pathlib import Path
from typing import Any, Dict, Optional

from megatron_fbt.config.load import dump_yaml
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.core.manifest import hash_file
from megatron_fbt.training.checkpoint_folder import CheckpointFolder
from megatron_fbt.training.run_folder import TrainerState


def publish(
    run: Path, step: int, config: Optional[PretrainConfig] = None, facts: Optional[Dict[str, Any]] = None, **state: Any
) -> Path:
    """The checkpoint of a step in a run folder, with one file `tensors`."""
    config = config or PretrainConfig()
    folder = CheckpointFolder(run / "checkpoints", config.checkpoint)
    temporary = folder.make_room(step)
    (temporary / "tensors").write_text(f"weights of step {step}")
    files = {"tensors": hash_file(temporary / "tensors")}
    return folder.publish(temporary, TrainerState(step=step, **state), dump_yaml(config), files, facts or {})
