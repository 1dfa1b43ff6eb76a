"""Write a trained model as a folder that transformers loads by itself."""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple, Union

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig

from megatron_fbt import __version__
from megatron_fbt.config.feedback import resolved_input_scale
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.core.tensor_reader import HeldTensors, TensorReader
from megatron_fbt.errors import CheckpointError
from megatron_fbt.hf.configuration_fbt import FBTConfig
from megatron_fbt.hf.folder import REPORT_FILE, check_output, move_into_place, output_place, partial_folder
from megatron_fbt.hf.model_card import model_card
from megatron_fbt.hf.stock import stock_config, stock_notes, stock_tensors
from megatron_fbt.hf.stream import plan_shards, total_parameters, write_weights
from megatron_fbt.hf.weights import EMBEDDING, RowMap, check_shapes, hf_tensors
from megatron_fbt.training.run_folder import TrainerState

CODE_FILES = ("configuration_fbt.py", "generation_fbt.py", "layers_fbt.py", "modeling_fbt.py")
AUTO_MAP = {"AutoConfig": "configuration_fbt.FBTConfig", "AutoModelForCausalLM": "modeling_fbt.FBTForCausalLM"}


def hf_config(config: PretrainConfig, vocab_size: int, eod: Optional[int], dtype: torch.dtype) -> FBTConfig:
    """The configuration of the exported model.

    Args:
        config: The run's configuration.
        vocab_size: Rows of the unpadded embedding.
        eod: Id of the token that ends a document; None = there is none.
        dtype: Number format of the weights.
    """
    model, feedback = config.model, config.feedback
    return FBTConfig(
        vocab_size=vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.query_groups,
        head_dim=model.head_size,
        qk_layernorm=model.qk_layernorm,
        attention_bias=model.add_qkv_bias,
        attention_output_gate=model.attention_output_gate,
        sliding_window=model.sliding_window,
        window_attn_skip_freq=model.window_attn_skip_freq,
        residual_multiplier=model.residual_multiplier,
        rms_norm_eps=model.layernorm_epsilon,
        rope_theta=model.rotary_base,
        max_position_embeddings=config.data.sequence_length,
        initializer_range=model.init_method_std,
        scaled_init=model.scaled_init,
        attention_dropout=model.attention_dropout,
        hidden_dropout=model.hidden_dropout,
        input_norm=model.input_norm,
        fusion=feedback.fusion,
        input_scale=resolved_input_scale(config),
        reset_attention_mask=config.data.reset_attention_mask,
        reset_position_ids=config.data.reset_position_ids,
        passes=feedback.validation_passes,
        regime="soft" if feedback.max_passes > 1 else "standard",
        tie_word_embeddings=model.share_embeddings_and_output_weights,
        eos_token_id=eod,
        torch_dtype=str(dtype).removeprefix("torch."),
        architectures=["FBTForCausalLM"],
        auto_map=AUTO_MAP,
    )


@dataclass
class ExportOptions:
    """What an export is like.

    Attributes:
        dtype: Number format of every exported tensor.
        format: "fbt": this package's own code in the folder; "llama": plain mode as a class of transformers itself.
        max_shard_size: Larger models are written in several files and an index.
        force: Replace an earlier export in the output folder.
        verify: Called with the unfinished folder, its configuration and whether weights were rounded; its report goes
            into the export.
        state: Counters of the run, for the model card.
    """

    dtype: torch.dtype
    format: str = "fbt"
    max_shard_size: str = "5GB"
    force: bool = False
    verify: Optional[Callable[[Path, PretrainedConfig, bool], Dict[str, Any]]] = None
    state: Optional[TrainerState] = None


@dataclass
class Form:
    """What goes into a folder.

    Attributes:
        config: Configuration of the exported model.
        written: Fields that config.json holds whatever a release's defaults are.
        row_maps: Its tensors.
        code: Files of this package beside them.
        notes: What a user must know of the form.
    """

    config: PretrainedConfig
    written: Dict[str, Any]
    row_maps: List[RowMap]
    code: Tuple[str, ...]
    notes: List[str] = field(default_factory=list)


def choose_form(config: PretrainConfig, vocab_size: int, eod: Optional[int], options: ExportOptions) -> Form:
    """Configuration and tensors of a format.

    Raises:
        ConfigError: format llama, and no stock class computes this architecture.
    """
    if options.format == "fbt":
        exported = hf_config(config, vocab_size, eod, options.dtype)
        return Form(exported, {"rope_theta": exported.rope_theta}, list(hf_tensors(config, vocab_size)), CODE_FILES)
    shared = {"eos_token_id": eod, "pad_token_id": None, "torch_dtype": str(options.dtype).removeprefix("torch.")}
    exported, written = stock_config(config, vocab_size, shared)
    written.pop("torch_dtype")  # releases spell it differently; what save_pretrained writes both read
    return Form(exported, written, stock_tensors(config, vocab_size), (), stock_notes(config, options.dtype))


def export_model(
    weights: Union[Mapping[str, Tensor], TensorReader],
    config: PretrainConfig,
    tokenizer: Any,
    output: Union[str, Path],
    options: ExportOptions,
) -> Dict[str, Any]:
    """Write weights, configuration, tokenizer, model code and a model card; the folder appears whole or not at all.

    Args:
        weights: Canonical weights, full and without vocabulary padding: in memory, or read as they are written.
        config: The run's configuration.
        tokenizer: The run's tokenizer (`vocab_size`, `eod`, `save_for_huggingface`).
        output: Folder to make.
        options: What the export is like.

    Returns:
        Report: output, format, architecture, dtype, vocab_size, parameters, notes, verification, bytes, files.

    Raises:
        ConfigError: `output` is in use, or the format cannot have the model.
        CheckpointError: The weights do not fit the configuration or the tokenizer, or cannot be read or written.
    """
    output = output_place(output)
    check_output(output, options.force)
    source = HeldTensors(dict(weights)) if isinstance(weights, Mapping) else weights
    vocab_size = source.shapes.get(EMBEDDING, (0,))[0]
    check_shapes(source.shapes, config, vocab_size)
    if vocab_size != (config.model.vocab_size or tokenizer.vocab_size) or vocab_size < tokenizer.vocab_size:
        raise CheckpointError(
            f"the embedding has {vocab_size} rows, model.vocab_size is {config.model.vocab_size}, "
            f"the tokenizer has {tokenizer.vocab_size} entries: use the tokenizer that the model was trained with"
        )
    form = choose_form(config, vocab_size, tokenizer.eod if tokenizer.eod >= 0 else None, options)
    plan = plan_shards(form.row_maps, options.dtype, options.max_shard_size)
    report = {
        "made_by": f"megatron_fbt {__version__}",
        "format": options.format,
        "architecture": form.config.architectures[0],
        "dtype": str(options.dtype).removeprefix("torch."),
        "vocab_size": vocab_size,
        "parameters": total_parameters(form.row_maps),
        "notes": form.notes,
        "verification": None,
    }
    try:
        with partial_folder(output) as partial:
            write_weights(source, plan, options.dtype, partial)
            tokenizer.save_for_huggingface(partial)
            eod = form.config.eos_token_id
            GenerationConfig(eos_token_id=eod, pad_token_id=eod).save_pretrained(partial)
            for name in form.code:
                shutil.copyfile(Path(__file__).with_name(name), partial / name)
            if options.verify is not None:
                report["verification"] = options.verify(partial, form.config, _rounded(source, form, options.dtype))
            _write_texts(partial, form, config, options, report)
            move_into_place(partial, output)
    except OSError as error:
        remedy = "Free space, or choose another folder."
        raise CheckpointError(f"output {output}: the export cannot be written ({error}). {remedy}") from error
    files = sorted(path.name for path in output.iterdir())
    size = sum((output / name).stat().st_size for name in files)
    return {"output": str(output), **report, "bytes": size, "files": files}


def _rounded(source: Any, form: Form, dtype: torch.dtype) -> bool:
    """Whether an exported tensor differs from the stored one by more than its number format's width."""
    folded = any(row_map.unit_rms is not None or row_map.factor != 1 for row_map in form.row_maps)
    narrower = any(torch.promote_types(source.dtypes[row_map.source], dtype) != dtype for row_map in form.row_maps)
    return narrower or (folded and dtype != torch.float32)


def _write_texts(
    folder: Path, form: Form, config: PretrainConfig, options: ExportOptions, report: Dict[str, Any]
) -> None:
    """Model card, report and configuration, this last: without it nothing loads the folder."""
    (folder / "README.md").write_text(model_card(form.config, config, options.state, report), encoding="utf-8")
    (folder / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    form.config.save_pretrained(folder)
    path = folder / "config.json"
    complete = {**json.loads(path.read_text(encoding="utf-8")), **form.written}
    path.write_text(json.dumps(complete, indent=2, sort_keys=True) + "\n", encoding="utf-8")
