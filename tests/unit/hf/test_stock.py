"""Plain mode as transformers' own classes, against the formulas."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from megatron_fbt.errors import ConfigError
from megatron_fbt.hf.stock import has_stock_class, stock_class
from tests.unit.hf.exports import export
from tests.unit.hf.reference import Reference, random_weights, tiny_config

IDS = torch.randint(0, 50, (120,), generator=torch.Generator().manual_seed(2))  # positions above 100
UNTIED = {"share_embeddings_and_output_weights": False}
PLAIN = {"input_norm": "none"}
CASES = {
    "tied": ("LlamaForCausalLM", {}),
    "tied, embedding as it is": ("LlamaForCausalLM", PLAIN),
    "untied, GQA": ("LlamaForCausalLM", {**UNTIED, "num_query_groups": 2}),
    "untied, embedding as it is, one group": ("LlamaForCausalLM", {**UNTIED, **PLAIN, "num_query_groups": 1}),
    "multiplier": ("LlamaForCausalLM", {"residual_multiplier": 0.3}),
    "unusual": (
        "LlamaForCausalLM",
        {"layernorm_epsilon": 3e-2, "rotary_base": 54321.0, "kv_channels": 14, "ffn_hidden_size": 88, **PLAIN},
    ),
    "qk norm": ("Qwen3ForCausalLM", {"qk_layernorm": True, "num_query_groups": 2}),
    "qk norm, window": (
        "Qwen3ForCausalLM",
        {"qk_layernorm": True, "num_layers": 3, "sliding_window": 7, "window_attn_skip_freq": 2, **PLAIN},
    ),
    "window": ("MistralForCausalLM", {"sliding_window": 7, "num_query_groups": 2, "rotary_base": 54321.0}),
    "window, some layers": (
        "SmolLM3ForCausalLM",
        {"num_layers": 4, "sliding_window": 7, "window_attn_skip_freq": 3, "rotary_base": 54321.0, **UNTIED},
    ),
    "biases": ("Qwen2ForCausalLM", {"add_qkv_bias": True, "num_query_groups": 2}),
    "biases, window": (
        "Qwen2ForCausalLM",
        {"add_qkv_bias": True, "num_layers": 3, "sliding_window": 5, "window_attn_skip_freq": 2, **PLAIN},
    ),
}


def load_stock(folder):
    model, report = AutoModelForCausalLM.from_pretrained(str(folder), output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_logits_of_the_stock_class_equal_the_plain_pass(tmp_path, case):
    architecture, fields = CASES[case]
    config = tiny_config(**fields)
    weights = random_weights(config, seed=len(case))
    folder = export(tmp_path / "model", weights, config, format="llama")
    model, reference = load_stock(folder), Reference(weights, config)
    assert type(model).__name__ == architecture
    expected = reference.logits(reference.passes(IDS, 1)[0])
    assert (model(IDS[None]).logits[0].double() - expected).abs().max() < 1e-5
    ids = torch.randint(0, 50, (1, 9), generator=torch.Generator().manual_seed(3))
    model.generation_config.eos_token_id = None
    new = model.generate(ids, max_new_tokens=6, do_sample=False)[0, 9:]
    assert new.tolist() == reference.greedy(ids[0], "standard", 6)
    tied = fields.get("share_embeddings_and_output_weights", True) and fields.get("input_norm") == "none"
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied == model.config.tie_word_embeddings


def test_everything_a_release_could_default_is_written(tmp_path):
    fields = {"num_query_groups": 2, "kv_channels": 14, "layernorm_epsilon": 3e-2, "init_method_std": 0.017}
    config = tiny_config(**fields, rotary_base=54321.0, attention_dropout=0.13, ffn_hidden_size=88)
    config.data.sequence_length = 777
    folder = export(tmp_path / "model", random_weights(config, vocab_size=53), config, format="llama")
    written = json.loads((folder / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 53,
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 14,
        "hidden_act": "silu",
        "rms_norm_eps": 3e-2,
        "rope_theta": 54321.0,  # 4.x reads this, 5.x rope_parameters
        "max_position_embeddings": 777,
        "initializer_range": 0.017,
        "attention_dropout": 0.13,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": 52,
        "bos_token_id": None,
    }
    assert {name: written.get(name, "absent") for name in expected} == expected
    assert (written.get("dtype") or written.get("torch_dtype")) == "float32"
    assert "auto_map" not in written and not list(folder.glob("*.py"))
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == 52
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 52


def test_no_fusion_weight_leaves_and_the_card_says_so(tmp_path):
    config = tiny_config(residual_multiplier=0.5)
    folder = export(tmp_path / "model", random_weights(config), config, format="llama")
    assert not [name for name in load_file(folder / "model.safetensors") if "fusion" in name]
    card = (folder / "README.md").read_text()
    assert "transformers' own LlamaForCausalLM" in card and "trust_remote_code" not in card
    for words in ("fusion weights are left out", "holds N(e)", "multiplier 0.5", "a matrix of its own"):
        assert words in card


@torch.no_grad()
def test_the_folded_table_is_what_a_bf16_model_computes(tmp_path):
    config = tiny_config()
    weights = {name: weight.bfloat16() for name, weight in random_weights(config).items()}
    folder = export(tmp_path / "model", weights, config, format="llama", dtype=torch.bfloat16)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    wide = weights["embedding.word_embeddings.weight"].float()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + config.model.layernorm_epsilon)
    assert torch.equal(table, expected.bfloat16())


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"attention_output_gate": True}, "model.attention_output_gate = True"),
        ({"add_qkv_bias": True, "qk_layernorm": True}, "model.add_qkv_bias = True"),
    ],
)
def test_what_no_stock_class_has_is_refused_by_name(tmp_path, fields, option):
    config = tiny_config(**fields)
    assert not has_stock_class(config.model)
    with pytest.raises(ConfigError, match=option):
        export(tmp_path / "model", random_weights(config), config, format="llama")
    assert not list(tmp_path.iterdir())
    assert has_stock_class(tiny_config().model) and stock_class(tiny_config().model) == "LlamaForCausalLM"
