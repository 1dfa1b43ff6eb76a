"""What test_export_verification.py looks at: exports verified against the training model in one process."""

import contextlib
import importlib.util
import io
import json
from pathlib import Path
from typing import Any, Dict
from unittest import mock

import torch

from megatron_fbt.hf import weights as hf_weights
from tests.unit.hf.checkpoints import write_checkpoint
from tests.unit.hf.exports import LetterTokenizer
from tests.unit.hf.reference import random_weights, tiny_config

VOCAB, PADDED = 50, 128
OPTIONS = {"num_query_groups": 2, "qk_layernorm": True, "residual_multiplier": 0.7}
STATE = {"step": 7, "consumed_samples": 70, "token_equivalents": 7000, "pass_counts": [6, 1], "switch_on_step": 5}


def make(folder: Path, **data: Any) -> Path:
    """A checkpoint whose tables have padded rows that no export may use, and the run's tokenizer."""
    config = tiny_config(**OPTIONS, vocab_size=VOCAB)
    LetterTokenizer(VOCAB).save_for_huggingface(folder / "tokenizer")
    config.data.tokenizer.type, config.data.tokenizer.path = "huggingface", str(folder / "tokenizer")
    for name, value in data.items():
        setattr(config.data, name, value)
    weights = random_weights(config, VOCAB)
    table = weights["embedding.word_embeddings.weight"]
    padding = torch.full((PADDED - VOCAB, table.shape[1]), 1e4)
    weights["embedding.word_embeddings.weight"] = torch.cat([table, padding])
    write_checkpoint(folder / "step_00000007", weights, config, STATE)
    return folder / "step_00000007"


def convert(repository: Path, checkpoint: Path, output: Path, *arguments: str) -> Dict[str, Any]:
    """tools/convert_to_hf.py --verify: exit code, what it printed, what it wrote."""
    spec = importlib.util.spec_from_file_location("convert_tool", repository / "tools" / "convert_to_hf.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    printed, warned = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(warned):
        code = tool.main(["--checkpoint", str(checkpoint), "--output", str(output), "--verify", *arguments])
    assert code in (0, 6), warned.getvalue()
    return {
        "code": code,
        "printed": printed.getvalue(),
        "warned": warned.getvalue(),
        "card": (output / "README.md").read_text(),
        "report": json.loads((output / "fbt_export.json").read_text()),
    }


def swapped(name: str, count: int, model: Any) -> Dict[str, Any]:
    """A conversion that takes the gate of the MLP for its other half."""
    found = PLAIN_CONVERT(name, count, model)
    if len(found) == 2:
        one, two = found
        found = {one: found[two], two: found[one]}
    return found


PLAIN_CONVERT = hf_weights._convert


def verify_all(rank: int, world_size: int, folder: str, repository: str, prefix: str) -> Dict[str, Dict[str, Any]]:
    """Every case, by name."""
    folder, repository = Path(folder), Path(repository)
    checkpoint = make(folder / "random")
    found = {
        name: convert(repository, checkpoint, folder / name, *arguments)
        for name, arguments in {
            "fp32": (),
            "bf16": ("--dtype", "bf16"),
            "fp16": ("--dtype", "fp16"),
            "llama": ("--format", "llama"),
            "llama, bf16": ("--format", "llama", "--dtype", "bf16"),
        }.items()
    }
    with mock.patch.object(hf_weights, "_convert", swapped):
        found["swapped"] = convert(repository, checkpoint, folder / "swapped")
        found["swapped, bf16"] = convert(repository, checkpoint, folder / "swapped16", "--dtype", "bf16")
    with_data = make(folder / "data", paths=[prefix], split="50,50,0", reset_attention_mask=True)
    found["data"] = convert(repository, with_data, folder / "of data")
    return found
