"""Text in, text out."""

import io

import pytest
import torch

from megatron_fbt.errors import CheckpointError, ConfigError
from megatron_fbt.inference.batches import continue_text
from megatron_fbt.inference.text import GenerationOptions, load_model
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
    config = tiny_config()
    damaged = export(tmp_path / "damaged", random_weights(config), config)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="damaged: cannot be loaded"):
        load_model(damaged)
