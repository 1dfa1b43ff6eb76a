"""Tiny exports that read ordinary text, and their independent counterpart."""

import functools
import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_fbt.hf.export import ExportOptions, export_model
from tests.unit.hf.reference import Reference, random_weights, tiny_config

LETTERS = string.printable[:97]
"""Every printable character of ASCII, and new line: the vocabulary."""


class CharacterTokenizer:
    """One token a character; the last id ends a document."""

    vocab_size = len(LETTERS) + 1
    eod = len(LETTERS)

    def save_for_huggingface(self, folder: Path) -> None:
        ids = {letter: index for index, letter in enumerate(LETTERS)}
        tokenizer = Tokenizer(models.WordLevel({**ids, "<eod>": self.eod}, unk_token="0"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        tokenizer.decoder = decoders.Fuse()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eod>").save_pretrained(folder)


def text_config():
    config = tiny_config(num_layers=1)
    config.data.sequence_length = 512
    return config


def text_weights(config, seed: int = 0):
    return random_weights(config, CharacterTokenizer.vocab_size, seed)


def export_text_model(folder: Path) -> Path:
    """An export with random weights that reads and writes printable ASCII."""
    config = text_config()
    export_model(text_weights(config), config, CharacterTokenizer(), folder, ExportOptions(torch.float32))
    return folder


@functools.cache
def text_reference() -> Reference:
    config = text_config()
    return Reference(text_weights(config), config)


def ids_of(text: str) -> torch.Tensor:
    return torch.tensor([LETTERS.index(letter) for letter in text])


def text_of(ids) -> str:
    """Text of token ids up to the end of the document."""
    letters = []
    for number in map(int, ids):
        if number == CharacterTokenizer.eod:
            break
        letters.append(LETTERS[number])
    return "".join(letters)
