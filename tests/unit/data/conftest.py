"""Fixtures for data tests: one trained SentencePiece model and one Hugging Face folder."""

import base64
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


@pytest.fixture(scope="session")
def tiktoken_file(tmp_path_factory, huggingface_folder):
    """The same byte pairs as tiktoken's ranks, with a pattern of the newer kind and a gap before the end token."""
    vocabulary = json.loads((huggingface_folder / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    tokens = [bytes(byte_of[letter] for letter in name) for name in vocabulary if name != "<|end|>"]
    path = tmp_path_factory.mktemp("tiktoken") / "small.tiktoken"
    lines = [b"%s %d" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    pattern = (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"
        r"\s+(?!\S)|\s"
    )
    special = {"<|end|>": len(tokens) + 1, "<|turn|>": len(tokens) + 2}
    facts = {"pat_str": pattern, "special_tokens": special, "eod": "<|end|>"}
    path.with_name("small.tiktoken.json").write_text(json.dumps(facts))
    return path
