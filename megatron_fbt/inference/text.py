"""Exported models for text: how to go on from a prompt, and loading. The regimes themselves live in megatron_fbt/hf."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Optional, Tuple, Union

import torch
import transformers
from transformers import AutoTokenizer, GenerationConfig

from megatron_fbt.errors import CheckpointError, ConfigError
from megatron_fbt.hf.configuration_fbt import FBTConfig
from megatron_fbt.hf.folder import is_export
from megatron_fbt.hf.generation_fbt import check_regime, check_sampling
from megatron_fbt.hf.modeling_fbt import FBTForCausalLM


@dataclass
class GenerationOptions:
    """How to go on from a prompt."""

    regime: str = "soft"
    """standard, soft, fused or recurrent."""
    fused_passes: int = 1
    """Fused passes over the prompt in the fused regime."""
    max_new_tokens: int = 64
    """Most tokens to generate."""
    temperature: float = 0.0
    """0 = greedy."""
    top_k: int = 0
    """Sample among this many likeliest tokens; 0 = all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that hold this share of the probability; 1 = all."""
    seed: int = 0
    """Seed of the sampling."""
    gate_table: bool = False
    """Compute the gates of all tokens once, which saves a matrix product a token; for fusion gate."""

    def validate(self) -> None:
        """Check every field.

        Raises:
            ConfigError: A value without a meaning; the message names field and value.
        """
        try:
            check_regime(self.regime, self.fused_passes)
            check_sampling(self.temperature, self.top_k, self.top_p)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={self.max_new_tokens}: must be at least 1")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed}: must be at least 0 and smaller than 2^63")


def check_model_folder(folder: Union[str, Path]) -> None:
    """Check, without loading anything, that a folder holds an exported model and nothing that replaces its weights.

    Raises:
        CheckpointError: It does not.
    """
    if not is_export(Path(folder)):
        raise CheckpointError(f"model {folder}: no exported model. Make one with tools/convert_to_hf.py.")
    if (Path(folder) / "adapter_config.json").exists():
        raise CheckpointError(
            f"model {folder}: an adapter lies in it (adapter_config.json), and transformers would load the model that "
            "the adapter names; merge the adapter with peft's merge_and_unload, or move it to a folder of its own"
        )


def load_model(folder: Union[str, Path], device: Optional[str] = None) -> Tuple[Any, Any]:
    """Load an exported model and its tokenizer, from that folder alone.

    Args:
        folder: Made by tools/convert_to_hf.py.
        device: Where to compute; None = the GPU where there is one.

    Raises:
        ConfigError: No such device here.
        CheckpointError: The folder holds no exported model, a damaged one, or one without a tokenizer.
    """
    tokenizer = load_tokenizer(folder)
    return load_network(folder, device), tokenizer


def load_tokenizer(folder: Union[str, Path]) -> Any:
    """Load the tokenizer of an exported model; see load_model."""
    check_model_folder(folder)
    if not (Path(folder) / "tokenizer_config.json").is_file():
        raise CheckpointError(
            f"model {folder}: has no tokenizer, as it was trained on rows of token ids; call its generate with ids"
        )
    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises whatever comes up for damaged files
        raise _not_loaded(folder, error) from error


def _not_loaded(folder: Union[str, Path], error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split())
    return CheckpointError(
        f"model {folder}: cannot be loaded ({type(error).__name__}: {reason}). Copy or export it again."
    )


def check_device(device: Optional[str]) -> str:
    """The device, or the GPU where there is one.

    Raises:
        ConfigError: No such device here.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=device).item()  # a device such as meta holds no numbers
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {device}: not available here ({reason}); give another, such as cpu") from error
    return device


def load_network(folder: Union[str, Path], device: Optional[str] = None) -> Any:
    """Load an exported model without its tokenizer, in evaluation mode; see load_model.

    The network is this package's own: nothing that lies in the folder is executed. Of the folder's generation settings
    it keeps the tokens that end a text; the others are for the caller to give.
    """
    check_model_folder(folder)
    device = check_device(device)
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    number_format = {"dtype" if version >= (4, 56) else "torch_dtype": "auto"}
    options = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True, **number_format}
    options.update(output_loading_info=True, ignore_mismatched_sizes=True)  # all that is wrong is told below
    try:
        config = FBTConfig.from_pretrained(str(folder), local_files_only=True)
        model, found = FBTForCausalLM.from_pretrained(str(folder), config=config, **options)
    except Exception as error:  # transformers and safetensors raise whatever comes up for damaged files
        raise _not_loaded(folder, error) from error
    _check_weights(folder, found)
    _keep_ends(folder, model)
    return model.to(device).eval()


def _check_weights(folder: Union[str, Path], found: Dict[str, Any]) -> None:
    """Refuse weights that are not those of config.json: transformers would put random ones in their places.

    Args:
        folder: Of the model.
        found: Loading info of transformers.

    Raises:
        CheckpointError: Naming the first weights that are missing, unknown or of another shape.
    """
    said = []
    for kind, words in (("missing", "missing"), ("unexpected", "not expected"), ("mismatched", "of another shape")):
        names = sorted(entry if isinstance(entry, str) else entry[0] for entry in found[f"{kind}_keys"])
        if names:
            said.append(f"{words} {', '.join(names[:3])} ({len(names)} in all)")
    if said:
        raise CheckpointError(
            f"model {folder}: its weights are not those of its config.json: {'; '.join(said)}. Copy or export it again."
        )


def _keep_ends(folder: Union[str, Path], model: Any) -> None:
    """Drop all generation settings but the tokens that end a text.

    Raises:
        CheckpointError: These are no token ids.
    """
    ends = model.generation_config.eos_token_id
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(isinstance(token, int) for token in ids):
        raise CheckpointError(
            f"model {folder}: eos_token_id={ends!r}: must be a token id or a list of them. Correct it."
        )
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=min(ids, default=None))


def decode_continuation(tokenizer: Any, prompt: list, new: list) -> str:
    """Text of the new tokens as it stands behind the prompt's (a leading blank is kept)."""
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    whole = tokenizer.decode(prompt + new, skip_special_tokens=True)
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(new, skip_special_tokens=True)
