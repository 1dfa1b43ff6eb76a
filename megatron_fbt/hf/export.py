"""Write a trained model as a folder that transformers loads by itself."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Union

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig

from megatron_fbt.config.feedback import resolved_input_scale
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.errors import CheckpointError, ConfigError
from megatron_fbt.hf.configuration_fbt import FBTConfig
from megatron_fbt.hf.model_card import model_card
from megatron_fbt.hf.weights import to_hf_weights

CODE_FILES = ("configuration_fbt.py", "generation_fbt.py", "layers_fbt.py", "modeling_fbt.py")
AUTO_MAP = {"AutoConfig": "configuration_fbt.FBTConfig", "AutoModelForCausalLM": "modeling_fbt.FBTForCausalLM"}


def hf_config(config: PretrainConfig, vocab_size: int, eod: Optional[int], dtype: torch.dtype) -> FBTConfig:
    """The configuration of the exported model; vocab_size counts the unpadded embedding's rows, eod None = no such token."""
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


def export_model(
    weights: Mapping[str, Tensor],
    config: PretrainConfig,
    tokenizer: Any,
    output: Union[str, Path],
    dtype: torch.dtype,
    force: bool = False,
    max_shard_size: str = "5GB",
) -> Dict[str, Any]:
    """Write weights, configuration, tokenizer, model code and a model card; the folder appears whole or not at all.

    Args:
        weights: Canonical weights, full and without vocabulary padding.
        config: The run's configuration.
        tokenizer: The run's tokenizer (`vocab_size`, `eod`, `save_for_huggingface`).
        output: Folder to make.
        dtype: Number format of every exported tensor.
        force: Replace an earlier export in `output`.
        max_shard_size: Larger models are written in several files and an index.

    Returns:
        Report: output, dtype, vocab_size, parameters, bytes, files.

    Raises:
        ConfigError: `output` is in use.
        CheckpointError: The weights do not fit the configuration or the tokenizer, or cannot be written.
    """
    output, dtype_name = Path(output).absolute(), str(dtype).removeprefix("torch.")
    check_output(output, force)
    tensors = {
        name: weight.to("cpu", dtype).contiguous().clone() for name, weight in to_hf_weights(weights, config).items()
    }
    vocab_size = tensors["model.embed_tokens.weight"].shape[0]
    if vocab_size != (config.model.vocab_size or tokenizer.vocab_size) or vocab_size < tokenizer.vocab_size:
        raise CheckpointError(
            f"the embedding has {vocab_size} rows, model.vocab_size is {config.model.vocab_size}, "
            f"the tokenizer has {tokenizer.vocab_size} entries: use the tokenizer that the model was trained with"
        )
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        save_weights(tensors, partial, max_shard_size)
        eod = tokenizer.eod if tokenizer.eod >= 0 else None
        exported = hf_config(config, vocab_size, eod, dtype)
        exported.save_pretrained(partial)
        generation = GenerationConfig(eos_token_id=eod, pad_token_id=eod)
        generation.save_pretrained(partial)
        tokenizer.save_for_huggingface(partial)
        for name in CODE_FILES:
            shutil.copyfile(Path(__file__).with_name(name), partial / name)
        parameters = sum(tensor.numel() for tensor in tensors.values())
        for path in partial.glob("*.safetensors"):  # safetensors makes files that only their owner may read
            shutil.copymode(partial / "config.json", path)
        (partial / "README.md").write_text(model_card(exported, parameters, dtype_name), encoding="utf-8")
        move_into_place(partial, output)
    except (OSError, SafetensorError) as error:
        remedy = "Free space, or choose another folder."
        raise CheckpointError(f"output {output}: the export cannot be written ({error}). {remedy}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    files = sorted(path.name for path in output.iterdir())
    return {
        "output": str(output),
        "dtype": dtype_name,
        "vocab_size": vocab_size,
        "parameters": parameters,
        "bytes": sum((output / name).stat().st_size for name in files),
        "files": files,
    }


def check_output(output: Path, force: bool) -> None:
    """Refuse an output that is in use; with `force`, only another export may be replaced.

    Raises:
        ConfigError: The folder may not be written.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not force:
        raise ConfigError(f"output {output}: exists and is not empty. Choose another folder, or add --force.")
    if not is_export(output):
        raise ConfigError(f"output {output}: is not an exported model, so --force does not replace it.")


def is_export(folder: Path) -> bool:
    """Whether a folder holds an exported model of this kind."""
    try:
        return (
            json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type") == FBTConfig.model_type
        )
    except (OSError, ValueError, AttributeError):
        return False


def save_weights(tensors: Dict[str, Tensor], folder: Path, max_shard_size: str) -> None:
    """Write model.safetensors, or its parts and model.safetensors.index.json where it is larger than max_shard_size."""
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_size)
    for filename, names in split.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, str(folder / filename), metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def move_into_place(partial: Path, output: Path) -> None:
    """Rename the finished folder; an earlier export goes only once the new one stands in its place."""
    old = output.with_name(f".{output.name}.old-{os.getpid()}")
    replaced = output.exists()
    if replaced:
        os.replace(output, old)
    try:
        os.replace(partial, output)
    except OSError:
        if replaced:
            os.replace(old, output)
        raise
    shutil.rmtree(old, ignore_errors=True)
