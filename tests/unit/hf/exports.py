"""Tiny tokenizers, models and exports for tests."""

from pathlib import Path
from typing import Dict

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.hf.export import ExportOptions, export_model, hf_config
from megatron_fbt.hf.modeling_fbt import FBTForCausalLM
from megatron_fbt.hf.weights import to_hf_weights


class LetterTokenizer:
    """One token a character of a small alphabet; the last id ends a document."""

    def __init__(self, vocab_size: int = 50) -> None:
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    def save_for_huggingface(self, folder: Path) -> None:
        letters = {chr(ord("0") + index): index for index in range(self.vocab_size - 1)}
        tokenizer = Tokenizer(models.WordLevel({**letters, "<eod>": self.eod}, unk_token="0"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        tokenizer.decoder = decoders.Fuse()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eod>").save_pretrained(folder)


def make_model(weights: Dict[str, Tensor], config: PretrainConfig) -> FBTForCausalLM:
    """The Hugging Face model of canonical weights, in memory."""
    vocab_size = weights["embedding.word_embeddings.weight"].shape[0]
    model = FBTForCausalLM(hf_config(config, vocab_size, vocab_size - 1, torch.float32))
    missing, unexpected = model.load_state_dict(to_hf_weights(weights, config), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


def export(folder: Path, weights: Dict[str, Tensor], config: PretrainConfig, **options) -> Path:
    """Export canonical weights with a tokenizer that has as many entries as they have rows."""
    tokenizer = LetterTokenizer(weights["embedding.word_embeddings.weight"].shape[0])
    export_model(weights, config, tokenizer, folder, ExportOptions(options.pop("dtype", torch.float32), **options))
    return folder


def load(folder: Path):
    """Load an export by its own code, as trust_remote_code does for a user without this package; every key fits."""
    own_class = get_class_from_dynamic_module("modeling_fbt.FBTForCausalLM", str(folder))
    own_class.register_for_auto_class("AutoModelForCausalLM")
    model, report = own_class.from_pretrained(str(folder), output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    return model.eval()
