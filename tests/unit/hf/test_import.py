"""Hugging Face folders as training checkpoints: stock models whose ordinary mode stays, and exports that come back."""

import hashlib
import json
import os
import shutil
import socket

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_fbt.config.checks import validate_config
from megatron_fbt.config.load import load_yaml, parse_command_line
from megatron_fbt.errors import CheckpointError, ConfigError, DataError
from megatron_fbt.hf.convert import Conversion, convert_checkpoint
from megatron_fbt.hf.import_hf import import_model
from megatron_fbt.training.checkpoint import read_weights
from megatron_fbt.training.integrity import find_damage
from megatron_fbt.training.run_folder import find_step_folder
from tests.unit.hf.exports import LetterTokenizer, load, make_model
from tests.unit.hf.reference import random_weights, tiny_config
from tests.unit.hf.sources import FAMILIES, FULL, SLIDING, change_config, make_source, write_source

IDS = torch.randint(0, 60, (2, 130), generator=torch.Generator().manual_seed(4))


def largest_difference(left, right):
    return (left.double() - right.double()).abs().max().item()


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_the_ordinary_mode_is_the_source(tmp_path, family):
    source = make_source(family)
    import_model(write_source(tmp_path / "source", source), tmp_path / "made")
    config = load_yaml(str(tmp_path / "made" / "config.yaml"))
    convert_checkpoint(tmp_path / "made", tmp_path / "export", Conversion(format="fbt"))
    model, expected = load(tmp_path / "export"), source(IDS).logits
    assert expected.std() > 0.5
    assert largest_difference(model(IDS, passes=1).logits, expected) < 1e-5
    assert largest_difference(model(IDS, regime="standard", prompt_length=7).logits, expected) < 1e-5
    assert largest_difference(model(IDS, passes=2).logits, expected) > 0.1, "the fresh feedback path is connected"
    table = source.get_input_embeddings().weight[:50].double()
    assert config.feedback.input_scale == pytest.approx(table.square().mean().sqrt().item(), rel=1e-6)
    assert config.model.input_norm == "none" and config.model.vocab_size == 60
    text = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    text["attention_mask"] = torch.ones_like(IDS[:, :9])
    found = model.generate(IDS[:, :9], regime="standard", **text)
    assert torch.equal(found, source.generate(IDS[:, :9], **text))


@pytest.mark.parametrize(
    ("fusion", "names"), [(None, ("state_proj", "token_gate")), ("concat", ("concat_state_proj",))]
)
def test_fresh_fusion_weights_are_those_of_a_new_run_with_the_seed(tmp_path, fusion, names):
    from megatron_fbt.model.initialise import initial_values

    source = write_source(tmp_path / "source", make_source("llama"))
    report = import_model(source, tmp_path / "made", seed=77, fusion=fusion)
    config, weights = load_yaml(str(tmp_path / "made" / "config.yaml")), read_weights(tmp_path / "made")
    assert config.run.seed == 77 and config.feedback.fusion == report["fusion"] == (fusion or "gate")
    for name in (f"fusion.{name}.weight" for name in names):
        values = initial_values(name, torch.arange(48 * 48), config.model, 77).view(48, 48).float()
        assert torch.equal(weights[name], values)
    other = import_model(source, tmp_path / "other", seed=78, fusion=fusion)
    name = f"fusion.{names[0]}.weight"
    assert not torch.equal(read_weights(tmp_path / "other")[name], weights[name]) and other["source"] == str(source)


def test_the_configuration_is_complete(tmp_path):
    source = write_source(tmp_path / "source", make_source("qwen2 window", attention_dropout=0.1))
    report = import_model(source, tmp_path / "made")
    config = load_yaml(str(tmp_path / "made" / "config.yaml"))
    expected = {
        "num_layers": 4,
        "hidden_size": 48,
        "ffn_hidden_size": 88,
        "num_attention_heads": 4,
        "num_query_groups": 1,
        "kv_channels": 12,
        "qk_layernorm": False,
        "add_qkv_bias": True,
        "sliding_window": 5,
        "window_attn_skip_freq": 3,
        "layernorm_epsilon": 3e-4,
        "rotary_base": 10000.0,
        "attention_dropout": 0.1,
        "share_embeddings_and_output_weights": False,
    }
    assert {name: getattr(config.model, name) for name in expected} == expected
    assert config.data.sequence_length == 200 and config.precision.dtype == "fp32"
    words = report["command"].replace("'", "").split()
    assert words[:3] == ["python", "-m", "megatron_fbt.pretrain"]
    parsed, _ = parse_command_line([*words[3:], "--dry_run"])
    validate_config(parsed)
    assert parsed.checkpoint.init_from == str(tmp_path / "made") and parsed.feedback.schedule == "full"
    assert parsed.model == config.model and find_step_folder(tmp_path / "made") == tmp_path / "made"
    assert parsed.data.tokenizer.path == str(tmp_path / "made")


def test_long_contexts_are_cut_to_rows_that_can_be_trained(tmp_path):
    source = write_source(tmp_path / "source", make_source("llama", max_position_embeddings=131_072))
    for given, expected in ((None, 4096), (8192, 8192)):
        import_model(source, tmp_path / f"made {given}", sequence_length=given)
        assert load_yaml(str(tmp_path / f"made {given}" / "config.yaml")).data.sequence_length == expected
    for wrong in (-3, 0):
        with pytest.raises(ConfigError, match=f"sequence_length = {wrong}: must be at least 1"):
            import_model(source, tmp_path / "no", sequence_length=wrong)


EVERY_FIELD = {
    "num_query_groups": 2,
    "qk_layernorm": True,
    "add_qkv_bias": True,
    "attention_output_gate": True,
    "sliding_window": 7,
    "window_attn_skip_freq": 2,
    "residual_multiplier": 0.7,
    "layernorm_epsilon": 3e-4,
    "rotary_base": 54321.0,
    "init_method_std": 0.03,
    "scaled_init": False,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.2,
    "share_embeddings_and_output_weights": False,
    "input_norm": "none",
}


DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def round_trip_config(fields, fusion):
    config = tiny_config(fusion, **fields)
    if fields:
        config.feedback.input_scale, config.feedback.eval_passes = 0.37, 5
        config.data.reset_attention_mask = config.data.reset_position_ids = True
    return config


def exported(folder, config, dtype):
    """An export of a checkpoint with random weights, by way of an import, which is the shortest way to a checkpoint."""
    model = make_model({name: w.to(dtype) for name, w in random_weights(config).items()}, config).to(dtype)
    model.save_pretrained(folder / "model")
    LetterTokenizer(50).save_for_huggingface(folder / "model")
    import_model(folder / "model", folder / "checkpoint")
    convert_checkpoint(folder / "checkpoint", folder / "export", Conversion(DTYPE_NAMES[dtype], "fbt"))
    return folder / "export"


def files_of(folder, pattern):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob(pattern))}


@pytest.mark.parametrize(
    ("fields", "fusion", "dtype"),
    [
        ({}, "gate", torch.float32),
        (EVERY_FIELD, "concat", torch.bfloat16),
        ({"add_qkv_bias": True}, "add", torch.float16),
    ],
)
def test_an_export_comes_back_bit_for_bit(tmp_path, fields, fusion, dtype):
    config = round_trip_config(fields, fusion)
    first = exported(tmp_path, config, dtype)
    import_model(first, tmp_path / "back")
    again = tmp_path / "again"
    convert_checkpoint(tmp_path / "back", again, Conversion(DTYPE_NAMES[dtype], "fbt"))
    assert files_of(first, "*.safetensors") == files_of(again, "*.safetensors") != {}
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert json.loads((first / name).read_text()) == json.loads((again / name).read_text()), name
    back, weights = load_yaml(str(tmp_path / "back" / "config.yaml")), read_weights(tmp_path / "back")
    for name, value in fields.items():
        assert getattr(back.model, name) == value, name
    assert back.feedback.fusion == fusion and back.feedback.validation_passes == config.feedback.validation_passes
    for name, weight in random_weights(config).items():
        assert torch.equal(weights[name].float(), weight.to(dtype).float()), name


def test_the_manifest_covers_everything(tmp_path, stock):
    import_model(stock, tmp_path / "made")
    assert find_damage(tmp_path / "made") == []
    (tmp_path / "made" / "tokenizer.json").write_text("{}")
    assert len(find_damage(tmp_path / "made")) == 1


def test_master_weights_are_the_weights(tmp_path):
    from megatron_fbt.core.checkpoint_io import read_tensors

    source = write_source(tmp_path / "source", make_source("qwen3").bfloat16())
    assert import_model(source, tmp_path / "made")["precision"] == "bf16"
    tensors = read_tensors(tmp_path / "made")
    names = [name for name in tensors if not name.startswith("optimizer.")]
    assert len(tensors) == 2 * len(names) and "decoder.layers.3.self_attention.k_layernorm.weight" in names
    for name in names:
        master = tensors[f"optimizer.master.{name}"]
        assert (tensors[name].dtype, master.dtype) == (torch.bfloat16, torch.float32)
        fresh = name.startswith("fusion.")
        assert torch.equal(tensors[name], master.bfloat16()) and fresh != torch.equal(tensors[name].float(), master)


def test_sharded_folders_and_mixed_formats(tmp_path):
    model = make_source("llama tied")
    whole = write_source(tmp_path / "whole", model)
    parts = write_source(tmp_path / "parts", model, max_shard_size="40KB")
    assert len(list(parts.glob("model-*.safetensors"))) > 2
    mixed = shutil.copytree(whole, tmp_path / "mixed")
    tensors = load_file(mixed / "model.safetensors")
    halves = {n: w.half() if "q_proj" in n or "norm" in n else w.clone() for n, w in tensors.items()}
    halves["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    halves["lm_head.weight"] = torch.zeros(60, 48)  # of a tied model: not read, by transformers neither
    save_file(halves, mixed / "model.safetensors", metadata={"format": "pt"})
    for name in ("whole", "parts", "mixed"):
        import_model(tmp_path / name, tmp_path / f"made {name}")
    one, two, three = (read_weights(tmp_path / f"made {name}") for name in ("whole", "parts", "mixed"))
    assert one.keys() == two.keys() == three.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    different = {name for name in one if not torch.equal(one[name], three[name])}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in different} >= {"linear_qkv", "final_layernorm"}
    query = one["decoder.layers.1.self_attention.linear_qkv.weight"][:12]
    assert torch.equal(three["decoder.layers.1.self_attention.linear_qkv.weight"][:12], query.half().float())


REFUSED = {
    "model_type": ({"model_type": "gpt2"}, r"model_type = 'gpt2'.*llama"),
    "attention_bias": ({"attention_bias": True}, "attention_bias = True"),
    "mlp_bias": ({"mlp_bias": True}, "mlp_bias = True"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling = .*linear"),
    "llama3": (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        "rope_scaling = .*llama3",
    ),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling = .*yarn"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    "odd heads": ({"head_dim": 11}, "kv_channels = 11|head_dim`?=11"),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config = .*fp8"),
    "code": ({"auto_map": {"AutoModelForCausalLM": "x.Y"}}, "auto_map = .*x.Y"),
    "another head": ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    "two": ({"mlp_bias": True, "hidden_act": "relu"}, "hidden_act = 'relu'.*mlp_bias = True"),
    "wrong type": ({"hidden_size": "wide"}, "config.json"),
    "wrong shape": ({"intermediate_size": 90}, r"gate_proj.weight has shape \(88, 48\), not \(90, 48\)"),
    "layers": ({"num_hidden_layers": 5}, "missing model.layers.4"),
    "tied": ({"tie_word_embeddings": True, "num_hidden_layers": 3}, "not expected model.layers.3"),
}


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    return write_source(tmp_path_factory.mktemp("stock") / "source", make_source("llama"))


@pytest.mark.parametrize("case", REFUSED)
def test_features_without_a_counterpart_are_refused_by_name(tmp_path, stock, case):
    fields, words = REFUSED[case]
    folder = shutil.copytree(stock, tmp_path / "source")
    change_config(folder, **fields)
    with pytest.raises(CheckpointError, match=words):
        import_model(folder, tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("types", "window", "skip"),
    [
        ([FULL] * 4, None, None),
        ([SLIDING] * 4, 5, None),
        ([SLIDING, FULL, SLIDING, FULL], 5, 2),
        ([SLIDING, SLIDING, SLIDING, FULL], 5, 4),
        ([FULL, SLIDING, SLIDING, SLIDING], 5, "refused"),
        ([FULL, FULL, SLIDING, SLIDING], 5, "refused"),
    ],
)
def test_windows_that_skip_every_nth_layer(tmp_path, types, window, skip):
    source = make_source("qwen2 window", layer_types=types)
    write_source(tmp_path / "source", source)
    if skip == "refused":
        with pytest.raises(CheckpointError, match=f"layer_types = .'{types[0]}'.*window_attn_skip_freq"):
            import_model(tmp_path / "source", tmp_path / "made")
        return
    import_model(tmp_path / "source", tmp_path / "made")
    model = load_yaml(str(tmp_path / "made" / "config.yaml")).model
    assert (model.sliding_window, model.window_attn_skip_freq) == (window, skip)


def test_what_a_family_does_not_read_is_not_refused(tmp_path):
    for family, fields in (("qwen2 tied", {"attention_bias": True}), ("mistral", {"layer_types": [SLIDING] * 4})):
        folder = write_source(tmp_path / family, make_source(family))
        change_config(folder, **fields)
        import_model(folder, tmp_path / f"made {family}")
    change_config(folder, layer_types=[SLIDING, FULL] * 2)
    with pytest.raises(CheckpointError, match="layer_types = .*sliding_window = 6 in every layer or in none"):
        import_model(folder, tmp_path / "no")


def test_files_that_can_hold_code_are_not_read(tmp_path, stock):
    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/exploded",)

    folder = shutil.copytree(stock, tmp_path / "source")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        import_model(folder, tmp_path / "made")
    torch.save(Bomb(), folder / "pytorch_model.bin")
    (folder / "modeling_llama.py").write_text(f"open({str(tmp_path / 'exploded')!r}, 'w')")
    with pytest.raises(CheckpointError, match="pytorch_model.bin can hold code.*save_pretrained"):
        import_model(folder, tmp_path / "made")
    assert not (tmp_path / "exploded").exists() and not (tmp_path / "made").exists()


@pytest.mark.parametrize("change", ["cut", "missing shard", "elsewhere", "int8", "zero embedding", "no config"])
def test_damaged_folders(tmp_path, stock, change):
    folder = shutil.copytree(stock, tmp_path / "source")
    weights, words = folder / "model.safetensors", {"cut": "cannot be read", "no config": "config.json"}
    if change == "cut":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif change == "no config":
        (folder / "config.json").unlink()
    elif change == "int8":
        save_file({**load_file(weights), "model.norm.weight": torch.ones(48, dtype=torch.int8)}, weights)
        words[change] = "model.norm.weight is stored as I8"
    elif change == "zero embedding":
        save_file({**load_file(weights), "model.embed_tokens.weight": torch.zeros(60, 48)}, weights)
        words[change] = "input_scale = 0.0"
    else:
        names = dict.fromkeys(load_file(weights), "../evil" if change == "elsewhere" else "gone.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        words[change] = "'../evil' is not a file name" if change == "elsewhere" else "gone.safetensors cannot be read"
    with pytest.raises(CheckpointError, match=words[change]):
        import_model(folder, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_tokenizers(tmp_path, stock):
    bare = write_source(tmp_path / "bare", make_source("llama"), entries=0)
    assert "--data.tokenizer.path TOKENIZER" in import_model(bare, tmp_path / "made bare")["command"]
    config = load_yaml(str(tmp_path / "made bare" / "config.yaml"))
    table = load_file(bare / "model.safetensors")["model.embed_tokens.weight"].double()
    assert config.data.tokenizer.path is None
    assert config.feedback.input_scale == pytest.approx(table.square().mean().sqrt().item(), rel=1e-6), "all 60 rows"
    larger = write_source(tmp_path / "larger", make_source("llama"), entries=61)
    with pytest.raises(CheckpointError, match="61 entries.*60 rows"):
        import_model(larger, tmp_path / "no")
    broken = shutil.copytree(stock, tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="cannot load it"):
        import_model(broken, tmp_path / "no")


def test_a_moved_checkpoint_is_exported_with_its_own_tokenizer(tmp_path, stock):
    import_model(stock, tmp_path / "made")
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "made").rename(tmp_path / "elsewhere" / "a b")
    convert_checkpoint(moved, tmp_path / "export", Conversion(format="fbt"))
    assert (tmp_path / "export" / "tokenizer.json").is_file()
    assert load(tmp_path / "export").config.eos_token_id == 49


def test_an_output_in_use_is_refused(tmp_path, stock):
    import_model(stock, tmp_path / "made", seed=1)
    with pytest.raises(ConfigError, match="--force"):
        import_model(stock, tmp_path / "made", seed=2)
    assert load_yaml(str(tmp_path / "made" / "config.yaml")).run.seed == 1
    import_model(stock, tmp_path / "made", seed=2, force=True)
    assert load_yaml(str(tmp_path / "made" / "config.yaml")).run.seed == 2
    training = shutil.copytree(tmp_path / "made", tmp_path / "training")
    (training / "import.json").unlink()
    with pytest.raises(ConfigError, match="not an imported model"):
        import_model(stock, training, force=True)
    with pytest.raises(ConfigError, match="run.seed = -1"):
        import_model(stock, tmp_path / "no", seed=-1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "training"]


def test_an_interrupted_import_leaves_nothing(tmp_path, stock, monkeypatch):
    from megatron_fbt.hf.source_weights import SafetensorsFolder

    def stop(self, name):
        raise KeyboardInterrupt

    monkeypatch.setattr(SafetensorsFolder, "read", stop)
    with pytest.raises(KeyboardInterrupt):
        import_model(stock, tmp_path / "made")
    assert not list(tmp_path.iterdir())


def test_what_killed_imports_have_left_goes(tmp_path):
    source = write_source(tmp_path / "source", make_source("llama"))
    left = tmp_path / f".made.partial-{socket.gethostname()}-999999999"
    running = tmp_path / f".made.partial-{socket.gethostname()}-{os.getppid()}"
    left.mkdir(), running.mkdir()
    import_model(source, tmp_path / "made")
    assert not left.exists() and running.exists() and find_damage(tmp_path / "made") == []
