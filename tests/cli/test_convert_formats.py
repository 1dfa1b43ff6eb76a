"""tools/convert_to_hf.py: which format a run gets, and what the converter touches and needs."""

import importlib.util
import json

import pytest
from safetensors.torch import load_file

from tests.unit.hf.checkpoints import write_checkpoint
from tests.unit.hf.exports import LetterTokenizer, load
from tests.unit.hf.reference import random_weights, tiny_config

BASELINE = {"step": 9, "consumed_samples": 90, "token_equivalents": 900, "pass_counts": [9]}
SWITCHED = {**BASELINE, "pass_counts": [8, 1], "switch_on_step": 8}


@pytest.fixture(scope="module")
def tool(repository):
    spec = importlib.util.spec_from_file_location("convert_tool", repository / "tools" / "convert_to_hf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def checkpoint(folder, state=BASELINE, schedule="standard", init_from=None, vocab_size=None, rows=50, **model):
    """A checkpoint folder and its tokenizer."""
    config = tiny_config(**model, vocab_size=vocab_size)
    config.feedback.schedule, config.checkpoint.init_from = schedule, init_from
    LetterTokenizer(50).save_for_huggingface(folder / "tokenizer")
    config.data.tokenizer.type, config.data.tokenizer.path = "huggingface", str(folder / "tokenizer")
    write_checkpoint(folder / "step", random_weights(config, rows), config, state)
    return folder / "step"


@pytest.mark.parametrize(
    ("fields", "arguments", "architecture"),
    [
        ({}, (), "LlamaForCausalLM"),
        ({}, ("--format", "fbt"), "FBTForCausalLM"),
        ({"schedule": "progressive"}, (), "FBTForCausalLM"),
        ({"schedule": "progressive"}, ("--format", "llama"), "LlamaForCausalLM"),
        ({"state": SWITCHED}, (), "FBTForCausalLM"),
        ({"state": None}, (), "FBTForCausalLM"),
        ({"init_from": "runs/another"}, (), "FBTForCausalLM"),
        ({"qk_layernorm": True}, (), "Qwen3ForCausalLM"),
        ({"attention_output_gate": True}, (), "FBTForCausalLM"),
    ],
)
def test_a_baseline_is_a_stock_model_unless_asked_otherwise(tool, tmp_path, capsys, fields, arguments, architecture):
    step, output = checkpoint(tmp_path, **fields), tmp_path / "out"
    assert tool.main(["--checkpoint", str(step), "--output", str(output), *arguments]) == 0
    assert json.loads((output / "config.json").read_text())["architectures"] == [architecture]
    told = capsys.readouterr()
    assert architecture in told.out and ("fusion weights are left out" in told.err) == (architecture[:3] != "FBT")
    assert tool.main(["--checkpoint", str(step), "--output", str(output), "--force"]) == 0, "an export is replaced"


def test_an_option_without_a_stock_class_is_named(tool, tmp_path, capsys):
    step = checkpoint(tmp_path, attention_output_gate=True)
    assert tool.main(["--checkpoint", str(step), "--output", str(tmp_path / "out"), "--format", "llama"]) == 2
    assert "model.attention_output_gate = True" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_padded_rows_stay_behind_and_the_checkpoint_is_not_touched(tool, tmp_path):
    step = checkpoint(tmp_path, vocab_size=50, rows=128, share_embeddings_and_output_weights=False)
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in step.iterdir()}
    for path in [*step.iterdir(), step]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    for form in ("fbt", "llama"):
        output = tmp_path / form
        assert tool.main(["--checkpoint", str(step), "--output", str(output), "--format", form]) == 0
        tensors = load_file(output / "model.safetensors")
        assert tensors["lm_head.weight"].shape[0] == tensors["model.embed_tokens.weight"].shape[0] == 50
        assert json.loads((output / "config.json").read_text())["vocab_size"] == 50
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in step.iterdir()} == before
    assert load(tmp_path / "fbt").config.vocab_size == 50


def test_shards_and_a_size_without_a_meaning(tool, tmp_path, capsys):
    step, output = checkpoint(tmp_path, schedule="progressive"), tmp_path / "out"
    common = ["--checkpoint", str(step), "--output", str(output), "--max_shard_size"]
    assert tool.main([*common, "many"]) == 2
    assert "max_shard_size='many'" in capsys.readouterr().err and not output.exists()
    assert tool.main([*common, "50KB"]) == 0
    assert len(list(output.glob("model-*-of-*.safetensors"))) > 2 and load(output).config.passes == 3
