"""Fixtures for data tests: one trained SentencePiece model and one Hugging Face folder."""

import inspect
import json

import pytest

from megatron_fbt.data.tokenizer_training import TokenizerTraining, train_tokenizer


@pytest.fixture(scope="session")
def source_folder(tmp_path_factory):
    """Some files of Python source text, and what must be left out of them."""
    import argparse
    import inspect as inspect_module
    import typing

    folder = tmp_path_factory.mktemp("sources")
    for module in (argparse, inspect_module, typing, json):
        (folder / f"{module.__name__}.py").write_text(inspect.getsource(module), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory, source_folder):
    """Path of a .model with 1,000 ids."""
    prefix = tmp_path_factory.mktemp("tokenizer") / "small"
    train_tokenizer(TokenizerTraining([str(source_folder)], str(prefix), 1000, input_format="files"))
    return f"{prefix}.model"


@pytest.fixture(scope="session")
def huggingface_folder(tmp_path_factory, source_folder):
    """Folder of a byte-level BPE tokenizer with <|end|> as its end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    tokenizer.train([str(path) for path in sorted(source_folder.iterdir())], trainer)
    folder = tmp_path_factory.mktemp("huggingface")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(str(folder))
    return folder
