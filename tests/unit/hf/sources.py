"""Small random models of the stock families, as folders that transformers would have written."""

import json
from pathlib import Path
from typing import Any, Dict, Tuple

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.unit.hf.exports import LetterTokenizer

SHAPE = {
    "vocab_size": 60,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 3e-4,
    "max_position_embeddings": 200,
    "bos_token_id": None,
    "eos_token_id": None,
}
SLIDING, FULL = "sliding_attention", "full_attention"
FAMILIES: Dict[str, Tuple[type, type, Dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"head_dim": 10, "rope_theta": 54321.0}),
    "llama tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen2 tied": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen2 window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 0,
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
            "num_key_value_heads": 1,
        },
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "rope_theta": 1e6}),
    "qwen3 tied": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 6, "head_dim": 20}),
    "mistral tied": (MistralConfig, MistralForCausalLM, {"sliding_window": None, "tie_word_embeddings": True}),
}


def make_source(name: str, seed: int = 0, **fields: Any) -> torch.nn.Module:
    """A model of a family, every weight far from its initial value."""
    config_class, model_class, own = FAMILIES[name]
    model = model_class(config_class(**{**SHAPE, **own, **fields})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 2:
                weight.copy_(noise * (0.2 if "embed_tokens" in path else 0.12))
            else:
                weight.copy_(noise * 0.4 if path.endswith("bias") else 1 + noise * 0.3)
    return model


def write_source(folder: Path, model: torch.nn.Module, entries: int = 50, **options: Any) -> Path:
    """Save a model with a tokenizer that has fewer entries than the model has rows."""
    model.save_pretrained(folder, **options)
    if entries:
        LetterTokenizer(entries).save_for_huggingface(folder)
    return folder


def change_config(folder: Path, **fields: Any) -> None:
    """Edit config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
