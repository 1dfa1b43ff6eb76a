"""Fusion variants and attention options, against the formulas: exported, in parallel passes and in every regime."""

import json
from dataclasses import replace

import pytest
import torch

from megatron_fbt.hf.configuration_fbt import FBTConfig
from tests.unit.hf.exports import export, load, make_model
from tests.unit.hf.reference import Reference, random_weights, tiny_config

REGIMES = ("standard", "soft", "fused", "recurrent")
TOLERANCE = 1e-5
GATED = {"attention_output_gate": True, "num_query_groups": 2, "qk_layernorm": True}
WINDOWED = {"num_layers": 3, "sliding_window": 4, "window_attn_skip_freq": 2}
VARIANTS = {
    "concat": {"fusion": "concat"},
    "add, output gate, multiplier": {"fusion": "add", **GATED, "residual_multiplier": 0.6},
    "window": {"fusion": "gate", **WINDOWED},
    "biases": {"fusion": "gate", "num_query_groups": 2, "add_qkv_bias": True},
    "all": {
        "fusion": "concat",
        **GATED,
        **WINDOWED,
        "residual_multiplier": 1.4,
        "input_norm": "none",
        "scaled_init": False,
        "add_qkv_bias": True,
    },
}
T, PROMPT = 15, 9


@pytest.fixture(scope="module", params=VARIANTS)
def built(request):
    config = tiny_config(**VARIANTS[request.param])
    config.feedback.input_scale = 0.8
    weights = random_weights(config, seed=6)
    model = make_model(weights, config)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model, Reference(weights, config), config, weights


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 50, (2, T), generator=torch.Generator().manual_seed(7))


def largest_difference(left, right):
    return (left.double() - right.double()).abs().max().item()


def greedy(model, ids, regime, **options):
    return model.generate(ids, regime=regime, max_new_tokens=6, do_sample=False, **options)[:, ids.shape[1] :]


@torch.no_grad()
def test_exported_logits_equal_the_formulas(built, ids, tmp_path):
    _, reference, config, weights = built
    model = load(export(tmp_path / "model", weights, config))
    for passes in (1, 2, 3):
        expected = reference.logits(reference.passes(ids[0], passes)[-1])
        assert largest_difference(model(ids[:1], passes=passes).logits[0], expected) < TOLERANCE
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    attention = ("attention_output_gate", "sliding_window", "window_attn_skip_freq")
    for name in (*attention, "residual_multiplier", "scaled_init"):
        assert written[name] == getattr(config.model, name)
    assert written["fusion"] == config.feedback.fusion
    card = (tmp_path / "model" / "README.md").read_text()
    assert f"Fusion: `{config.feedback.fusion}`." in card and ("gated" in card) == config.model.attention_output_gate
    assert ("sees 4 positions (every layer in 2 sees all)" in card) == (config.model.sliding_window is not None)


@torch.no_grad()
@pytest.mark.parametrize("changed", [{"sliding_window": None}, {"window_attn_skip_freq": None}, {"sliding_window": 3}])
def test_every_part_of_a_window_shows_in_the_formulas(ids, changed):
    config, other = tiny_config(**WINDOWED), tiny_config(**WINDOWED)
    other.model = replace(other.model, **changed)
    weights = random_weights(config)
    one, two = (Reference(weights, each).passes(ids[0], 1)[0] for each in (config, other))
    assert largest_difference(one, two) > 1e-2


@torch.no_grad()
def test_as_many_passes_as_tokens_equal_the_recurrence(built, ids):
    model, reference, _, _ = built
    recurrence = model(ids, regime="recurrent").logits
    assert largest_difference(recurrence[1], reference.logits(reference.regime(ids[1], "recurrent", T))) < TOLERANCE
    for passes in (1, 4, T):
        logits = model(ids, passes=passes).logits
        assert largest_difference(logits[:, :passes], recurrence[:, :passes]) < TOLERANCE
        if passes < T:
            assert largest_difference(logits[:, passes:], recurrence[:, passes:]) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("regime", REGIMES)
def test_prompt_decoding_and_teacher_forcing_equal_the_definition(built, ids, regime):
    model, reference, _, _ = built
    expected = reference.logits(reference.regime(ids[0], regime, PROMPT, fused_passes=2))
    output = model(ids[:1, :PROMPT], regime=regime, fused_passes=2, use_cache=True)
    logits = [output.logits]
    for t in range(PROMPT, T):
        output = model(ids[:1, t : t + 1], past_key_values=output.past_key_values)
        logits.append(output.logits)
    assert largest_difference(torch.cat(logits, dim=1)[0], expected) < TOLERANCE
    whole = model(ids[:1], regime=regime, fused_passes=2, prompt_length=PROMPT)
    assert largest_difference(whole.logits[0], expected) < TOLERANCE
    cache = model(ids[:1, :PROMPT], regime=regime, fused_passes=2, use_cache=True).past_key_values
    rest = model(ids[:1, PROMPT:], past_key_values=cache).logits
    assert largest_difference(rest[0], expected[PROMPT:]) < TOLERANCE


@pytest.mark.parametrize("regime", REGIMES)
def test_greedy_text_of_a_padded_batch_equals_the_definition(built, ids, regime):
    model, reference, _, _ = built
    lengths, width = (2, PROMPT), PROMPT + 3
    rows = torch.full((2, width), 33)
    for row, length in zip(rows, lengths, strict=True):
        row[width - length :] = ids[0, :length]
    mask = torch.stack([(torch.arange(width) >= width - length).long() for length in lengths])
    text = greedy(model, rows, regime, attention_mask=mask)
    assert torch.equal(text, greedy(model, rows, regime, attention_mask=mask, use_cache=False))
    for found, length in zip(text, lengths, strict=True):
        assert found.tolist() == reference.greedy(ids[0, :length], regime, 6)


def test_gradient_reaches_every_weight(built, ids):
    model, _, _, _ = built
    model.zero_grad()
    model(ids, labels=ids, passes=2).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


STARTS = (0, 4, 5, 11)


def packed(**data_fields):
    """A model with windows, its configuration with fields of the data section, and [2, T] document starts."""
    config = tiny_config(**WINDOWED)
    for name, value in data_fields.items():
        assert hasattr(config.data, name)
        setattr(config.data, name, value)
    weights = random_weights(config, seed=8)
    starts = torch.zeros(2, T, dtype=torch.bool)
    starts[:, list(STARTS)] = True
    return make_model(weights, config), weights, config, starts


@torch.no_grad()
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("reset_position_ids", [False, True])
def test_masked_documents_are_as_if_alone(ids, passes, reset_position_ids):
    model, weights, config, starts = packed(reset_attention_mask=True, reset_position_ids=reset_position_ids)
    found = model(ids, passes=passes, document_starts=starts)
    assert found.past_key_values is None, "no text goes on from rows of several documents"
    reference = Reference(weights, config)  # of one document: rotary embeddings see differences of positions only
    for begin, end in zip(STARTS, (*STARTS[1:], T), strict=True):
        alone = reference.logits(reference.passes(ids[0, begin:end], passes)[-1])
        assert largest_difference(found.logits[0, begin:end], alone) < TOLERANCE
    unmasked, _, _, _ = packed()
    assert largest_difference(unmasked(ids, passes=passes, document_starts=starts).logits, found.logits) > 1e-2


@torch.no_grad()
def test_positions_restart_where_documents_do(ids):
    model, weights, config, starts = packed(reset_position_ids=True)  # without the mask, where they change the logits
    found = model(ids, passes=2, document_starts=starts).logits[0]
    expected = Reference(weights, config, STARTS).passes(ids[0], 2, plain=lambda t: t in STARTS)[-1]
    assert largest_difference(found, Reference(weights, config).logits(expected)) < TOLERANCE
    counted_on, _, _, _ = packed()
    assert largest_difference(counted_on(ids, passes=2, document_starts=starts).logits[0], found) > 1e-3


@torch.no_grad()
def test_masked_documents_in_a_padded_row(ids):
    model, _, _, starts = packed(reset_attention_mask=True, reset_position_ids=True)
    padding = 3
    row = torch.cat([torch.full((1, padding), 33), ids[:1]], dim=1)
    mask = (torch.arange(T + padding) >= padding).long()[None]
    shifted = torch.nn.functional.pad(starts[:1], (padding, 0))
    found = model(row, attention_mask=mask, passes=3, document_starts=shifted).logits[:, padding:]
    assert largest_difference(found, model(ids[:1], passes=3, document_starts=starts[:1]).logits) < TOLERANCE


@torch.no_grad()
def test_generation_takes_a_prompt_as_one_document(ids):
    masked, plain = packed(reset_attention_mask=True)[0], packed()[0]
    for regime in REGIMES:
        assert torch.equal(greedy(masked, ids, regime), greedy(plain, ids, regime))


@torch.no_grad()
def test_no_cache_goes_on_from_masked_documents(ids):
    model, _, _, starts = packed(reset_attention_mask=True)
    with pytest.raises(ValueError, match="document_starts"):
        model(ids, passes=2, document_starts=starts, use_cache=True)
    unmasked, _, _, _ = packed()
    assert unmasked(ids, passes=2, document_starts=starts).past_key_values.get_seq_length() == T


@pytest.mark.parametrize(
    ("name", "value"), [("sliding_window", 0), ("window_attn_skip_freq", 0), ("passes", 0), ("fusion", "sum")]
)
def test_impossible_fields_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}="):
        FBTConfig(**{name: value})


def test_initial_weights_follow_the_recipe():
    from megatron_fbt.hf.modeling_fbt import FBTForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": 50, "hidden_size": 200, "num_hidden_layers": 4, "initializer_range": 0.05}
    found = FBTForCausalLM(FBTConfig(**shape, fusion="concat", scaled_init=False)).model
    assert found.layers[1].mlp.down_proj.weight.std().item() == pytest.approx(0.05, rel=0.05)
    assert found.layers[2].self_attn.o_proj.weight.std().item() == pytest.approx(0.05, rel=0.05)
    for half in (found.fusion.concat_state_proj, found.fusion.concat_token_proj):
        assert half.weight.std().item() == pytest.approx(400**-0.5, rel=0.05)
        assert half.weight.abs().max() <= (3 / 400) ** 0.5
    added = FBTForCausalLM(FBTConfig(**shape, fusion="add")).model.fusion
    assert added.token_proj.weight.std().item() == pytest.approx(200**-0.5, rel=0.05)
