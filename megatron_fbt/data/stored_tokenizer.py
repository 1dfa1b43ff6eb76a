"""The tokenizer that a checkpoint brings with it, so that nothing beside the checkpoint is needed to use the model.

A run copies the files of its tokenizer, and the chat template of its conversations, into <run.dir>/tokenizer when it
starts; every checkpoint holds the same files.
"""

import copy
import os
import shutil
from pathlib import Path
from typing import Optional

from megatron_fbt.config.data import DataConfig
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.data.chat import chat_template
from megatron_fbt.data.huggingface_files import TOKENIZER_FILES
from megatron_fbt.data.tiktoken_tokenizer import TIKTOKEN_FILE
from megatron_fbt.data.token_ids import run_tokenizer
from megatron_fbt.data.tokenizer import SENTENCEPIECE_FILE, Tokenizer
from megatron_fbt.errors import CheckpointError

FOLDER = "tokenizer"
"""Of a run folder."""
TEMPLATE_FILE = "chat_template.jinja"
"""Chat template of the run's conversations; Hugging Face's tokenizers read it as their own."""


def store_tokenizer(tokenizer: Tokenizer, config: DataConfig, folder: Path) -> None:
    """Copy what a run's tokenizer consists of into a folder; what was there before goes.

    Args:
        tokenizer: The run's.
        config: Says where its conversations' template is.
        folder: Made here, unless there is nothing to store.

    Raises:
        CheckpointError: A file cannot be read or written.
        DataError: The chat template cannot be read.
    """
    content = {name: path.read_bytes() for name, path in tokenizer.files().items()}
    if content and config.format == "conversations":
        content[TEMPLATE_FILE] = chat_template(config, tokenizer).encode()
    partial = folder.with_name(f".{folder.name}.tmp")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        if folder.is_dir() and {path.name: path.read_bytes() for path in folder.iterdir()} == content:
            return
        if content:
            partial.mkdir(parents=True)
            for name, data in content.items():
                (partial / name).write_bytes(data)
        shutil.rmtree(folder, ignore_errors=True)
        if content:
            os.replace(partial, folder)
    except OSError as error:
        raise CheckpointError(f"cannot copy the tokenizer into {folder}: {error}; free space and resume") from error


def stored_path(checkpoint: Path, config: DataConfig) -> Optional[Path]:
    """Where a checkpoint has its own tokenizer, as data.tokenizer.path names one; None if it has none."""
    if config.tokenizer.path is None:
        return None
    if config.tokenizer.type == "sentencepiece":
        path = checkpoint / SENTENCEPIECE_FILE
        return path if path.is_file() else None
    if config.tokenizer.type == "tiktoken":
        path = checkpoint / TIKTOKEN_FILE
        return path if path.is_file() else None
    return checkpoint if any((checkpoint / name).is_file() for name in TOKENIZER_FILES[:2]) else None


def checkpoint_tokenizer(checkpoint: Path, config: PretrainConfig, path: Optional[str] = None) -> Tokenizer:
    """The tokenizer of a checkpoint: its own, or, if an earlier version wrote it, the one that its run named.

    Args:
        checkpoint: The step's folder.
        config: What it was written with.
        path: Another place to read it from; None = the checkpoint.

    Raises:
        ConfigError: There is neither a tokenizer nor the size of a vocabulary.
        DataError: Its files are missing or are no tokenizer of this type.
    """
    config = copy.deepcopy(config)
    found = path or stored_path(checkpoint, config.data)
    if found is not None:
        config.data.tokenizer.path = str(found)
    tokenizer = run_tokenizer(config)
    if config.data.format == "conversations":
        stored = checkpoint / TEMPLATE_FILE
        if path is None and found is not None and stored.is_file():
            config.data.chat_template = str(stored)
        tokenizer.saved_chat_template = chat_template(config.data, tokenizer)
    return tokenizer
