"""Continuations: stop strings, sampling, independence of the batch."""

import functools

import pytest
import torch
from transformers import AutoTokenizer

from megatron_fbt.errors import BadNumbersError
from megatron_fbt.evaluation.decoding import Decoding, continue_prompts, tokens_until
from megatron_fbt.inference.sampling import SeededSampling
from tests.unit.evaluation.models import CharacterTokenizer, ids_of, text_config, text_of, text_reference, text_weights
from tests.unit.hf.exports import make_model

PROMPTS = [ids_of(text).tolist() for text in ("one plus one", "b", "def f(x):\n", "What is this?")]


@pytest.fixture(scope="module")
def model():
    return make_model(text_weights(text_config()), text_config())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    CharacterTokenizer().save_for_huggingface(folder)
    return AutoTokenizer.from_pretrained(folder)


def run(model, tokenizer, prompts, decoding, regime="soft", seeds=None):
    return continue_prompts(model, tokenizer, prompts, seeds or range(len(prompts)), decoding, regime)


@pytest.mark.parametrize("regime", ["standard", "soft"])
def test_greedy_is_the_regimes_own_continuation(model, tokenizer, regime):
    found = run(model, tokenizer, PROMPTS, Decoding(max_new_tokens=6), regime)
    for prompt, one in zip(PROMPTS, found):
        expected = text_reference().greedy(torch.tensor(prompt), regime, 6)
        alone = model.generate(torch.tensor([prompt]), regime=regime, max_new_tokens=6, temperature=0)
        assert one.text == text_of(expected) == text_of(alone[0, len(prompt) :])


def test_text_ends_before_the_first_stop_string(model, tokenizer):
    whole = [one.text for one in run(model, tokenizer, PROMPTS, Decoding(max_new_tokens=24))]
    until = (whole[0][9:11], whole[1][4:5], whole[2][20:24])
    found = run(model, tokenizer, PROMPTS, Decoding(until, max_new_tokens=24))
    for text, one in zip(whole, found):
        places = [(text.find(stop), stop) for stop in until if stop in text]
        if places:
            place, stop = min(places)
            assert (one.text, one.finish, len(one.ids)) == (text[:place], "stop", place + len(stop))
        else:
            assert (one.text, one.finish, len(one.ids)) == (text, "length", 24)
    assert [one.finish for one in found[:3]] == ["stop"] * 3


def test_a_stopped_row_does_not_go_on_alone(model, tokenizer, monkeypatch):
    """Decoding ends when the last row has ended."""
    whole = run(model, tokenizer, PROMPTS[:1], Decoding(max_new_tokens=24))[0].text
    steps = []
    call = type(model).forward

    @functools.wraps(call)
    def counted(*arguments, **options):
        steps.append(1)
        return call(*arguments, **options)

    monkeypatch.setattr(type(model), "forward", counted)
    run(model, tokenizer, PROMPTS[:1], Decoding((whole[5:7],), max_new_tokens=24))
    assert len(steps) == whole.index(whole[5:7]) + 2  # the prompt gives the first token


def test_end_of_text_ends_a_row(model, tokenizer):
    favoured = make_model(text_weights(text_config()), text_config())
    favoured.lm_head.weight = torch.nn.Parameter(favoured.lm_head.weight.clone())
    favoured.lm_head.weight.data[CharacterTokenizer.eod] = 0
    favoured.lm_head.weight.data[:-1] *= 0.05
    settings = Decoding(max_new_tokens=40, temperature=1.0)
    found = run(favoured, tokenizer, PROMPTS * 8, settings)
    ended = [one for one in found if one.finish == "eos"]
    assert ended
    for one in ended:
        assert one.ids.index(CharacterTokenizer.eod) == len(one.ids) - 1 and one.text == text_of(one.ids)


def test_sampled_rows_do_not_depend_on_the_batch(model, tokenizer):
    settings = Decoding(max_new_tokens=12, temperature=1.5, top_p=0.9, top_k=40)
    together = [one.text for one in run(model, tokenizer, PROMPTS, settings, seeds=[5, 6, 7, 8])]
    alone = [run(model, tokenizer, [one], settings, seeds=[seed])[0].text for one, seed in zip(PROMPTS, (5, 6, 7, 8))]
    assert together == alone
    assert together != [one.text for one in run(model, tokenizer, PROMPTS, settings, seeds=[1, 2, 3, 4])]


def test_sampling_has_the_right_frequencies():
    """4000 draws: four standard deviations of a share are below 0.032."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])

    def shares(top_k=0, top_p=1.0):
        rows = SeededSampling(2.0, top_k, top_p, range(4000), 0)(torch.empty(4000, 0), logits.expand(4000, 4))
        return torch.bincount(rows.argmax(-1), minlength=4) / 4000

    expected = (logits / 2).softmax(-1)
    assert torch.allclose(shares(), expected, atol=0.032)
    assert torch.allclose(shares(top_k=2), torch.cat([(logits[:2] / 2).softmax(-1), torch.zeros(2)]), atol=0.032)
    # 0.455 + 0.276 reach 0.7, so the third one is out
    assert torch.allclose(shares(top_p=0.7), torch.cat([(logits[:2] / 2).softmax(-1), torch.zeros(2)]), atol=0.032)


def test_tokens_until_a_place_of_the_text(tokenizer):
    ids = ids_of("hello world").tolist()
    assert [tokens_until(tokenizer, ids_of("x").tolist(), ids, end) for end in (0, 1, 5, 11)] == [0, 1, 5, 11]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(tokenizer, temperature):
    broken = make_model(text_weights(text_config()), text_config())
    broken.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(BadNumbersError, match="not finite"):
        run(broken, tokenizer, PROMPTS, Decoding(max_new_tokens=3, temperature=temperature))
