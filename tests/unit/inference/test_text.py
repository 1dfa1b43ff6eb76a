"""Text in, text out."""

import io
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_fbt.errors import BadNumbersError, CheckpointError, ConfigError
from megatron_fbt.inference.batches import continue_text
from megatron_fbt.inference.text import GenerationOptions, load_model, load_network
from tests.unit.hf.exports import export
from tests.unit.hf.reference import Reference, random_weights, tiny_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = tiny_config()
    return export(tmp_path_factory.mktemp("exports") / "tiny", random_weights(config), config)


@pytest.fixture(scope="module")
def loaded(folder):
    return load_model(folder, "cpu")


@pytest.mark.parametrize("regime", ["standard", "soft", "fused", "recurrent"])
def test_continuation_is_the_regimes_greedy_text(loaded, regime):
    config = tiny_config()
    reference = Reference(random_weights(config), config)
    result = continue_text(*loaded, "0123456789", GenerationOptions(regime, fused_passes=2, max_new_tokens=8))
    expected = reference.greedy(torch.arange(10), regime, 8, fused_passes=2)
    if 49 in expected:
        expected = expected[: expected.index(49) + 1]
    assert result["token_ids"] == expected
    assert result["continuation"] == "".join(chr(ord("0") + token) for token in expected if token != 49)
    assert result["finish"] == ("eos" if expected[-1] == 49 else "length")
    assert (result["prompt_tokens"], result["new_tokens"], result["regime"]) == (10, len(expected), regime)


def test_sampling_is_repeatable(loaded):
    def sample(seed, **options):
        settings = GenerationOptions(max_new_tokens=12, temperature=2.0, seed=seed, **options)
        return continue_text(*loaded, "0123", settings)["token_ids"]

    assert sample(1) == sample(1) != sample(2)
    assert sample(1, top_k=1) == sample(2, top_k=1) == sample(3, top_p=1e-6)


def test_running_count_goes_to_the_terminal(loaded):
    terminal = io.StringIO()
    result = continue_text(*loaded, "01", GenerationOptions(max_new_tokens=5), terminal)
    assert f"{result['new_tokens']}/5 tokens" in terminal.getvalue()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.5),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("regime", "hard"),
        ("fused_passes", 0),
        ("max_new_tokens", 0),
        ("seed", -1),
    ],
)
def test_options_without_a_meaning_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"{field}="):
        GenerationOptions(**{field: value}).validate()


def test_empty_prompt_is_refused(loaded):
    with pytest.raises(ConfigError, match="prompt is empty"):
        continue_text(*loaded, "", GenerationOptions())


def test_a_long_text_is_warned_about(loaded, capsys):
    continue_text(*loaded, "0", GenerationOptions(max_new_tokens=2))
    assert capsys.readouterr().err == ""
    continue_text(*loaded, "0" * 63, GenerationOptions(max_new_tokens=2))
    assert "rows of 64" in capsys.readouterr().err


def test_a_damaged_model_is_named(folder, tmp_path):
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load_model(tmp_path)
    with pytest.raises(ConfigError, match="device nonsense"):
        load_model(folder, "nonsense")
    with pytest.raises(ConfigError, match="device meta: .*give another"):
        load_model(folder, "meta")
    config = tiny_config()
    damaged = export(tmp_path / "damaged", random_weights(config), config)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="damaged: cannot be loaded"):
        load_model(damaged)


def changed(folder, place, file, **values):
    """A copy of an export in which a JSON file has other values."""
    shutil.copytree(folder, place)
    path = place / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return place


def test_weights_that_are_not_the_configurations_are_refused(folder, tmp_path):
    """transformers would fill the gaps with random numbers and go on."""
    tensors = load_file(folder / "model.safetensors")
    lost = {name: tensor for name, tensor in tensors.items() if name != "model.fusion.state_proj.weight"}
    narrow = {**tensors, "model.layers.0.mlp.down_proj.weight": torch.zeros(2, 3)}
    strange = {**tensors, "model.layers.9.foo": torch.zeros(3)}
    for place, (content, words) in enumerate(
        (
            (lost, "missing model.fusion.state_proj.weight"),
            (narrow, "another shape model.layers.0.mlp.down_proj.weight"),
            (strange, "not expected model.layers.9.foo"),
        )
    ):
        damaged = tmp_path / str(place)
        shutil.copytree(folder, damaged)
        save_file(content, damaged / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=rf"{damaged}: its weights are not .*{words} \(1 in all\)"):
            load_network(damaged, "cpu")
    other = changed(folder, tmp_path / "fusion", "config.json", fusion="concat")
    with pytest.raises(CheckpointError, match=r"missing model\.fusion\.[^;]*; not expected model\.fusion"):
        load_network(other, "cpu")


@pytest.mark.parametrize(
    ("field", "value"),
    [("input_scale", None), ("rms_norm_eps", "abc"), ("rope_theta", 0), ("num_attention_heads", 0)],
)
def test_impossible_numbers_in_the_configuration_are_named(folder, tmp_path, field, value):
    with pytest.raises(CheckpointError, match=f"{field}={value!r}: must be"):
        load_network(changed(folder, tmp_path / "x", "config.json", **{field: value}), "cpu")


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}},
        {"rope_scaling": "linear"},
    ],
)
def test_rotary_embeddings_that_the_model_does_not_have_are_refused(folder, tmp_path, changes):
    with pytest.raises(CheckpointError, match=f"{next(iter(changes))}=.*the model knows rope_theta alone"):
        load_network(changed(folder, tmp_path / "x", "config.json", **changes), "cpu")
    theta = json.loads((folder / "config.json").read_text())["rope_theta"]
    plain = {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    load_network(changed(folder, tmp_path / "y", "config.json", **plain), "cpu")


def test_an_adapter_in_an_export_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "x")
    (tmp_path / "x" / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    with pytest.raises(CheckpointError, match="adapter_config.json.*merge_and_unload"):
        load_network(tmp_path / "x", "cpu")


def test_an_error_in_a_tokenizer_is_one_line(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "x")
    (tmp_path / "x" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="^[^\n]*cannot be loaded[^\n]*$"):
        load_model(tmp_path / "x", "cpu")


def test_only_the_ends_of_the_folders_generation_settings_count(folder, loaded, tmp_path):
    settings = {"repetition_penalty": 9.0, "max_time": 1e-6, "num_beams": 3, "penalty_alpha": 0.6, "stop_strings": "a"}
    other = load_model(changed(folder, tmp_path / "x", "generation_config.json", **settings), "cpu")
    for temperature in (0.0, 1.0):
        options = GenerationOptions(max_new_tokens=8, temperature=temperature)
        expected, found = (continue_text(*model, "0123", options) for model in (loaded, other))
        assert found["token_ids"] == expected["token_ids"]
    ends = load_network(changed(folder, tmp_path / "y", "generation_config.json", eos_token_id=[49, 3]), "cpu")
    assert ends.generation_config.eos_token_id == [49, 3]
    with pytest.raises(CheckpointError, match="eos_token_id='x': must be a token id"):
        load_network(changed(folder, tmp_path / "z", "generation_config.json", eos_token_id="x"), "cpu")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_in_an_error(folder, temperature):
    model, tokenizer = load_model(folder, "cpu")
    model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(BadNumbersError, match="not finite"):
        continue_text(model, tokenizer, "0123", GenerationOptions(max_new_tokens=3, temperature=temperature))
