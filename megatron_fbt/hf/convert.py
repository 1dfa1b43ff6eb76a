"""From a training checkpoint to an exported model."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Dict, Optional, Union

import torch

from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.core.tensor_reader import TensorReader
from megatron_fbt.data.stored_tokenizer import checkpoint_tokenizer
from megatron_fbt.hf.export import ExportOptions, export_model
from megatron_fbt.hf.folder import check_output, output_place
from megatron_fbt.hf.stock import has_stock_class
from megatron_fbt.hf.weights import VOCABULARY_TABLES, parse_dtype
from megatron_fbt.training.run_folder import (
    STATE_FILE,
    TrainerState,
    find_step_folder,
    read_trainer_state,
    written_config,
)


@dataclass
class Conversion:
    """What a conversion is asked for.

    Attributes:
        dtype: "fp32", "bf16" or "fp16"; None = that of the run.
        format: "fbt" or "llama", see ExportOptions; None = llama for a baseline that a stock class computes, else fbt.
        tokenizer_path: Another place to read the tokenizer from; None = the checkpoint's own copy.
        max_shard_size: Largest file of weights.
        verify: Compare logits with those of the training model.
        force: Replace an earlier export in the output folder.
    """

    dtype: Optional[str] = None
    format: Optional[str] = None
    tokenizer_path: Optional[str] = None
    max_shard_size: str = "5GB"
    verify: bool = False
    force: bool = False


def convert_checkpoint(
    checkpoint: Union[str, Path], output: Union[str, Path], conversion: Optional[Conversion] = None
) -> Dict[str, Any]:
    """Export a checkpoint; memory does not grow with the model, except to verify it.

    Args:
        checkpoint: As in find_step_folder.
        output: Folder to make.
        conversion: What is asked for.

    Returns:
        The report of export_model, with the checkpoint's folder.

    Raises:
        ConfigError: `output` is in use, or the format cannot have the model.
        CheckpointError: The checkpoint cannot be found or read, or the export not written.
        DataError: The tokenizer cannot be read.
    """
    conversion = conversion or Conversion()
    step = find_step_folder(checkpoint)
    check_output(output_place(output), conversion.force)
    config = written_config(step)
    tokenizer = checkpoint_tokenizer(step, config, conversion.tokenizer_path)
    state = read_trainer_state(step) if (step / STATE_FILE).is_file() else None
    options = ExportOptions(
        dtype=parse_dtype(conversion.dtype or config.precision.dtype),
        format=conversion.format or default_format(config, state),
        max_shard_size=conversion.max_shard_size,
        force=conversion.force,
        state=state,
    )
    vocab_size = config.model.vocab_size
    first_rows = {} if vocab_size is None else {name: vocab_size for name in VOCABULARY_TABLES}
    if conversion.verify:
        options.verify = partial(_verify, step, config, tokenizer.eod, options.dtype)
    report = export_model(TensorReader(step, first_rows), config, tokenizer, output, options)
    return {"checkpoint": str(step), **report}


def _verify(
    step: Path, config: PretrainConfig, eod: int, dtype: torch.dtype, folder: Path, exported: Any, rounded: bool
) -> Dict[str, Any]:
    from megatron_fbt.hf.verify import verify_export  # here: without it an export needs much less memory

    return verify_export(folder, exported, step, config, eod, dtype, rounded)


def default_format(config: PretrainConfig, state: Optional[TrainerState]) -> str:
    """llama for a baseline, whose fusion was never trained, if a stock class computes it; else fbt."""
    multi_pass = config.feedback.max_passes > 1 or state is None or state.fusion_active or len(state.pass_counts) > 1
    if multi_pass or config.checkpoint.init_from is not None or not has_stock_class(config.model):
        return "fbt"
    return "llama"


def describe(report: Dict[str, Any]) -> str:
    """A report for a person."""
    lines = [
        f"{report['checkpoint']} -> {report['output']}: {report['architecture']}, {report['dtype']}, "
        f"{report['parameters']:,} parameters, {report['bytes'] / 1e6:,.1f} MB"
    ]
    verification = report["verification"]
    if verification is not None:
        lines.append(
            f"logits against the training model, {verification['tokens']:,} tokens ({verification['source']}):"
        )
        lines += [
            f"  {line['passes']} passes: largest difference {line['max_abs_difference']:.2e}, "
            f"KL {line['kl']:.2e} nats, same top-1 token {line['top1_agreement']:.2%}"
            for line in verification["passes"]
        ]
        lines.append(f"{'passed' if verification['passed'] else 'NOT PASSED'}; {verification['limits']}")
    return "\n".join(lines)
