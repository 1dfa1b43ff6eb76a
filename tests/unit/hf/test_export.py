"""Exported folders: their numbers, their files, and what may not be overwritten."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from megatron_fbt.config.feedback import PassPhase
from megatron_fbt.errors import CheckpointError, ConfigError
from megatron_fbt.hf.export import ExportOptions, export_model
from megatron_fbt.hf.weights import to_hf_weights
from tests.unit.hf.exports import LetterTokenizer, export, load
from tests.unit.hf.reference import Reference, random_weights, tiny_config

IDS = torch.randint(0, 50, (9,), generator=torch.Generator().manual_seed(2))


def largest_difference(left, right):
    return (left.double() - right.double()).abs().max().item()


@torch.no_grad()
@pytest.mark.parametrize("qk_layernorm", [False, True])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1), (6, 2)])
def test_exported_logits_equal_the_formulas(tmp_path, heads, groups, qk_layernorm):
    tied = groups != 2
    config = tiny_config(
        num_attention_heads=heads,
        num_query_groups=groups,
        qk_layernorm=qk_layernorm,
        share_embeddings_and_output_weights=tied,
    )
    weights = random_weights(config, seed=heads + groups)
    model, reference = load(export(tmp_path / "model", weights, config)), Reference(weights, config)
    for passes in (1, 3):
        expected = reference.logits(reference.passes(IDS, passes)[-1])
        assert largest_difference(model(IDS[None], passes=passes).logits[0], expected) < 1e-5


@torch.no_grad()
def test_plain_mode_equals_a_llama(tmp_path):
    config = tiny_config(num_attention_heads=4, num_query_groups=2, input_norm="none")
    config.model.share_embeddings_and_output_weights = False
    weights = random_weights(config)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=48,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=12,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
        )
    ).eval()
    llama_weights = {name: weight for name, weight in to_hf_weights(weights, config).items() if "fusion" not in name}
    llama.load_state_dict(llama_weights)
    model = load(export(tmp_path / "model", weights, config))
    ids = torch.randint(0, 50, (2, 120), generator=torch.Generator().manual_seed(4))  # positions above 100
    assert largest_difference(model(ids, passes=1).logits, llama(ids).logits) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("input_norm", ["rms", "none"])
def test_unusual_fields_are_written_and_used(tmp_path, input_norm):
    config = tiny_config(
        num_layers=3,
        hidden_size=40,
        ffn_hidden_size=88,
        num_attention_heads=3,
        num_query_groups=1,
        kv_channels=14,
        layernorm_epsilon=3e-2,
        rotary_base=54321.0,
        init_method_std=0.017,
        attention_dropout=0.13,
        hidden_dropout=0.07,
        input_norm=input_norm,
    )
    config.feedback.input_scale = 1.75
    config.feedback.eval_passes = 5
    config.data.sequence_length = 777
    weights = random_weights(config, vocab_size=53)
    folder = export(tmp_path / "model", weights, config)
    expected = {
        "vocab_size": 53,
        "hidden_size": 40,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 14,
        "rms_norm_eps": 3e-2,
        "rope_theta": 54321.0,
        "max_position_embeddings": 777,
        "initializer_range": 0.017,
        "attention_dropout": 0.13,
        "hidden_dropout": 0.07,
        "input_norm": input_norm,
        "fusion": "gate",
        "input_scale": 1.75,
        "passes": 5,
        "regime": "soft",
        "qk_layernorm": False,
        "tie_word_embeddings": True,
        "eos_token_id": 52,
    }
    written = json.loads((folder / "config.json").read_text())
    assert {name: written.get(name) for name in expected} == expected
    model, reference = load(folder), Reference(weights, config)
    assert {name: getattr(model.config, name) for name in expected} == expected
    passes = reference.logits(reference.passes(IDS, 5)[-1])  # five by default
    assert largest_difference(model(IDS[None]).logits[0], passes) < 1e-5


def test_fields_left_at_their_default_are_written_too(tmp_path):
    config = tiny_config()
    folder = export(tmp_path / "model", random_weights(config), config)
    written = json.loads((folder / "config.json").read_text())
    assert written["rms_norm_eps"] == 1e-5 and written["rope_theta"] == 10000.0 and written["initializer_range"] == 0.02
    assert written["tie_word_embeddings"] is True and written["qk_layernorm"] is False


def test_a_model_without_extra_passes_generates_plainly(tmp_path):
    config = tiny_config()
    config.feedback.schedule = [PassPhase(0.0, {1: 1.0})]
    model = load(export(tmp_path / "model", random_weights(config), config))
    assert (model.config.regime, model.config.passes) == ("standard", 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_tensor_has_the_exported_dtype(tmp_path, dtype):
    config = tiny_config()
    folder = export(tmp_path / "model", random_weights(config), config, dtype=dtype)
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    written = json.loads((folder / "config.json").read_text())
    assert (written.get("dtype") or written.get("torch_dtype")) == str(dtype).removeprefix("torch.")


def test_files_and_end_token(tmp_path):
    config = tiny_config()
    report = export_model(
        random_weights(config), config, LetterTokenizer(50), tmp_path / "model", ExportOptions(torch.float32)
    )
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "README.md", "tokenizer.json"} <= names
    assert {"configuration_fbt.py", "layers_fbt.py", "modeling_fbt.py", "generation_fbt.py"} <= names
    assert report["files"] == sorted(names) and report["vocab_size"] == 50
    assert report["parameters"] == sum(t.numel() for t in load_file(tmp_path / "model" / "model.safetensors").values())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", trust_remote_code=True)
    assert tokenizer.eos_token_id == 49 == GenerationConfig.from_pretrained(tmp_path / "model").eos_token_id
    assert list(tmp_path.iterdir()) == [tmp_path / "model"]
    assert len({path.stat().st_mode for path in (tmp_path / "model").iterdir()}) == 1
    assert "$" not in (tmp_path / "model" / "README.md").read_text()


def test_two_exports_are_byte_identical(tmp_path):
    config = tiny_config()
    folders = [export(tmp_path / name, random_weights(config), config) for name in ("a", "b")]
    for path in folders[0].iterdir():
        assert path.read_bytes() == (folders[1] / path.name).read_bytes(), path.name


@torch.no_grad()
def test_large_models_are_written_in_parts(tmp_path):
    config = tiny_config(share_embeddings_and_output_weights=False)
    weights = random_weights(config)
    whole = load(export(tmp_path / "whole", weights, config))
    parts = export(tmp_path / "parts", weights, config, max_shard_size="60KB")
    assert len(list(parts.glob("model-*-of-*.safetensors"))) > 2
    assert (parts / "model.safetensors.index.json").exists()
    assert torch.equal(load(parts)(IDS[None]).logits, whole(IDS[None]).logits)


def test_an_output_in_use_is_refused(tmp_path):
    config = tiny_config()
    weights = random_weights(config)
    folder = export(tmp_path / "model", weights, config)
    with pytest.raises(ConfigError, match="--force"):
        export(folder, weights, config)
    export(folder, random_weights(config, seed=9), config, force=True)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(embedding, random_weights(config, seed=9)["embedding.word_embeddings.weight"])
    other = tmp_path / "documents"
    other.mkdir()
    (other / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="not an exported model"):
        export(other, weights, config, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["documents", "model"]
    (tmp_path / "empty").mkdir()
    export(tmp_path / "empty", weights, config)


def test_a_failed_export_leaves_nothing(tmp_path):
    class Broken(LetterTokenizer):
        def save_for_huggingface(self, folder):
            raise OSError("disk full")

    config = tiny_config()
    weights = random_weights(config)
    with pytest.raises(CheckpointError, match="disk full"):
        export_model(weights, config, Broken(), tmp_path / "model", ExportOptions(torch.float32))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("entries", "configured"), [(60, None), (40, None), (60, 50), (40, 45)])
def test_another_vocabulary_is_refused(tmp_path, entries, configured):
    config = tiny_config(vocab_size=configured)
    with pytest.raises(CheckpointError, match=f"50 rows.*{entries} entries"):
        export_model(
            random_weights(config), config, LetterTokenizer(entries), tmp_path / "model", ExportOptions(torch.float32)
        )
    assert not list(tmp_path.iterdir())


def test_a_vocabulary_larger_than_the_tokenizer_is_kept(tmp_path):
    config = tiny_config(vocab_size=50)
    export_model(random_weights(config), config, LetterTokenizer(40), tmp_path / "model", ExportOptions(torch.float32))
    model = load(tmp_path / "model")
    assert model.config.vocab_size == model.lm_head.weight.shape[0] == 50 and model.config.eos_token_id == 39
