"""What transformers offers around a model: attention functions, streamers, ways of decoding, checkpointing, formats."""

import io
import itertools
import threading

import pytest
import torch
from transformers import (
    AutoTokenizer,
    DynamicCache,
    StaticCache,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megatron_fbt.hf.layers_fbt import eager_attention
from megatron_fbt.hf.modeling_fbt import FBTForCausalLM
from tests.unit.hf.exports import export, make_model
from tests.unit.hf.reference import random_weights, tiny_config

REGIMES = ("standard", "soft", "fused", "recurrent")
IDS = torch.randint(1, 49, (2, 9), generator=torch.Generator().manual_seed(5))
MASK = torch.ones_like(IDS)
MASK[1, :4] = 0
TOLERANCE = 1e-5
WINDOWED = {"num_layers": 3, "sliding_window": 4, "window_attn_skip_freq": 2, "num_query_groups": 2}


def new_model(vocab_size=50, **fields):
    config = tiny_config(**fields)
    model = make_model(random_weights(config, vocab_size=vocab_size, seed=3), config)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


@pytest.fixture(scope="module")
def model():
    return new_model(num_query_groups=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = tiny_config(num_query_groups=2)
    return export(tmp_path_factory.mktemp("export") / "model", random_weights(config), config)


def largest_difference(left, right):
    return (left.double() - right.double()).abs().max().item()


def with_2d_masks(module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, **kwargs):
    """What a kernel with causality built in computes, from the same arguments."""
    length, width = query.shape[2], key.shape[2]
    distance = torch.arange(width - length, width)[:, None] - torch.arange(width)[None]
    mask = (distance >= 0)[None, None]
    if sliding_window is not None:
        mask = mask & (distance < sliding_window)
    if attention_mask is not None:
        assert attention_mask.shape == (query.shape[0], width)
        mask = mask & attention_mask.bool()[:, None, None, :]
    out, _ = eager_attention(module, query, key, value, mask, dropout, scaling)
    padding = ~mask.any(-1).expand(*out.shape[:1], 1, length).transpose(1, 2)[..., None]
    return out.masked_fill(padding, 0.0), None


@torch.no_grad()
@pytest.mark.parametrize("fields", [{}, WINDOWED])
@pytest.mark.parametrize("implementation", ["eager", "causal_kernel"])
def test_attention_functions_agree(monkeypatch, fields, implementation):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "causal_kernel", with_2d_masks)
    model = new_model(**fields)
    assert model.config._attn_implementation == "sdpa"
    calls = [{"passes": 3}, *({"regime": regime, "fused_passes": 2, "prompt_length": 6} for regime in REGIMES)]
    expected = [model(IDS, attention_mask=MASK, **call).logits for call in calls]
    text = model.generate(IDS, attention_mask=MASK, regime="fused", max_new_tokens=6, do_sample=False)
    model.config._attn_implementation = implementation
    for call, logits in zip(calls, expected, strict=True):
        found = model(IDS, attention_mask=MASK, **call).logits
        assert largest_difference(found[0], logits[0]) < TOLERANCE
        assert largest_difference(found[1, 4:], logits[1, 4:]) < TOLERANCE
    found = model.generate(IDS, attention_mask=MASK, regime="fused", max_new_tokens=6, do_sample=False)
    assert torch.equal(found, text)


@torch.no_grad()
def test_kernels_that_cannot_keep_documents_apart_say_so(monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "causal_kernel", with_2d_masks)
    config = tiny_config()
    config.data.reset_attention_mask = True
    model = make_model(random_weights(config), config)
    starts = torch.zeros_like(IDS, dtype=torch.bool)
    starts[:, 4] = True
    expected = model(IDS, passes=2, document_starts=starts).logits
    model.config._attn_implementation = "eager"
    assert largest_difference(model(IDS, passes=2, document_starts=starts).logits, expected) < TOLERANCE
    model.config._attn_implementation = "causal_kernel"
    with pytest.raises(ValueError, match="document_starts: attn_implementation='causal_kernel'"):
        model(IDS, passes=2, document_starts=starts)


@torch.no_grad()
def test_attention_is_chosen_as_in_any_model(folder):
    eager = FBTForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    assert eager.config._attn_implementation == "eager"
    sdpa = FBTForCausalLM.from_pretrained(folder).eval()
    logits = eager(IDS, passes=2).logits
    assert largest_difference(logits, sdpa(IDS, passes=2).logits) < TOLERANCE
    sdpa.set_attn_implementation("eager")
    assert torch.equal(sdpa(IDS, passes=2).logits, logits)
    with pytest.raises((ImportError, ValueError), match="(?i)flash.?att"):  # the library's own words: not installed
        FBTForCausalLM.from_pretrained(folder, attn_implementation="flash_attention_2")
    with pytest.raises(ValueError, match="(?i)flex"):
        FBTForCausalLM.from_pretrained(folder, attn_implementation="flex_attention")


def test_streamers(folder):
    model, tokenizer = FBTForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("0123", return_tensors="pt", add_special_tokens=False).input_ids
    options = {"regime": "soft", "max_new_tokens": 9, "do_sample": False}
    options["attention_mask"] = torch.ones_like(prompt)
    new = model.generate(prompt, **options)[0, 4:]
    expected = tokenizer.decode(new, skip_special_tokens=True)
    out = io.StringIO()

    class Printer(TextStreamer):
        def on_finalized_text(self, text, stream_end=False):
            out.write(text)

    model.generate(prompt, streamer=Printer(tokenizer, skip_prompt=True, skip_special_tokens=True), **options)
    assert out.getvalue() == expected and len(expected) > 3
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60)
    thread = threading.Thread(target=model.generate, args=(prompt,), kwargs={"streamer": streamer, **options})
    thread.start()
    assert "".join(streamer) == expected
    thread.join()


@torch.no_grad()
@pytest.mark.parametrize("regime", REGIMES)
def test_beam_search_finds_the_likeliest_text(regime):
    """With as many beams as tokens, two tokens are searched exhaustively."""
    model = new_model(vocab_size=11)
    prompt = IDS[:, :5] % 11
    found = model.generate(
        prompt,
        regime=regime,
        attention_mask=torch.ones_like(prompt),
        num_beams=11,
        num_return_sequences=2,
        max_new_tokens=2,
        do_sample=False,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    ends = torch.tensor(list(itertools.product(range(11), repeat=2)))
    for row, start in enumerate(prompt):
        whole = torch.cat([start.expand(len(ends), -1), ends], dim=1)
        logits = model(whole, regime=regime, prompt_length=5).logits.log_softmax(-1)
        total = logits[:, 4].gather(1, ends[:, :1])[:, 0] + logits[:, 5].gather(1, ends[:, 1:])[:, 0]
        best = total.topk(2)
        assert torch.equal(found.sequences[2 * row : 2 * row + 2, 5:], ends[best.indices])
        assert largest_difference(found.sequences_scores[2 * row : 2 * row + 2], best.values) < 1e-4


WAYS = {
    "several sequences": {"do_sample": True, "num_return_sequences": 3, "temperature": 2.0},
    "beams, sampled": {"do_sample": True, "num_beams": 3, "num_return_sequences": 2, "temperature": 2.0},
    "beams": {"do_sample": False, "num_beams": 4, "num_return_sequences": 3, "early_stopping": True},
    "penalties": {"do_sample": False, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "min_new_tokens": 5},
    "typical": {"do_sample": True, "typical_p": 0.9, "min_p": 0.01},
}


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("regime", REGIMES)
def test_every_way_of_decoding_sees_the_regimes_logits(model, regime, way):
    torch.manual_seed(1)
    options = {"regime": regime, "attention_mask": MASK, "max_new_tokens": 7, **WAYS[way]}
    found = model.generate(IDS, return_dict_in_generate=True, output_logits=True, output_scores=True, **options)
    count = WAYS[way].get("num_return_sequences", 1)
    assert found.sequences.shape == (2 * count, 16)
    mask = torch.cat([MASK.repeat_interleave(count, 0), torch.ones(2 * count, 7, dtype=torch.long)], dim=1)
    expected = model(found.sequences, attention_mask=mask, regime=regime, prompt_length=9).logits
    if "num_beams" in WAYS[way]:
        beams = found.beam_indices[:, :7]
        logits = torch.stack([step[beams[:, t]] for t, step in enumerate(found.logits)], dim=1)
    else:
        logits = torch.stack(found.logits, dim=1)
    assert largest_difference(logits, expected[:, 8:-1]) < TOLERANCE
    assert len({tuple(row.tolist()) for row in found.sequences}) > count or count == 1


REFUSED = {
    "assistant_model": object(),
    "assistant_early_exit": 1,
    "prompt_lookup_num_tokens": 2,
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "guidance_scale": 1.5,
    "token_healing": True,
    "num_beam_groups": 2,
    "force_words_ids": [[3]],
    "constraints": [object()],
    "prefill_chunk_size": 4,
    "inputs_embeds": torch.zeros(1, 3, 48),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_carried_state_excludes_is_refused_by_name(model, name):
    with pytest.raises(ValueError, match=f"{name}=.* is not supported.*leave it out"):
        model.generate(IDS, max_new_tokens=2, **{name: REFUSED[name]})


@pytest.mark.parametrize(
    "kind", ["static", "offloaded", "offloaded_static", "quantized", "hybrid", "sliding_window", "dynamic_full"]
)
def test_caches_of_other_kinds_are_refused(model, kind):
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(IDS, max_new_tokens=2, cache_implementation=kind)


def test_caches_without_a_carried_state_are_refused(model):
    for cache in (DynamicCache(), StaticCache(config=model.config, max_cache_len=32)):
        with pytest.raises(ValueError, match=f"{type(cache).__name__}: must be an FBTCache"):
            model.generate(IDS, max_new_tokens=2, past_key_values=cache)
    with pytest.raises(ValueError, match="continuous batching"):
        model.generate_batch([[1, 2]])
    with pytest.raises(ValueError, match="continuous batching"):
        model.init_continuous_batching()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("passes", [1, 3])
def test_gradient_checkpointing_changes_nothing(reentrant, passes):
    found = []
    for checkpointing in (False, True):
        model = new_model(num_query_groups=2).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            assert model.is_gradient_checkpointing
        calls = [0]
        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.__setitem__(0, calls[0] + 1))
        loss = model(IDS, attention_mask=MASK, labels=IDS, passes=passes).loss
        loss.backward()
        assert calls[0] == 2 * passes * (1 + checkpointing), "layers are computed again"
        found.append((loss.detach(), {name: weight.grad for name, weight in model.named_parameters()}))
    (plain, gradients), (other, others) = found
    assert torch.equal(plain, other)
    for name, gradient in gradients.items():
        assert (gradient is None) == (others[name] is None) == (passes == 1 and "fusion" in name)
        assert gradient is None or torch.allclose(gradient, others[name], atol=1e-7)
    with pytest.raises(ValueError, match="use_cache: gradient checkpointing"):
        model(IDS, passes=passes, use_cache=True)
    text = model.generate(IDS, regime="soft", max_new_tokens=3, do_sample=False)
    assert torch.equal(
        text, new_model(num_query_groups=2).generate(IDS, regime="soft", max_new_tokens=3, do_sample=False)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_number_formats(folder, dtype):
    model = FBTForCausalLM.from_pretrained(folder, torch_dtype=dtype).eval()
    assert {weight.dtype for weight in model.parameters()} == {dtype}
    whole = FBTForCausalLM.from_pretrained(folder).eval()
    for regime in REGIMES:
        with torch.no_grad():
            logits = model(IDS, regime=regime).logits
            assert logits.dtype == dtype
            expected = whole(IDS, regime=regime).logits
        assert largest_difference(logits, expected) < {torch.bfloat16: 0.5, torch.float16: 0.06}.get(dtype, 1e-6)
        assert model.generate(IDS, regime=regime, max_new_tokens=3).shape[1] <= 12
