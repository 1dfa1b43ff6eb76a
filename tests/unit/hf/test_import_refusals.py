"""What the stock families can have and this project's models cannot: refused by name, in every family and spelling."""

import json

import pytest
import transformers
from safetensors.torch import load_file, save_file

from megatron_fbt.config.load import load_yaml
from megatron_fbt.errors import CheckpointError
from megatron_fbt.hf.import_hf import import_model
from tests.unit.hf.sources import FULL, SLIDING, change_config, make_source, write_source

RELEASE_5 = int(transformers.__version__.split(".")[0]) >= 5
SCALINGS = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {"factor": 2.0, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2 tied", "qwen3"])
def test_rope_scaling_is_refused_by_name_in_every_spelling(tmp_path, family):
    folder = write_source(tmp_path / "source", make_source(family))
    path = folder / "config.json"
    original = json.loads(path.read_text())
    bare = {name: value for name, value in original.items() if name not in ("rope_parameters", "rope_scaling")}
    for kind, fields in SCALINGS.items():
        for spelling in (
            {"rope_scaling": {"rope_type": kind, **fields}, "rope_theta": 5e4},  # transformers 4
            {"rope_scaling": {"type": kind, **fields}, "rope_theta": 5e4},  # before 4.43
            {"rope_parameters": {"rope_type": kind, "rope_theta": 5e4, **fields}},  # transformers 5
        ):
            if "rope_parameters" in spelling and not RELEASE_5:
                continue
            path.write_text(json.dumps({**bare, **spelling}))
            with pytest.raises(CheckpointError, match=f"rope_scaling = .*'{kind}'.*give a model without it"):
                import_model(folder, tmp_path / "made")
    assert not (tmp_path / "made").exists()
    path.write_text(json.dumps({**bare, "rope_scaling": {"rope_type": "default"}, "rope_theta": 5e4}))
    import_model(folder, tmp_path / "made")
    assert load_yaml(str(tmp_path / "made" / "config.yaml")).model.rotary_base == 5e4


FEATURES = {
    "llama": ({"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"}, {"partial_rotary_factor": 0.5}),
    "mistral": ({"hidden_act": "relu"}, {"partial_rotary_factor": 0.25}, {"layer_types": [SLIDING, FULL] * 2}),
    "qwen2 tied": ({"hidden_act": "gelu"}, {"partial_rotary_factor": 0.5}),
    "qwen3": ({"attention_bias": True}, {"hidden_act": "gelu"}, {"partial_rotary_factor": 0.5}),
}


@pytest.mark.parametrize("family", FEATURES)
def test_every_familys_features_are_refused_by_name(tmp_path, family):
    folder = write_source(tmp_path / "source", make_source(family))
    original = (folder / "config.json").read_text()
    for fields in FEATURES[family]:
        (folder / "config.json").write_text(original)
        change_config(folder, **fields)
        with pytest.raises(CheckpointError, match=f"{next(iter(fields))} = "):
            import_model(folder, tmp_path / "made")
    for model_type in ("granite", "cohere", "gemma2", "phi3", "mixtral", "ministral3", "smollm3", "olmo2"):
        (folder / "config.json").write_text(original)
        change_config(folder, model_type=model_type)  # scaled logits or embeddings, experts, other norms
        with pytest.raises(CheckpointError, match=f"model_type = '{model_type}': must be one of fbt, llama"):
            import_model(folder, tmp_path / "made")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, name, value):
    folder = write_source(tmp_path / "source", make_source("llama"))
    weights = load_file(folder / "model.safetensors")
    weights[name].view(-1)[3] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name} holds numbers that are not finite"):
        import_model(folder, tmp_path / "made")
    assert not (tmp_path / "made").exists()
