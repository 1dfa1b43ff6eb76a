"""Text in, text out, with an exported model. The regimes themselves live in the export's own code (megatron_fbt/hf)."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Optional, TextIO, Tuple, Union

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from megatron_fbt.errors import CheckpointError, ConfigError
from megatron_fbt.hf.folder import is_export
from megatron_fbt.hf.generation_fbt import check_regime, check_sampling


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


class TokenCounter(BaseStreamer):
    """Shows on a terminal how many tokens there are so far."""

    def __init__(self, total: int, terminal: TextIO) -> None:
        self.total = total
        self.terminal = terminal
        self.count = -1  # the prompt comes first

    def put(self, value: torch.Tensor) -> None:
        self.count += 1
        self.terminal.write(f"\r{self.count}/{self.total} tokens")
        self.terminal.flush()

    def end(self) -> None:
        self.terminal.write("\r\033[K")


def check_model_folder(folder: Union[str, Path]) -> None:
    """Check, without loading anything, that a folder holds an exported model.

    Raises:
        CheckpointError: It does not.
    """
    if not is_export(Path(folder)):
        raise CheckpointError(f"model {folder}: no exported model. Make one with tools/convert_to_hf.py.")


def load_model(folder: Union[str, Path], device: Optional[str] = None) -> Tuple[Any, Any]:
    """Load an exported model and its tokenizer, from that folder alone.

    Args:
        folder: Made by tools/convert_to_hf.py.
        device: Where to compute; None = the GPU where there is one.

    Raises:
        ConfigError: No such device here.
        CheckpointError: The folder holds no exported model, a damaged one, or one without a tokenizer.
    """
    model = load_network(folder, device)
    if not (Path(folder) / "tokenizer_config.json").is_file():
        raise CheckpointError(
            f"model {folder}: has no tokenizer, as it was trained on rows of token ids; call its generate with ids"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=True, local_files_only=True)
    except Exception as error:  # transformers raises whatever comes up for damaged files
        raise CheckpointError(f"model {folder}: cannot be loaded ({type(error).__name__}: {error})") from error
    return model, tokenizer


def load_network(folder: Union[str, Path], device: Optional[str] = None) -> Any:
    """Load an exported model without its tokenizer, in evaluation mode; see load_model."""
    check_model_folder(folder)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {device}: not available here ({str(error).splitlines()[0]})") from error
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    number_format = {"dtype" if version >= (4, 56) else "torch_dtype": "auto"}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), trust_remote_code=True, local_files_only=True, **number_format
        )
    except Exception as error:  # transformers and safetensors raise whatever comes up for damaged files
        raise CheckpointError(f"model {folder}: cannot be loaded ({type(error).__name__}: {error})") from error
    return model.to(device).eval()


def continue_text(
    model: Any, tokenizer: Any, prompt: str, options: GenerationOptions, terminal: Optional[TextIO] = None
) -> Dict[str, Any]:
    """Continue one prompt.

    Args:
        model: From load_model.
        tokenizer: From load_model.
        prompt: Text, not empty.
        options: Checked here.
        terminal: Where a running token count is shown; None = nowhere.

    Returns:
        prompt, continuation, regime, prompt_tokens, new_tokens, token_ids of the continuation, seconds,
        tokens_per_second, finish ("eos" or "length").

    Raises:
        ConfigError: An option without a meaning, or an empty prompt.
    """
    options.validate()
    prompt_ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids.to(model.device)
    if prompt_ids.numel() == 0:
        raise ConfigError("the prompt is empty: give at least one token")
    longest, trained = prompt_ids.shape[1] + options.max_new_tokens, model.config.max_position_embeddings
    if longest > trained:
        print(f"warning: up to {longest} tokens, the model was trained on rows of {trained}", file=sys.stderr)
    sampling = {"do_sample": False}
    if options.temperature > 0:
        sampling = {
            "do_sample": True,
            "temperature": options.temperature,
            "top_k": options.top_k,
            "top_p": options.top_p,
        }
    torch.manual_seed(options.seed)
    start = time.perf_counter()
    output = model.generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        regime=options.regime,
        fused_passes=options.fused_passes,
        max_new_tokens=options.max_new_tokens,
        streamer=None if terminal is None else TokenCounter(options.max_new_tokens, terminal),
        **sampling,
    )[0]
    seconds = time.perf_counter() - start
    new = output[prompt_ids.shape[1] :].tolist()
    return {
        "prompt": prompt,
        "continuation": decode_continuation(tokenizer, prompt_ids[0].tolist(), new),
        "regime": options.regime,
        "prompt_tokens": prompt_ids.shape[1],
        "new_tokens": len(new),
        "token_ids": new,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(len(new) / seconds, 1),
        "finish": "eos" if new[-1] == model.generation_config.eos_token_id else "length",
    }


def decode_continuation(tokenizer: Any, prompt: list, new: list) -> str:
    """Text of the new tokens as it stands behind the prompt's (a leading blank is kept)."""
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    whole = tokenizer.decode(prompt + new, skip_special_tokens=True)
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(new, skip_special_tokens=True)
