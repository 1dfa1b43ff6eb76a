"""From a training checkpoint to an exported model."""

from pathlib import Path
from typing import Any, Dict, Optional, Union

from megatron_fbt.config.load import load_yaml
from megatron_fbt.data.tokenizer import build_tokenizer
from megatron_fbt.errors import CheckpointError
from megatron_fbt.hf.export import check_output, export_model
from megatron_fbt.hf.weights import parse_dtype
from megatron_fbt.training.checkpoint import read_weights

TRACKER = "latest"


def find_step_folder(checkpoint: Union[str, Path]) -> Path:
    """Folder of one checkpoint.

    Args:
        checkpoint: The step's folder itself, a `checkpoints` folder or a run folder; of the last two, the checkpoint
            that the tracker file `latest` names.

    Raises:
        CheckpointError: No checkpoint there; the message has the path.
    """
    folder = Path(checkpoint)
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint {folder}: no such folder. Name a step_... folder, or the run's folder.")
    if (folder / "checkpoints").is_dir():
        folder = folder / "checkpoints"
    tracker = folder / TRACKER
    if tracker.is_file():
        name = tracker.read_text(encoding="utf-8", errors="replace").strip()
        if not name or Path(name).name != name or not (folder / name).is_dir():
            raise CheckpointError(
                f"{tracker}: names {name!r}, which is not a folder beside it. Name a step_... folder."
            )
        folder = folder / name
    if not (folder / "config.yaml").is_file():
        raise CheckpointError(
            f"checkpoint {folder}: neither config.yaml nor a tracker file '{TRACKER}' in it. "
            "Name a step_... folder, or the run's folder."
        )
    return folder


def convert_checkpoint(
    checkpoint: Union[str, Path],
    output: Union[str, Path],
    dtype: Optional[str] = None,
    tokenizer_path: Optional[str] = None,
    force: bool = False,
) -> Dict[str, Any]:
    """Export a checkpoint.

    Args:
        checkpoint: As in find_step_folder.
        output: Folder to make.
        dtype: "fp32", "bf16" or "fp16"; None = that of the run.
        tokenizer_path: Where the tokenizer is now, if it is no longer where the run had it.
        force: Replace an earlier export in `output`.

    Returns:
        The report of export_model, with the checkpoint's folder.

    Raises:
        ConfigError: `output` is in use.
        CheckpointError: The checkpoint cannot be found or read, or the export not written.
        DataError: The tokenizer cannot be read.
    """
    step = find_step_folder(checkpoint)
    check_output(Path(output).absolute(), force)
    config = written_config(step)
    if tokenizer_path is not None:
        config.data.tokenizer.path = tokenizer_path
    tokenizer = build_tokenizer(config.data.tokenizer)
    number_format = parse_dtype(dtype or config.precision.dtype)
    report = export_model(read_weights(step), config, tokenizer, output, number_format, force)
    return {"checkpoint": str(step), **report}
