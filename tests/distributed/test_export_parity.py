"""A checkpoint of a split model, exported: the same logits in every pass, the same file from every layout."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from megatron_fbt.config.load import load_yaml
from megatron_fbt.hf.convert import convert_checkpoint
from megatron_fbt.training.checkpoint import read_weights
from tests.distributed.export_case import (
    AGAIN,
    DOCUMENT_STARTS,
    FIRST,
    OPTIONS,
    VOCAB,
    S,
    document_starts,
    load_and_save_again,
    save_and_measure,
    token_rows,
)
from tests.distributed.launch import run_distributed
from tests.unit.hf.exports import LetterTokenizer, load
from tests.unit.hf.reference import Reference

EXPORTED = {"model.add_qkv_bias": "attention_bias"}
"""Fields with another name in an export."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{tied: folder with a tokenizer}."""
    found = {tied: tmp_path_factory.mktemp("tied" if tied else "untied") for tied in (True, False)}
    for folder in found.values():
        LetterTokenizer(VOCAB).save_for_huggingface(folder / "tokenizer")
    return {tied: str(folder) for tied, folder in found.items()}


@pytest.fixture(scope="module")
def native(folders):
    """What the four processes of the split model return."""
    return run_distributed(save_and_measure, 4, folders, timeout=240)


@pytest.fixture(scope="module")
def exports(native, folders, tmp_path_factory):
    """{(tied, where it was saved): exported folder}."""
    for world_size in (1, 2):
        run_distributed(load_and_save_again, world_size, folders, timeout=120)
    found = {}
    for tied, folder in folders.items():
        for name, step in (("split", FIRST), ("tp1", AGAIN), ("tp2", AGAIN)):
            output = tmp_path_factory.mktemp("export") / "model"
            report = convert_checkpoint(f"{folder}/{name}", output)
            assert report["checkpoint"].endswith(step) and report["dtype"] == "float32"
            assert report["vocab_size"] == VOCAB
            found[tied, name] = output
    return found


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def tied(request):
    return request.param


@torch.no_grad()
@pytest.mark.parametrize("passes", [1, 2, 3])
def test_exported_logits_are_the_native_ones_in_every_pass(native, exports, tied, passes):
    ranks = [rank[tied][0][passes] for rank in native if rank[tied][0]]
    assert len(ranks) == 2 and torch.equal(*ranks), "both tensor-parallel ranks of the last stage"
    expected = ranks[0][..., :VOCAB]
    found = load(exports[tied, "split"])(token_rows(), passes=passes, document_starts=document_starts()).logits
    assert found.shape == (3, S, VOCAB) and expected.std() > 0.3
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())


@torch.no_grad()
def test_passes_differ_so_much_that_a_wrong_one_would_show(native, tied):
    first, second, third = (native[-1][tied][0][passes][..., :VOCAB] for passes in (1, 2, 3))
    assert torch.allclose(first[:, 0], second[:, 0], atol=1e-6) and torch.allclose(second[:, 1], third[:, 1], atol=1e-5)
    for start, end in zip(DOCUMENT_STARTS, (*DOCUMENT_STARTS[1:], S), strict=True):
        assert (first - second)[:, start + 1 : end].abs().max() > 0.1
        assert (second - third)[:, start + 2 : end].abs().max() > 0.1


@torch.no_grad()
def test_logits_are_those_of_the_formulas(native, folders, tied):
    step = f"{folders[tied]}/split/checkpoints/{FIRST}"
    config = load_yaml(f"{step}/config.yaml")
    reference = Reference(read_weights(Path(step)), config, DOCUMENT_STARTS)
    expected = reference.logits(reference.passes(token_rows()[1], 3, plain=lambda t: t in DOCUMENT_STARTS)[-1])
    found = native[-1][tied][0][3][1, :, :VOCAB]
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())


def test_every_layout_exports_the_same_bytes(exports, tied):
    digests = {
        name: hashlib.sha256((exports[tied, name] / "model.safetensors").read_bytes()).hexdigest()
        for name in ("split", "tp1", "tp2")
    }
    assert len(set(digests.values())) == 1, digests


def test_no_padded_row_leaves(native, exports, tied):
    assert native[0][tied][1] == 1008, "the checkpoint has padded rows"
    tensors = load_file(exports[tied, "split"] / "model.safetensors")
    assert not [name for name, tensor in tensors.items() if 1008 in tensor.shape or 504 in tensor.shape]
    tables = [name for name, tensor in tensors.items() if VOCAB in tensor.shape]
    assert tables == ["model.embed_tokens.weight"] if tied else len(tables) == 2
    assert all(tensors[name].abs().sum(1).min() > 0 for name in tables)


def test_the_export_says_what_was_trained(exports, tied):
    config = json.loads((exports[tied, "split"] / "config.json").read_text())
    expected = {
        "vocab_size": VOCAB,
        "head_dim": 12,
        "num_key_value_heads": 2,
        "qk_layernorm": True,
        "rms_norm_eps": 3e-4,
        "intermediate_size": 88,
        "tie_word_embeddings": tied,
        "fusion": "gate" if tied else "concat",
        **{EXPORTED.get(name, name.split(".")[1]): value for name, value in OPTIONS.items() if not tied},
    }
    assert {name: config[name] for name in expected} == expected
    assert 54321.0 in (config.get("rope_theta"), (config.get("rope_parameters") or {}).get("rope_theta"))
    tokenizer = AutoTokenizer.from_pretrained(str(exports[tied, "split"]), local_files_only=True)
    assert tokenizer.eos_token_id == VOCAB - 1 and len(tokenizer) == VOCAB
