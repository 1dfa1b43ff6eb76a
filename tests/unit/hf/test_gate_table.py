"""The table of gates: same logits and text as gates that are computed, and never of other weights."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from megatron_fbt.hf.layers_fbt import GateTable
from tests.unit.hf.exports import make_model
from tests.unit.hf.reference import random_weights, tiny_config

REGIMES = ("standard", "soft", "fused", "recurrent")
IDS = torch.randint(1, 50, (2, 9), generator=torch.Generator().manual_seed(5))


def new_model(fusion="gate", **fields):
    config = tiny_config(fusion, **fields)
    model = make_model(random_weights(config, seed=3), config)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def greedy(model, regime, **options):
    return model.generate(IDS, regime=regime, max_new_tokens=6, do_sample=False, **options)


@torch.no_grad()
def test_the_table_holds_the_gates():
    model = new_model()
    model.build_gate_table()
    expected = model.model.fusion.token(model.model.embed_tokens.weight)
    table = model.model.gate_table.values
    assert table.shape == (50, 48) and torch.allclose(table, expected, atol=1e-6, rtol=0)
    parts = GateTable(model.model.embed_tokens, model.model.fusion, rows=7).values
    assert torch.allclose(parts, expected, atol=1e-6, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("regime", REGIMES)
def test_text_and_logits_are_the_same(regime):
    model = new_model(input_norm="none" if regime == "soft" else "rms")
    text, logits = greedy(model, regime), model(IDS, regime=regime, fused_passes=2, prompt_length=5).logits
    assert model.model.gate_table is None
    assert torch.equal(greedy(model, regime, gate_table=True), text)
    found = model(IDS, regime=regime, fused_passes=2, prompt_length=5).logits
    assert model.model.gate_table is not None and torch.allclose(found, logits, atol=1e-6, rtol=0)
    model.model.gate_table.values.fill_(0.25)
    changed = model(IDS, regime=regime, fused_passes=2, prompt_length=5).logits
    assert torch.equal(changed, logits) == (regime == "standard"), "the table is what is read"
    assert torch.equal(greedy(model, regime, gate_table=False), text) and model.model.gate_table is None


CHANGES = {
    "in place": lambda model, weight: weight.mul_(1.5),
    "data": lambda model, weight: weight.data.add_(0.3),
    "another tensor": lambda model, weight: setattr(weight, "data", weight.data + 0.3),
    "loaded": lambda model, weight: model.load_state_dict({name: w + 0.3 for name, w in model.state_dict().items()}),
    "one number": lambda model, weight: weight.data[3].__setitem__(5, 9.0),
}


@torch.no_grad()
@pytest.mark.parametrize("matrix", ["embed_tokens", "fusion.token_gate"])
@pytest.mark.parametrize("change", CHANGES)
def test_other_weights_get_another_table(change, matrix):
    model = new_model()
    greedy(model, "soft", gate_table=True)
    CHANGES[change](model, model.model.get_submodule(matrix).weight)
    text = greedy(model, "soft")
    expected = model.model.fusion.token(model.model.embed_tokens.weight)
    assert torch.allclose(model.model.gate_table.values, expected, atol=1e-6, rtol=0)
    assert torch.equal(greedy(copy.deepcopy(model), "soft", gate_table=False), text)


@torch.no_grad()
def test_a_call_by_itself_sees_changed_weights():
    model = new_model()
    model.build_gate_table()
    model.model.fusion.token_gate.weight.mul_(1.5)
    found = model(IDS, passes=2).logits
    assert model.model.gate_table is None and torch.equal(found, model(IDS, passes=2).logits)


def test_training_has_no_table():
    model = new_model()
    expected = new_model().train()
    model.build_gate_table()
    model.train()
    assert model.model.gate_table is None
    with pytest.raises(ValueError, match="gate_table: .* training mode"):
        model.build_gate_table()
    model.eval().build_gate_table()  # gradients flow in evaluation mode too
    for each in (model, expected):
        each(IDS, labels=IDS, passes=2).loss.backward()
    gradient = model.model.fusion.token_gate.weight.grad
    assert gradient.abs().max() > 0
    assert torch.allclose(gradient, expected.model.fusion.token_gate.weight.grad, atol=1e-7)


@pytest.mark.parametrize("fusion", ["concat", "add"])
def test_fusions_without_gates_say_so(fusion):
    model = new_model(fusion)
    with pytest.raises(ValueError, match=f"gate_table: config.fusion is '{fusion}'"):
        greedy(model, "soft", gate_table=True)
    greedy(model, "soft", gate_table=False)


@torch.no_grad()
def test_an_adapter_on_the_gate():
    model = new_model()
    model.build_gate_table()
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["token_gate"], init_lora_weights=False)).eval()
    expected = adapted(input_ids=IDS, passes=2).logits
    with pytest.raises(ValueError, match="merge its adapter"):
        adapted.generate(input_ids=IDS, regime="soft", max_new_tokens=2, gate_table=True)
    merged = adapted.merge_and_unload()
    text = greedy(merged, "soft", gate_table=True)
    assert torch.allclose(merged(IDS, passes=2).logits, expected, atol=1e-5)
    assert torch.equal(greedy(merged, "soft", gate_table=False), text)


def test_the_table_is_no_part_of_the_model(tmp_path):
    model = new_model()
    names = set(model.state_dict())
    model.build_gate_table()
    assert set(model.state_dict()) == names and "gate_table" not in model.config.to_dict()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert again.model.gate_table is None and torch.equal(greedy(again, "soft"), greedy(model, "soft"))


@torch.no_grad()
def test_number_formats():
    model = new_model().bfloat16()
    text = greedy(model, "soft", gate_table=True)
    assert model.model.gate_table.values.dtype == torch.bfloat16
    assert text.shape == greedy(model.float(), "soft").shape
    assert model.model.gate_table.values.dtype == torch.float32
