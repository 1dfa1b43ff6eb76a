"""From a Hugging Face folder to a checkpoint that training starts from."""

import dataclasses
import json
import shlex
import shutil
from pathlib import Path
from typing import Any, Dict, Optional, TextIO, Tuple, Union

import torch
from torch import Tensor

from megatron_fbt.config.load import dump_yaml
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.core.checkpoint_stream import TensorSource, stream_tensors
from megatron_fbt.core.checkpoint_write import finished_file
from megatron_fbt.core.manifest import write_manifest
from megatron_fbt.core.optimizer_state import MASTER
from megatron_fbt.data.tokenizer import HuggingFaceTokenizer
from megatron_fbt.errors import CheckpointError, ConfigError, DataError
from megatron_fbt.hf.folder import move_into_place, output_place, partial_folder, sweep, tokenizer_files
from megatron_fbt.hf.source_config import Source, read_source
from megatron_fbt.hf.source_weights import CanonicalSource, SafetensorsFolder, root_mean_square
from megatron_fbt.hf.stream import ByteProgress
from megatron_fbt.hf.weights import FUSION_MATRICES
from megatron_fbt.model.initialise import initialise_parameters
from megatron_fbt.training.run_folder import CONFIG_FILE, STATE_FILE, TrainerState

IMPORT_FILE = "import.json"
"""What the checkpoint was made from; marks a folder that --force may replace."""


def import_model(
    model: Union[str, Path],
    output: Union[str, Path],
    seed: int = 1234,
    fusion: Optional[str] = None,
    sequence_length: Optional[int] = None,
    force: bool = False,
    stream: Optional[TextIO] = None,
) -> Dict[str, Any]:
    """Write a checkpoint with the weights of a Hugging Face model; the folder appears whole or not at all.

    Args:
        model: An exported FBT, whose feedback path is kept, or a Llama, Mistral, Qwen2 or Qwen3, which gets a fresh
            one and whose ordinary mode stays what it is.
        output: Folder to make, for checkpoint.init_from.
        seed: run.seed; of a fresh fusion layer's weights.
        fusion: Variant of a fresh fusion layer; None = gate.
        sequence_length: data.sequence_length; None = see read_source.
        force: Replace an earlier import in `output`.
        stream: Where progress is written; None = standard error.

    Returns:
        Report: source, output, model_type, parameters, vocab_size, precision, fusion, input_scale, command.

    Raises:
        ConfigError: `output` is in use, or seed or sequence_length is out of range.
        CheckpointError: The model cannot be read, or has features that this project has not.
        DataError: Its tokenizer cannot be read.
    """
    folder, output = Path(model).absolute(), output_place(output)
    check_output(output, force)
    source = read_source(folder, fusion, sequence_length)
    config = source.config
    config.run.seed = seed
    if problems := config.run.problems():
        raise ConfigError(problems[0])
    weights = SafetensorsFolder(folder)
    config.precision.dtype = "bf16" if weights.dtype is torch.bfloat16 else "fp32"
    canonical = CanonicalSource(weights, config, {} if source.is_fbt else fresh_fusion(config))
    try:
        with partial_folder(output) as partial:
            real_rows = _take_tokenizer(folder, partial, output, config)
            if not source.is_fbt:
                config.feedback.input_scale = root_mean_square(weights, "model.embed_tokens.weight", real_rows)
                if problems := config.feedback.problems():
                    raise CheckpointError(f"{folder}: the embedding gives {problems[0]}")
            report = _report(source, folder, output, canonical)
            _write(partial, canonical, weights, config, report, stream)
            move_into_place(partial, output)
    except OSError as error:
        remedy = "Free space, or choose another folder."
        raise CheckpointError(f"output {output}: the checkpoint cannot be written ({error}). {remedy}") from error
    finally:
        weights.close()
    return report


def check_output(output: Path, force: bool) -> None:
    """Refuse an output that is in use; with `force`, only an earlier import may be replaced.

    What interrupted imports to the same place have left behind goes first, or comes back.

    Raises:
        ConfigError: The folder may not be written.
    """
    sweep(output)
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not force:
        raise ConfigError(f"output {output}: exists and is not empty. Choose another folder, or add --force.")
    if not (output / IMPORT_FILE).is_file():
        raise ConfigError(f"output {output}: is not an imported model, so --force does not replace it.")


def fresh_fusion(config: PretrainConfig) -> Dict[str, Tensor]:
    """The weights with which a new run of this seed would start its fusion layer."""
    size = config.model.hidden_size
    names = [f"fusion.{matrix}.weight" for matrix in FUSION_MATRICES[config.feedback.fusion]]
    parameters = {name: torch.nn.Parameter(torch.empty(size, size)) for name in names}
    initialise_parameters(parameters, config.model, config.model.vocab_size, config.run.seed, 0, 1)
    return {name: parameter.detach() for name, parameter in parameters.items()}


def _take_tokenizer(folder: Path, partial: Path, output: Path, config: PretrainConfig) -> int:
    """Copy the tokenizer, if there is one, and name its future place in the configuration.

    Returns:
        Rows of the embedding that are in use.

    Raises:
        DataError: The tokenizer cannot be read.
        CheckpointError: It has more entries than the embedding.
    """
    files, rows = tokenizer_files(folder), config.model.vocab_size
    if not files:
        return rows
    for name in files:
        shutil.copyfile(folder / name, partial / name)
    try:
        entries = HuggingFaceTokenizer(partial).vocab_size
    except DataError as error:
        raise DataError(str(error).replace(str(partial), str(folder))) from error
    if entries > rows:
        raise CheckpointError(f"{folder}: its tokenizer has {entries} entries, its embedding {rows} rows. Correct it.")
    config.data.tokenizer.type = "huggingface"
    config.data.tokenizer.path = str(output)
    return entries


def _write(
    partial: Path,
    canonical: CanonicalSource,
    weights: SafetensorsFolder,
    config: PretrainConfig,
    report: Dict[str, Any],
    stream: Optional[TextIO],
) -> None:
    """Weights (in the run's number format, and as the optimizer's master weights), configuration and manifest."""
    sources: Dict[str, TensorSource] = {}
    for name, shape in canonical.shapes.items():
        read = _reader(canonical, name)
        sources[name] = TensorSource(shape, weights.dtype, read)
        sources[f"optimizer.{MASTER}.{name}"] = TensorSource(shape, torch.float32, read)
    total = sum(torch.Size(source.shape).numel() * source.dtype.itemsize for source in sources.values())
    progress = ByteProgress(total, stream)
    files = stream_tensors(sources, partial, progress.add)
    progress.end()
    texts = {
        CONFIG_FILE: dump_yaml(config),
        STATE_FILE: json.dumps(dataclasses.asdict(TrainerState()), indent=2) + "\n",
        IMPORT_FILE: json.dumps(report, indent=2) + "\n",
    }
    for name, text in texts.items():
        (partial / name).write_text(text, encoding="utf-8")
    files.update({name: finished_file(partial / name) for name in (*texts, *tokenizer_files(partial))})
    write_manifest(partial, files, {"step": 0})


def _reader(canonical: CanonicalSource, name: str):
    return lambda: canonical.read(name)


def _report(source: Source, folder: Path, output: Path, canonical: CanonicalSource) -> Dict[str, Any]:
    config = source.config
    return {
        "source": str(folder),
        "output": str(output),
        "model_type": source.model_type,
        "parameters": sum(torch.Size(shape).numel() for shape in canonical.shapes.values()),
        "vocab_size": config.model.vocab_size,
        "precision": config.precision.dtype,
        "fusion": config.feedback.fusion,
        "input_scale": config.feedback.input_scale,
        "command": example_command(source, output),
    }


def example_command(source: Source, output: Path) -> str:
    """How training goes on from the checkpoint."""
    options: Tuple[Tuple[str, str], ...] = (
        ("config", str(output / CONFIG_FILE)),
        ("checkpoint.init_from", str(output)),
        ("run.dir", f"runs/{output.name}"),
        ("data.paths", "[data/corpus]"),
        ("training.train_steps", "1000"),
    )
    if not source.is_fbt:
        options += (("feedback.schedule", "full"), ("feedback.loss_weights.warmup_steps", "100"))
    if source.config.data.tokenizer.path is None:
        options += (("data.tokenizer.path", "TOKENIZER"),)
    return "python -m megatron_fbt.pretrain " + " ".join(f"--{name} {shlex.quote(value)}" for name, value in options)
