"""From a training checkpoint to an exported model."""

from pathlib import Path
from typing import Any, Dict, Optional, Union

from megatron_fbt.data.chat import chat_template
from megatron_fbt.data.token_ids import run_tokenizer
from megatron_fbt.hf.export import check_output, export_model
from megatron_fbt.hf.weights import parse_dtype
from megatron_fbt.training.checkpoint import read_weights
from megatron_fbt.training.run_folder import find_step_folder, written_config


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
    tokenizer = run_tokenizer(config)
    if config.data.format == "conversations":
        tokenizer.saved_chat_template = chat_template(config.data, tokenizer)
    number_format = parse_dtype(dtype or config.precision.dtype)
    report = export_model(read_weights(step), config, tokenizer, output, number_format, force)
    return {"checkpoint": str(step), **report}
