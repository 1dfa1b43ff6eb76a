"""Many prompts: batches of any size and order, seeds, streamed text."""

import io

import pytest
import torch

from megatron_fbt.errors import ConfigError
from megatron_fbt.hf.modeling_fbt import FBTForCausalLM
from megatron_fbt.inference.batches import TextPrinter, continue_prompts
from megatron_fbt.inference.prompts import Prompt
from megatron_fbt.inference.sampling import SeededSampling, choose_tokens, row_seed
from megatron_fbt.inference.text import GenerationOptions, load_model
from tests.unit.hf.exports import export
from tests.unit.hf.reference import random_weights, tiny_config

TEXTS = ["0123456789", "A", "BCD", "0123456789", "Z0", "9876543"]
SAMPLED = {"max_new_tokens": 9, "temperature": 2.5}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    config = tiny_config()
    return load_model(export(tmp_path_factory.mktemp("e") / "m", random_weights(config), config), "cpu")


def prompts(loaded, texts):
    return [Prompt(text, loaded[1](text, add_special_tokens=False).input_ids) for text in texts]


def texts_of(loaded, texts, batch_size, **options):
    batches = continue_prompts(*loaded, prompts(loaded, texts), GenerationOptions(**options), batch_size)
    return [(result["prompt"], result["token_ids"]) for batch in batches for result in batch]


@pytest.mark.parametrize("regime", ["standard", "soft", "fused", "recurrent"])
def test_batch_size_and_order_do_not_matter(loaded, regime):
    options = {"regime": regime, "seed": 3, **SAMPLED}
    one = texts_of(loaded, TEXTS, 1, **options)
    assert [prompt for prompt, _ in one] == TEXTS
    for size in (2, 4, 50):
        assert texts_of(loaded, TEXTS, size, **options) == one
    backwards = texts_of(loaded, TEXTS[::-1], 4, **options)
    assert sorted(backwards) == sorted(one)
    assert one[0][1] != one[3][1], "equal prompts have texts of their own"
    assert one[1] == texts_of(loaded, ["A"], 3, **options)[0]
    assert texts_of(loaded, TEXTS, 3, **{**options, "seed": 4}) != one


def test_sampling_follows_the_distribution():
    logits = torch.tensor([[1.0, -2.0, 0.5, 3.0, 0.0, float("-inf")]])
    expected = (logits[0] / 2).softmax(-1)
    sampling = SeededSampling(2.0, 0, 1.0, list(range(4000)), 5)
    scores = sampling(torch.zeros(4000, 5, dtype=torch.long), logits.expand(4000, -1))
    drawn = scores.argmax(-1)
    assert (scores > float("-inf")).sum() == 4000
    assert (torch.bincount(drawn, minlength=6) / 4000 - expected).abs().sum() < 0.06
    later = sampling(torch.zeros(4000, 6, dtype=torch.long), logits.expand(4000, -1)).argmax(-1)
    assert not torch.equal(later, drawn)
    for settings, allowed in (((2.0, 2, 1.0), {0, 3}), ((1.0, 0, 0.6), {3}), ((1e-8, 0, 1.0), {3}), ((0, 0, 1.0), {3})):
        found = choose_tokens(logits.expand(500, -1), *settings, list(range(500)), 0)
        assert set(found.tolist()) == allowed
    assert set(choose_tokens(logits.expand(500, -1), 5.0, 10**9, 1.0, list(range(500)), 0).tolist()) == set(range(5))


def test_seeds_are_of_content_and_occurrence():
    seeds = {row_seed(seed, ids, number) for seed in (0, 1) for ids in ([1, 2], [12], [1, 2, 3]) for number in (0, 1)}
    assert len(seeds) == 12 and all(0 <= seed < 2**56 for seed in seeds)


def test_a_temperature_of_next_to_nothing_is_greedy(loaded):
    greedy = texts_of(loaded, TEXTS, 2, max_new_tokens=6)
    for temperature in (1e-8, 1e-40, 5e-324):
        assert texts_of(loaded, TEXTS, 2, max_new_tokens=6, temperature=temperature) == greedy


def test_high_temperatures_never_leave_the_vocabulary(loaded):
    model, _ = loaded
    for _, ids in texts_of(loaded, TEXTS, 6, max_new_tokens=40, temperature=5.0, top_k=0):
        assert all(0 <= token < model.config.vocab_size for token in ids)


def test_batches_come_when_they_are_done(loaded, monkeypatch):
    calls, generate = [], FBTForCausalLM.generate
    monkeypatch.setattr(FBTForCausalLM, "generate", lambda *a, **k: calls.append(1) or generate(*a, **k))
    batches = continue_prompts(*loaded, prompts(loaded, TEXTS), GenerationOptions(max_new_tokens=2), 4)
    assert calls == [] and [result["number"] for result in next(batches)] == [1, 2, 3, 4] and len(calls) == 1
    assert [result["number"] for result in next(batches)] == [5, 6] and len(calls) == 2


@pytest.mark.parametrize("options", [{}, {"temperature": 3.0, "seed": 8}])
def test_streamed_text_is_the_continuation(loaded, options):
    settings, pieces = GenerationOptions(max_new_tokens=9, **options), []

    class Out(io.StringIO):
        def write(self, text):
            pieces.append(text)

    (result,) = next(continue_prompts(*loaded, prompts(loaded, ["0123"]), settings, 1, stream=Out()))
    assert "".join(pieces) == result["continuation"] and len([piece for piece in pieces if piece]) > 3
    with pytest.raises(ConfigError, match="batch_size=2"):
        next(continue_prompts(*loaded, prompts(loaded, ["0", "1"]), settings, 2, stream=Out()))


def test_half_a_character_is_held_back():
    class Bytes:
        def decode(self, ids, skip_special_tokens):
            return bytes(ids).decode("utf-8", errors="replace")

    out = io.StringIO()
    printer, seen = TextPrinter(Bytes(), list(b"a"), out), []
    printer.put(torch.tensor([list(b"a")]))
    for byte in "é€!".encode():
        printer.put(torch.tensor([byte]))
        seen.append(out.getvalue())
    printer.end()
    assert seen == ["", "é", "é", "é", "é€", "é€!"] and out.getvalue() == "é€!"


def test_the_gate_table_changes_nothing(loaded):
    model, _ = loaded
    expected = texts_of(loaded, TEXTS, 3, seed=1, **SAMPLED)
    assert model.model.gate_table is None
    assert texts_of(loaded, TEXTS, 3, seed=1, gate_table=True, **SAMPLED) == expected
    assert model.model.gate_table is not None
    model.model.gate_table = None


def test_several_end_tokens(loaded):
    model, _ = loaded
    ids = texts_of(loaded, ["BCD"], 1, max_new_tokens=8)[0][1]
    model.generation_config.eos_token_id = [49, ids[2]]
    try:
        cut = texts_of(loaded, ["BCD", "A"], 2, max_new_tokens=8)[0][1]
        result = next(continue_prompts(*loaded, prompts(loaded, ["BCD"]), GenerationOptions(max_new_tokens=8)))[0]
    finally:
        model.generation_config.eos_token_id = 49
    assert cut == ids[: ids.index(ids[2]) + 1] == result["token_ids"] and result["finish"] == "eos"
