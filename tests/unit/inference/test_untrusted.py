"""An export may come from anybody: this package's own loading executes nothing of it."""

import json
import re

import pytest
import torch

import megatron_fbt.hf  # noqa: F401, registers the model type
from megatron_fbt.hf.export import CODE_FILES
from megatron_fbt.hf.modeling_fbt import FBTForCausalLM
from megatron_fbt.inference.batches import continue_text
from megatron_fbt.inference.text import GenerationOptions, load_model, load_network, load_tokenizer
from tests.unit.hf.exports import export
from tests.unit.hf.reference import random_weights, tiny_config


@pytest.fixture
def mined(tmp_path):
    """An export of which every piece of code would make a file."""
    config = tiny_config()
    folder = export(tmp_path / "mined", random_weights(config), config)
    (folder / "custom_generate").mkdir()
    for name in (*CODE_FILES, "tokenization_x.py", "custom_generate/generate.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()\nraise SystemExit(3)\n")
    path = folder / "tokenizer_config.json"
    mapped = {**json.loads(path.read_text()), "auto_map": {"AutoTokenizer": [None, "tokenization_x.Tokenizer"]}}
    path.write_text(json.dumps(mapped))
    return folder


def test_no_code_of_an_export_is_executed(mined, tmp_path):
    assert "modeling_fbt.FBTForCausalLM" in (mined / "config.json").read_text()
    model, tokenizer = load_model(mined, "cpu")
    assert type(model) is FBTForCausalLM
    result = continue_text(model, tokenizer, "0123", GenerationOptions("fused", max_new_tokens=3))
    assert 1 <= result["new_tokens"] <= 3 and load_tokenizer(mined)("01").input_ids[:2] == [0, 1]
    assert not (tmp_path / "executed").exists()


def test_pickled_weights_are_not_read(mined, tmp_path):
    class Bomb:
        def __reduce__(self):
            return open, (str(tmp_path / "executed"), "w")

    (mined / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Bomb()}, mined / "pytorch_model.bin")
    with pytest.raises(Exception, match="model.safetensors|pytorch_model"):
        load_network(mined, "cpu")
    assert not (tmp_path / "executed").exists()


def test_a_model_saved_again_loads(tmp_path):
    config = tiny_config()
    folder = export(tmp_path / "model", random_weights(config), config)
    model, tokenizer = load_model(folder, "cpu")
    model.save_pretrained(tmp_path / "again")
    tokenizer.save_pretrained(tmp_path / "again")
    again, _ = load_model(tmp_path / "again", "cpu")
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(again(ids, passes=2).logits, model(ids, passes=2).logits)


def test_nothing_in_this_package_trusts_an_export(repository):
    for folder in ("megatron_fbt", "tools", "examples", "benchmarks"):
        for path in (repository / folder).rglob("*.py"):
            assert not re.search(r"trust_remote_code\s*=\s*True\s*[,)]\s*$", path.read_text(), re.MULTILINE), path
