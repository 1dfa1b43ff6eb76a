"""Paired timing and the hand-written yardstick."""

import argparse
import json
import time

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.hf_unrolled_baseline import Shape, UnrolledLlama, build_step
from benchmarks.pairs import (
    PairResult,
    alternate,
    alternate_with_noise,
    format_table,
    measure,
    number_of_pairs,
    to_json,
)

TINY = Shape(32, 2, 4, 2, 64, sequence_length=16, vocab_size=61, micro_batch_size=2)


def test_ratios_median_and_quartiles_of_known_durations():
    result = PairResult.from_durations([2.0, 3.0, 4.0, 10.0, 6.0], [1.0, 1.0, 2.0, 2.0, 2.0])
    assert result.ratios == [2.0, 3.0, 2.0, 5.0, 3.0]
    assert (result.median, result.quartiles) == (3.0, (2.0, 3.0))
    assert (result.seconds_a, result.seconds_b) == (4.0, 2.0)


@pytest.mark.parametrize("a, b", [([1.0], [1.0]), ([1.0, 2.0], [1.0])])
def test_too_few_or_unequal_durations_are_refused(a, b):
    with pytest.raises(ValueError, match="durations"):
        PairResult.from_durations(a, b)


@pytest.mark.parametrize("text", ["1", "0", "-3", "2.5", "two", "", "²"])
def test_fewer_than_two_pairs_are_refused_when_options_are_read(text):
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--pairs", type=number_of_pairs)
    with pytest.raises(argparse.ArgumentError, match="at least 2"):
        parser.parse_args([f"--pairs={text}"])
    assert parser.parse_args(["--pairs", "2"]).pairs == 2


def test_each_round_runs_everything_once_and_nobody_is_always_first():
    calls = []
    durations = measure(4, lambda: calls.append("a"), lambda: calls.append("b"), warm_up=1)
    rounds = ["".join(calls[i : i + 2]) for i in range(0, len(calls), 2)]
    assert rounds == ["ba", "ab", "ba", "ab", "ba"]
    assert [len(times) for times in durations] == [4, 4]


def test_a_slower_thing_has_a_ratio_above_its_noise():
    def slow():
        time.sleep(0.02)

    def fast():
        time.sleep(0.005)

    ratio, noise = alternate_with_noise(slow, fast, pairs=5)
    assert ratio.median > 1.5 * noise.median
    assert alternate(fast, slow, pairs=3).median < 1
    table = format_table({"slow / fast": ratio, "fast / fast": noise})
    assert f"{ratio.median:.3f}" in table and len(table.splitlines()) == 3
    assert json.loads(to_json({"slow / fast": ratio}))["slow / fast"]["median"] == ratio.median


def test_one_pass_of_the_yardstick_is_a_llama_on_normalised_embeddings():
    torch.manual_seed(1)
    model = UnrolledLlama(TINY)
    rows = torch.randint(TINY.vocab_size, (2, TINY.sequence_length + 1))
    stock = LlamaForCausalLM(model.llama.config)
    stock.model.load_state_dict(model.llama.state_dict())
    stock.lm_head.weight = stock.model.embed_tokens.weight
    embedded = stock.model.embed_tokens(rows[:, :-1])
    logits = stock(inputs_embeds=embedded / (embedded.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    assert model(rows[:, :-1], rows[:, 1:], 1).item() == pytest.approx(expected.item(), rel=1e-6)


def test_its_steps_learn_with_every_pass_count():
    for passes in (1, 2, 3):
        step = build_step(TINY, passes, micro_batches=2)
        losses = [step() for _ in range(12)]
        assert losses[0] == pytest.approx((1 if passes == 1 else 2) * 4.11, rel=0.1)
        assert losses[-1] < losses[0] - 0.05
