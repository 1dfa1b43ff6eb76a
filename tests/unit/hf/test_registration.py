"""transformers' Auto classes know exported folders once megatron_fbt.hf is imported."""

import json

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import megatron_fbt.hf
from megatron_fbt.hf.export import CODE_FILES
from megatron_fbt.hf.modeling_fbt import FBTForCausalLM, FBTModel
from tests.unit.hf.exports import export, load
from tests.unit.hf.reference import random_weights, tiny_config

IDS = torch.arange(3, 12)[None]


@torch.no_grad()
def test_exports_load_without_trust(tmp_path):
    config = tiny_config(share_embeddings_and_output_weights=False)
    folder = str(export(tmp_path / "model", random_weights(config), config))
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(model) is FBTForCausalLM and type(AutoConfig.from_pretrained(folder)) is megatron_fbt.hf.FBTConfig
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(model.eval()(IDS, passes=2).logits, load(folder)(IDS, passes=2).logits)
    states = AutoModel.from_pretrained(folder).eval()
    assert type(states) is FBTModel and torch.equal(states(IDS, passes=2), model(IDS, passes=2).state)


@torch.no_grad()
def test_a_model_saved_again_brings_its_code(tmp_path):
    config = tiny_config()
    model = AutoModelForCausalLM.from_pretrained(str(export(tmp_path / "model", random_weights(config), config)))
    model.save_pretrained(tmp_path / "again")
    assert all((tmp_path / "again" / name).is_file() for name in CODE_FILES)
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["auto_map"] == {
        "AutoConfig": "configuration_fbt.FBTConfig",
        "AutoModelForCausalLM": "modeling_fbt.FBTForCausalLM",
    }
    assert torch.equal(load(tmp_path / "again")(IDS).logits, model.eval()(IDS).logits)
