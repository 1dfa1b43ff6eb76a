"""The model type `fbt` of lm-eval."""

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

import megatron_fbt.evaluation.lm  # noqa: F401  registers the model type
from megatron_fbt.errors import CheckpointError, ConfigError
from tests.unit.evaluation.models import LETTERS, export_text_model, ids_of, text_of, text_reference

PAIRS = [
    ("one plus one is", " two"),
    ("one plus one is", " a number of some length"),
    ("", "start"),
    ("trailing blank ", "x"),
    ("A", "B"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return export_text_model(tmp_path_factory.mktemp("exports") / "text")


def make(folder, **arguments):
    return get_model("fbt").create_from_arg_obj({"pretrained": str(folder), **arguments}, {"device": "cpu"})


def requests(kind, *arguments):
    return [Instance(kind, {}, one, 0, ("task", number, 1)) for number, one in enumerate(arguments)]


def log_likelihood(regime, prompt, continuation):
    """Sum of log-probabilities of the recurrence, one token after the other."""
    ids = torch.cat([prompt, continuation])
    logits = text_reference().logits(text_reference().regime(ids, regime, len(prompt)))
    return sum((logits[t - 1].log_softmax(-1)[ids[t]]).item() for t in range(len(prompt), len(ids)))


END = torch.tensor([len(LETTERS)])


@pytest.mark.parametrize("regime", ["standard", "soft", "fused", "recurrent"])
def test_loglikelihood(folder, regime):
    lm = make(folder, regime=regime, passes="exact", batch_size=2)
    found = lm.loglikelihood(requests("loglikelihood", *PAIRS))
    expected = [log_likelihood(regime, ids_of(a) if a else END, ids_of(b)) for a, b in PAIRS]
    # the blank at the end of a prompt belongs to what follows, as a tokenizer would have it
    expected[3] = log_likelihood(regime, ids_of("trailing blank"), ids_of(" x"))
    assert [value for value, _ in found] == pytest.approx(expected, abs=5e-4)
    assert lm.errors == [] and lm.cut == 0


@pytest.mark.parametrize("regime", ["soft", "recurrent"])
def test_error_of_the_passes_is_measured(folder, regime):
    parallel, exact = make(folder, regime=regime, passes=2), make(folder, regime=regime, passes="exact")
    asked = requests("loglikelihood", *PAIRS)
    found, right = parallel.loglikelihood(asked), exact.loglikelihood(asked)
    differences = sorted(abs(one[0] - other[0]) for one, other in zip(found, right))
    assert sorted(parallel.errors) == pytest.approx(differences, abs=1e-4) and max(differences) > 1e-3
    some = make(folder, regime=regime, passes=2, error_sample=2)
    some.loglikelihood(asked)
    assert len(some.errors) == 2
    assert all(min(abs(error - other) for other in differences) < 1e-4 for error in some.errors)
    none = make(folder, regime=regime, passes=2, error_sample=0)
    none.loglikelihood(asked)
    assert none.errors == []


def test_standard_regime_has_no_error(folder):
    lm = make(folder, regime="standard")
    lm.loglikelihood(requests("loglikelihood", *PAIRS))
    assert lm.errors == []


@pytest.mark.parametrize("regime", ["standard", "soft"])
def test_rolling_windows(folder, regime):
    text = "The quick brown fox jumps over it"
    lm = make(folder, regime=regime, passes="exact", max_length=12)
    found = lm.loglikelihood_rolling(requests("loglikelihood_rolling", (text,), ("Hi",)))
    ids = torch.cat([END, ids_of(text)])
    expected = 0.0
    for first, last in ((1, 13), (13, 25), (25, len(ids))):
        start = max(0, last - 13)  # windows of 12 tokens read, the last one reaching back
        logits = text_reference().logits(text_reference().regime(ids[start:last], regime, 1))
        expected += sum(logits[t - start - 1].log_softmax(-1)[ids[t]].item() for t in range(first, last))
    assert found == pytest.approx([expected, log_likelihood(regime, END, ids_of("Hi"))], abs=1e-3)


def test_results_do_not_depend_on_the_batch_size(folder):
    settings = {"until": ["zz"], "max_gen_toks": 8, "do_sample": True, "temperature": 1.3}
    asked = requests("generate_until", *[(prompt or "x", settings) for prompt, _ in PAIRS])
    pairs = requests("loglikelihood", *PAIRS)
    results = []
    for size in (1, 3, 8):
        lm = make(folder, batch_size=size, passes=3)
        results.append((lm.generate_until(asked), lm.loglikelihood(pairs)))
    for texts, scores in results[1:]:
        assert texts == results[0][0]
        assert [one[0] for one in scores] == pytest.approx([one[0] for one in results[0][1]], abs=2e-4)


@pytest.mark.parametrize("regime", ["standard", "soft", "fused", "recurrent"])
def test_generate_until(folder, regime):
    reference, lm = text_reference(), make(folder, regime=regime)
    whole = text_of(reference.greedy(ids_of("one plus"), regime, 8))
    settings = {"until": [whole[4:6]], "max_gen_toks": 8}
    found = lm.generate_until(requests("generate_until", ("one plus", settings), ("A", {"max_gen_toks": 5})))
    assert found == [whole[: whole.index(whole[4:6])], text_of(reference.greedy(ids_of("A"), regime, 5))]
    assert [(one.task, one.document, one.repeat) for one in lm.traces] == [("task", 0, 0), ("task", 1, 0)]


def test_repeated_samples_differ_and_are_repeatable(folder):
    settings = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0}
    asked = requests("generate_until", ("one", settings)) * 3
    texts = make(folder).generate_until(asked)
    assert len(set(texts)) == 3 and texts == make(folder).generate_until(asked)
    assert texts != make(folder, seed=1).generate_until(asked)


def test_long_prompts_are_cut_on_the_left(folder):
    lm = make(folder, regime="soft", max_length=10, passes="exact")
    (found,) = lm.loglikelihood(requests("loglikelihood", ("0123456789", "abc")))
    assert found[0] == pytest.approx(log_likelihood("soft", ids_of("23456789"), ids_of("abc")), abs=5e-4)
    (text,) = lm.generate_until(requests("generate_until", ("0123456789", {"max_gen_toks": 4})))
    assert text == text_of(text_reference().greedy(ids_of("456789"), "soft", 4))
    assert lm.cut == 2
    with pytest.raises(ConfigError, match="max_length=10: a continuation of 11 tokens"):
        lm.loglikelihood(requests("loglikelihood", ("0", "abcdefghijk")))
    with pytest.raises(ConfigError, match="max_gen_toks=10"):
        lm.generate_until(requests("generate_until", ("0", {"max_gen_toks": 10})))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 4}, "num_beams is not known"),
        ({"max_gen_toks": "abc"}, "generation_kwargs .*'abc'.*correct the task file"),
        ({"max_gen_toks": 0}, "max_gen_toks=0: must be at least 1"),
        ({"do_sample": True, "temperature": -1}, "temperature=-1.0: must be a finite number"),
        ({"do_sample": True, "top_p": 0}, "top_p=0.0: must be larger than 0"),
    ],
)
def test_generation_settings_without_a_meaning_are_refused(folder, settings, message):
    with pytest.raises(ConfigError, match=message):
        make(folder).generate_until(requests("generate_until", ("0", settings)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("regime", "hard"),
        ("passes", 0),
        ("passes", "many"),
        ("fused_passes", 0),
        ("error_sample", -1),
        ("batch_size", "auto"),
        ("dtype", "int8"),
        ("max_length", 1),
        ("colour", "red"),
    ],
)
def test_wrong_arguments(folder, name, value, monkeypatch):
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=name):
        make(folder, **{name: value})


def test_no_tokenizer(tmp_path):
    folder = export_text_model(tmp_path / "model")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        make(folder)


def test_chat_template(folder):
    lm = make(folder)
    lm.tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if not loop.last %};{% endif %}{% endfor %}"
        "{% if add_generation_prompt %};<assistant>{% endif %}"
    )
    user = {"role": "user", "content": "Hello"}
    assert lm.apply_chat_template([user]) == "<user>Hello;<assistant>"
    begun = [user, {"role": "assistant", "content": "Well"}]
    assert lm.apply_chat_template(begun, add_generation_prompt=False) == "<user>Hello;<assistant>Well"
