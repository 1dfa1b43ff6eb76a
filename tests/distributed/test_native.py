"""The Megatron model decodes and scores as its export does, in every layout."""

import pytest
import torch
from transformers import LogitsProcessorList

from megatron_fbt.inference.sampling import SeededSampling
from megatron_fbt.training.checkpoint import read_weights
from tests.distributed import export_case
from tests.distributed.launch import run_distributed
from tests.distributed.native_case import (
    EOS,
    FUSED_PASSES,
    NEW,
    PROMPT,
    REGIMES,
    ROW,
    SAMPLED,
    SEEDS,
    TEMPERATURE,
    VARIANTS,
    config_of,
    decode_what_training_saved,
    measure,
    measure_alone,
    pairs,
    prompts,
    weights_of,
    write_checkpoints,
)
from tests.unit.hf.exports import LetterTokenizer, make_model
from tests.unit.hf.reference import Reference

TOLERANCE = 1e-5
"""Of float32 logits and log-likelihoods, which are below 20."""
LAYOUTS = {(1, 1): list(VARIANTS), (2, 1): ["concat"], (1, 2): ["all"], (2, 2): ["gate"]}
"""{(tensor, pipeline): variants}."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    write_checkpoints(folder)
    return str(folder)


@pytest.fixture(scope="module")
def exported():
    """{variant: {regime: greedy text of each prompt by the exported model}}."""
    found = {}
    for variant in VARIANTS:
        model = make_model(weights_of(variant), config_of(variant))
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        found[variant] = {regime: greedy_texts(model, regime) for regime in REGIMES}
    return found


def greedy_texts(model, regime):
    """Of each prompt, up to the token that ends it."""
    rows = prompts()
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    options = {"regime": regime, "fused_passes": FUSED_PASSES, "max_new_tokens": NEW, "do_sample": False}
    new = model.generate(ids, attention_mask=mask, **options)[:, width:].tolist()
    return [text[: (text + [EOS]).index(EOS) + 1] for text in new]


@pytest.fixture(
    scope="module",
    params=[pytest.param(layout, marks=[pytest.mark.slow] if max(layout) > 1 else []) for layout in LAYOUTS],
    ids="tp{0[0]}pp{0[1]}".format,
)
def measured(request, folder):
    """What each rank of a layout found."""
    tensor, pipeline = request.param
    return run_distributed(measure, tensor * pipeline, folder, *request.param, LAYOUTS[request.param], timeout=300)


def largest_difference(left, right):
    return (torch.as_tensor(left).double() - torch.as_tensor(right).double()).abs().max().item()


def test_greedy_text_is_that_of_the_export_on_every_rank(measured, exported):
    for rank in measured:
        for variant, found in rank.items():
            for batch_size, texts in found["texts"].items():
                for regime in REGIMES:
                    assert texts[regime] == exported[variant][regime], (variant, batch_size, regime)
    assert len({str(texts) for texts in exported["gate"].values()}) == len(REGIMES)


def test_prefill_and_steps_equal_teacher_forcing(measured):
    for variant, found in measured[-1].items():
        reference = Reference(weights_of(variant), config_of(variant))
        for regime, logits in found["logits"].items():
            expected = reference.logits(reference.regime(ROW, regime, PROMPT, FUSED_PASSES))
            assert largest_difference(logits[:, 0], expected) < TOLERANCE, (variant, regime)


def test_scores_are_those_of_the_definition(measured):
    for rank in measured:
        for variant, found in rank.items():
            reference = Reference(weights_of(variant), config_of(variant))
            for regime in REGIMES:
                for (values, greedy), (context, continuation) in zip(found["scores"][regime], pairs(), strict=True):
                    ids = torch.tensor([*context, *continuation])
                    states = reference.regime(ids, regime, len(context), FUSED_PASSES)
                    logits = reference.logits(states)[len(context) - 1 : -1]
                    wanted = logits.log_softmax(-1)[torch.arange(len(continuation)), continuation]
                    assert largest_difference(values, wanted) < TOLERANCE, (variant, regime)
                    assert greedy == (logits.argmax(-1).tolist() == continuation)


def test_enough_parallel_passes_score_as_decoding_does(measured):
    for found in measured[0].values():
        for regime in REGIMES:
            for (by_passes, _), (decoded, _) in zip(found["by passes"][regime], found["scores"][regime], strict=True):
                assert largest_difference(by_passes, decoded) < TOLERANCE, regime
        few, decoded = found["three passes"], found["scores"]["fused"]
        gaps = [largest_difference(left, right) for (left, _), (right, _) in zip(few, decoded, strict=True)]
        settled = [len(continuation) <= 3 for _, continuation in pairs()]
        assert [gap < TOLERANCE for gap in gaps] == settled and not all(settled)


def test_sampled_text_is_that_of_the_export_and_has_no_padded_ids(measured):
    for variant, found in measured[0].items():
        assert all(rank[variant]["sampled"] == found["sampled"] for rank in measured)
        assert all(0 <= token <= EOS for text in found["sampled"] for token in text)
        model = make_model(weights_of(variant), config_of(variant))
        model.generation_config.eos_token_id = model.generation_config.pad_token_id = EOS
        for row, seed, text in zip(prompts(), SEEDS, found["sampled"], strict=False):
            drawing = LogitsProcessorList([SeededSampling(TEMPERATURE, 0, 1.0, [seed], len(row))])
            options = {"regime": "soft", "max_new_tokens": SAMPLED, "do_sample": False, "logits_processor": drawing}
            assert model.generate(torch.tensor([row]), **options)[0, len(row) :].tolist() == text


@pytest.fixture(scope="module")
def alone(folder):
    (found,) = run_distributed(measure_alone, 1, folder, timeout=300)
    return found


def test_sampling_depends_on_the_rows_seed_alone(alone):
    first, other_order, other_seeds = alone["sampled"]
    assert first == other_order
    assert all(left != right for left, right in zip(first, other_seeds, strict=True))
    assert alone["one of one"] == alone["cold"] == alone["greedy"]


def test_rows_of_a_padded_batch_have_the_logits_of_single_rows(alone):
    for together, single in alone["padded"].values():
        for row, logits in enumerate(single):
            assert largest_difference(together[-len(logits) :, row], logits[:, 0]) < TOLERANCE


def test_fused_with_one_token_equals_soft(alone):
    soft, fused, recurrent = alone["one token"]
    assert soft == fused == recurrent


def test_a_text_ends_with_the_token_that_ends_it(alone):
    stop, results = alone["stopped"]
    assert results[1].finish == "eos" and results[1].token_ids[-1] == stop and len(results[1].token_ids) <= 3
    streamed = [[step[row] for step in alone["steps"] if step[row] is not None] for row in range(3)]
    assert streamed == [result.token_ids for result in results]


@pytest.mark.slow
def test_a_checkpoint_of_the_trainer_is_decoded_in_any_layout(tmp_path):
    LetterTokenizer(export_case.VOCAB).save_for_huggingface(tmp_path / "tokenizer")
    ranks = run_distributed(decode_what_training_saved, 4, str(tmp_path), timeout=400)
    config = export_case.case(tmp_path, tied=False).config(export_case.SPLIT)
    model = make_model(read_weights(tmp_path / "checkpoints" / export_case.FIRST), config)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    expected = greedy_texts(model, "fused")
    for rank in ranks:
        for texts in rank:
            assert texts == expected
