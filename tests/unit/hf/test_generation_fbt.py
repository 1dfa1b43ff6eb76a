"""The four regimes, the cache and sampling."""

import pytest
import torch

from tests.unit.hf.exports import make_model
from tests.unit.hf.reference import Reference, random_weights, tiny_config

REGIMES = ("standard", "soft", "fused", "recurrent")
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def built():
    config = tiny_config(num_query_groups=2)
    weights = random_weights(config, seed=3)
    model = make_model(weights, config)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model, Reference(weights, config)


@pytest.fixture(scope="module")
def prompt():
    return torch.randint(0, 50, (1, 9), generator=torch.Generator().manual_seed(5))


def largest_difference(left, right):
    return (left.double() - right.double()).abs().max().item()


def greedy(model, ids, regime, new_tokens=7, **options):
    return model.generate(ids, regime=regime, max_new_tokens=new_tokens, do_sample=False, **options)[:, ids.shape[1] :]


@pytest.mark.parametrize("regime", REGIMES)
def test_greedy_text_equals_the_definition_with_and_without_cache(built, prompt, regime):
    model, reference = built
    expected = reference.greedy(prompt[0], regime, 7, fused_passes=2)
    assert greedy(model, prompt, regime, fused_passes=2)[0].tolist() == expected
    assert greedy(model, prompt, regime, fused_passes=2, use_cache=False)[0].tolist() == expected
    assert greedy(model, prompt, regime, fused_passes=2)[0].tolist() == expected  # nothing is left from before


def test_regimes_differ(built, prompt):
    model, _ = built
    texts = {tuple(greedy(model, prompt, regime, 12)[0].tolist()) for regime in REGIMES}
    assert len(texts) == 4


@torch.no_grad()
@pytest.mark.parametrize("regime", REGIMES)
def test_decoding_token_by_token_equals_the_definition(built, prompt, regime):
    model, reference = built
    ids = torch.cat([prompt, torch.arange(20, 26)[None]], dim=1)
    expected = reference.logits(reference.regime(ids[0], regime, 9, fused_passes=2))
    output = model(prompt, regime=regime, fused_passes=2, use_cache=True)
    logits = [output.logits]
    for t in range(9, 15):
        output = model(ids[:, t : t + 1], past_key_values=output.past_key_values)  # the regime goes on by itself
        logits.append(output.logits)
    assert largest_difference(torch.cat(logits, dim=1)[0], expected) < TOLERANCE
    whole = model(ids, regime=regime, fused_passes=2, prompt_length=9)
    assert largest_difference(whole.logits[0], expected) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("regime", ["standard", "recurrent"])
def test_prefill_and_one_step_equal_a_longer_prefill(built, prompt, regime):
    model, _ = built
    cache = model(prompt[:, :-1], regime=regime, use_cache=True).past_key_values
    step = model(prompt[:, -1:], regime=regime, past_key_values=cache).logits[:, -1]
    assert largest_difference(step, model(prompt, regime=regime).logits[:, -1]) < TOLERANCE


@torch.no_grad()
def test_several_new_tokens_after_a_cache_in_one_call(built, prompt):
    model, _ = built
    for regime in REGIMES:
        ones, many = (model(prompt[:, :5], regime=regime, use_cache=True).past_key_values for _ in range(2))
        single = [model(prompt[:, t : t + 1], past_key_values=ones).logits for t in range(5, 9)]
        together = model(prompt[:, 5:], past_key_values=many).logits
        assert largest_difference(torch.cat(single, dim=1), together) < TOLERANCE


def test_fused_with_one_token_equals_soft(built):
    model, _ = built
    one = torch.tensor([[17]])
    soft = greedy(model, one, "soft", 10)
    for fused_passes in (1, 3):
        assert torch.equal(greedy(model, one, "fused", 10, fused_passes=fused_passes), soft)
    assert torch.equal(greedy(model, one, "recurrent", 10), soft)


@torch.no_grad()
def test_standard_and_soft_share_the_prompt(built, prompt):
    model, _ = built
    assert torch.equal(model(prompt, regime="standard").logits, model(prompt, regime="soft").logits)
    assert torch.equal(greedy(model, prompt, "standard", 1), greedy(model, prompt, "soft", 1))


@torch.no_grad()
@pytest.mark.parametrize("regime", REGIMES)
def test_left_padded_batch_equals_one_by_one(built, regime):
    model, _ = built
    rows = [torch.arange(length) * 7 % 49 + 1 for length in (1, 3, 9)]
    for pad, extra in ((0, 0), (33, 4)):
        width = 9 + extra
        ids = torch.stack([torch.cat([torch.full((width - len(row),), pad), row]) for row in rows])
        mask = torch.stack([(torch.arange(width) >= width - len(row)).long() for row in rows])
        text = greedy(model, ids, regime, attention_mask=mask)
        assert torch.equal(text, greedy(model, ids, regime, attention_mask=mask, use_cache=False))
        logits = model(ids, attention_mask=mask, regime=regime).logits
        for index, row in enumerate(rows):
            assert torch.equal(text[index], greedy(model, row[None], regime)[0])
            alone = model(row[None], regime=regime).logits[0]
            assert largest_difference(logits[index, width - len(row) :], alone) < TOLERANCE


def test_batch_of_equal_lengths_equals_one_by_one(built):
    model, _ = built
    ids = torch.randint(0, 50, (3, 6), generator=torch.Generator().manual_seed(8))
    for regime in REGIMES:
        together = greedy(model, ids, regime)
        for index in range(3):
            assert torch.equal(together[index], greedy(model, ids[index : index + 1], regime)[0])


def test_padding_on_the_right_is_refused(built, prompt):
    model, _ = built
    mask = torch.ones_like(prompt)
    mask[:, -1] = 0
    with pytest.raises(ValueError, match="padded on the left"):
        greedy(model, prompt, "soft", attention_mask=mask)


@pytest.mark.parametrize("regime", REGIMES)
def test_beam_search_with_cache_equals_without(built, prompt, regime):
    model, _ = built
    options = {"regime": regime, "max_new_tokens": 6, "num_beams": 3, "num_return_sequences": 2, "do_sample": False}
    assert torch.equal(model.generate(prompt, **options), model.generate(prompt, use_cache=False, **options))


@pytest.mark.parametrize("regime", REGIMES)
def test_sampling_depends_on_the_seed_alone(built, prompt, regime):
    model, _ = built

    def sample(seed, **options):
        torch.manual_seed(seed)
        settings = {"do_sample": True, "temperature": 3.0, "top_k": 0, "max_new_tokens": 12, **options}
        return model.generate(prompt, regime=regime, **settings).tolist()

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert sample(1, top_k=1) == sample(2, top_k=1)
    assert sample(1, top_k=10**9) == sample(1)
    assert sample(1, temperature=0) == sample(2, do_sample=False)
    assert sample(1, temperature=1e-8) == sample(2, do_sample=False)


def test_sampling_follows_the_distribution(built, prompt):
    model, _ = built
    with torch.no_grad():
        expected = (model(prompt, regime="soft").logits[0, -1] / 2).softmax(-1)
    torch.manual_seed(0)
    many = prompt.expand(4000, -1)
    drawn = model.generate(many, regime="soft", do_sample=True, temperature=2.0, top_k=0, max_new_tokens=1)[:, -1]
    observed = torch.bincount(drawn, minlength=50) / 4000
    assert (observed - expected).abs().sum() < 0.15


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("fused_passes", 0),
        ("regime", "hard"),
        ("cache_implementation", "static"),
        ("prompt_lookup_num_tokens", 2),
    ],
)
def test_impossible_settings_are_refused(built, prompt, name, value):
    model, _ = built
    with pytest.raises(ValueError, match=name):
        model.generate(prompt, do_sample=True, max_new_tokens=2, **{name: value})


def test_unknown_setting_is_refused(built, prompt):
    model, _ = built
    with pytest.raises(ValueError, match="fused_pases"):
        model.generate(prompt, max_new_tokens=2, fused_pases=2)


def test_generation_goes_on_from_a_returned_cache(built, prompt):
    model, _ = built
    for regime in REGIMES:
        options = {"regime": regime, "do_sample": False, "return_dict_in_generate": True}
        first = model.generate(prompt, max_new_tokens=4, **options)
        second = model.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=4, **options)
        assert torch.equal(second.sequences, model.generate(prompt, max_new_tokens=8, **options).sequences)


def test_a_cropped_cache_does_not_go_on_fused(built, prompt):
    model, _ = built
    with torch.no_grad():
        cache = model(prompt, regime="soft", use_cache=True).past_key_values
        cache.crop(-5)
        with pytest.raises(ValueError, match="carried state"):
            model(prompt[:, 4:], past_key_values=cache)
