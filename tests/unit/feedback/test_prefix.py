"""Cuts of the prefix mix-in, and document starts."""

import dataclasses

import pytest
import torch

from megatron_fbt.config.feedback import PrefixConfig
from megatron_fbt.feedback.counter import PREFIX, counter_hash, uniform
from megatron_fbt.feedback.prefix import document_spans, fused_positions

OFF, ROW, DOCUMENT = PrefixConfig(0.0), PrefixConfig(), PrefixConfig(granularity="document")


def starts_at(length: int, *rows) -> torch.Tensor:
    """[b, s] document starts at position 0 and at the given ones."""
    starts = torch.zeros(len(rows), length, dtype=torch.bool)
    for row, positions in zip(starts, rows):
        row[[0, *positions]] = True
    return starts


def show(fused: torch.Tensor) -> list:
    """A string a row: F for fused, a dot for plain."""
    return ["".join(".F"[value] for value in row) for row in fused.int().tolist()]


STARTS = starts_at(16, (5, 6), (), (11,), ())
IDS = torch.tensor([0, 1, 2, 2**33])


def cuts(count: int, length: int = 1000, pass_number: int = 2, seed: int = 1234) -> torch.Tensor:
    """Plain positions at the beginning of each of `count` rows of one document."""
    fused = fused_positions(ROW, starts_at(length, *[()] * count), torch.arange(count), pass_number, seed)
    plain = (~fused).sum(1)
    assert torch.equal(fused, torch.arange(length).expand(count, -1) >= plain[:, None]), "one cut in each row"
    return plain


def test_golden_cuts():
    expected = ["..........FFFFFF", "...............F", ".....FFFFFF.FFFF", ".........FFFFFFF"]
    assert show(fused_positions(ROW, STARTS, IDS, 2, 1234)) == expected
    expected = ["...FF........FFF", "...............F", "....FFFFFFF..FFF", ".........FFFFFFF"]
    assert show(fused_positions(DOCUMENT, STARTS, IDS, 2, 1234)) == expected


def test_switched_off_everything_but_document_starts_is_fused():
    for seed in (0, 1):
        assert show(fused_positions(OFF, STARTS, IDS, 2, seed)) == [
            ".FFFF..FFFFFFFFF",
            "." + 15 * "F",
            "." + 10 * "F" + "." + 4 * "F",
            "." + 15 * "F",
        ]


def test_document_spans():
    index, start, length = document_spans(STARTS[[0, 2]])
    assert index.tolist() == [[0] * 5 + [1] + [2] * 10, [0] * 11 + [1] * 5]
    assert start.tolist() == [[0] * 5 + [5] + [6] * 10, [0] * 11 + [11] * 5]
    assert length.tolist() == [[5] * 5 + [1] + [10] * 10, [11] * 11 + [5] * 5]


@pytest.mark.parametrize("config", [OFF, ROW, DOCUMENT], ids=["off", "row", "document"])
def test_document_starts_are_never_fused(config):
    starts = torch.rand(400, 24, generator=torch.Generator().manual_seed(0)) < 0.2
    starts[:, 0] = True
    for pass_number in (2, 3):
        fused = fused_positions(config, starts, torch.arange(400), pass_number, 9)
        assert fused.any() and not (fused & starts).any()


def test_each_document_has_a_plain_beginning_of_its_own():
    """Every document is plain up to one cut, the first of it at least, and fused from there to its end."""
    starts = torch.rand(300, 40, generator=torch.Generator().manual_seed(1)) < 0.08
    starts[:, 0] = True
    fused = fused_positions(DOCUMENT, starts, torch.arange(300), 2, 9)
    shares = []
    for row, begins in zip(fused.tolist(), starts):
        edges = begins.nonzero().flatten().tolist() + [40]
        for begin, end in zip(edges, edges[1:]):
            document = row[begin:end]
            assert not document[0] and document == sorted(document)
            shares.append((end - begin, (end - begin - sum(document) - 1) / (end - begin)))
    long = [share for length, share in shares if length >= 16]
    assert sum(long) / len(long) == pytest.approx(0.5 - 0.5 / 22, abs=0.06)
    by_row = [len({round(s, 3) for _, s in shares[i : i + 4]}) for i in range(0, len(shares), 4)]
    assert max(by_row) == 4, "documents of a row do not share a draw"


def test_the_cut_is_one_plus_the_floor_of_a_uniform_draw():
    count, length = 20_000, 10
    plain = cuts(count, length)
    counts = torch.bincount(plain, minlength=length + 1)
    assert counts[0] == 0 and len(counts) == length + 1
    expected = count / length
    assert ((counts[1:] - expected) ** 2 / expected).sum() < 30  # chi-square, 9 degrees of freedom


@pytest.mark.parametrize("other", [{"pass_number": 3}, {"seed": 1235}])
def test_passes_and_seeds_draw_independently(other):
    first, second = cuts(3000).double(), cuts(3000, **other).double()
    assert (first == second).double().mean() < 0.01
    assert torch.corrcoef(torch.stack([first, second]))[0, 1].abs() < 0.08


def test_neighbouring_samples_draw_independently():
    plain = cuts(3000).double()
    assert torch.corrcoef(torch.stack([plain[1:], plain[:-1]]))[0, 1].abs() < 0.08


def test_a_row_seen_again_in_a_later_step_is_cut_anew():
    starts = starts_at(1000, ())
    found = {show(fused_positions(ROW, starts, torch.tensor([5 + 64 * step]), 2, 1))[0] for step in range(20)}
    assert len(found) >= 19


@pytest.mark.parametrize("config", [ROW, DOCUMENT], ids=["row", "document"])
def test_a_sample_has_one_cut_in_any_micro_batch(config):
    starts = torch.rand(12, 32, generator=torch.Generator().manual_seed(3)) < 0.1
    starts[:, 0] = True
    ids = torch.arange(12) + 2**32 - 5
    whole = fused_positions(config, starts, ids, 3, 7)
    for size in (1, 3, 4):
        parts = [fused_positions(config, s, i, 3, 7) for s, i in zip(starts.split(size), ids.split(size))]
        assert torch.equal(torch.cat(parts), whole)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(4))
    assert torch.equal(fused_positions(config, starts[order], ids[order], 3, 7), whole[order])


def test_a_document_changes_no_cut_of_the_documents_before_it():
    one, two = starts_at(32, (9,)), starts_at(32, (9, 20))
    for sample in range(50):
        ids = torch.tensor([sample])
        first, second = (fused_positions(DOCUMENT, starts, ids, 2, 7) for starts in (one, two))
        assert torch.equal(first[:, :9], second[:, :9])


def test_a_row_of_document_starts_or_of_one_token_has_nothing_to_fuse():
    for config in (OFF, ROW, DOCUMENT):
        assert not fused_positions(config, torch.ones(3, 8, dtype=torch.bool), torch.arange(3), 2, 1).any()
        assert not fused_positions(config, torch.ones(3, 1, dtype=torch.bool), torch.arange(3), 2, 1).any()


def test_the_data_decide_where_a_prompt_ends():
    config = PrefixConfig(granularity="prompt", probability=0.0)
    region = torch.zeros(4, 16, dtype=torch.bool)
    region[0, 3:9], region[1], region[3, 1:4], region[3, 12:] = True, True, True, True
    for pass_number, seed in ((2, 1), (3, 1), (2, 9)):
        found = fused_positions(config, STARTS, IDS, pass_number, seed, region)
        assert show(found) == ["...FF..FF.......", "." + 15 * "F", 16 * ".", ".FFF........FFFF"]


def test_a_region_says_nothing_to_the_other_granularities():
    for config in (OFF, ROW, DOCUMENT):
        region = torch.zeros(4, 16, dtype=torch.bool)
        expected = fused_positions(config, STARTS, IDS, 2, 1234)
        assert torch.equal(fused_positions(config, STARTS, IDS, 2, 1234, region), expected)


@pytest.mark.parametrize("granularity", ["row", "document"])
def test_low_high_and_exponent_reshape_the_same_draws(granularity):
    """The plain length of each draw is worked out again from the default's own uniform numbers."""
    count, length = 400, 64
    starts = starts_at(length, *[(20,)] * count)
    ids = torch.arange(count)
    index = torch.tensor([[0], [1]]) if granularity == "document" else torch.tensor([[0]])
    spans = [(0, 20), (20, 64)] if granularity == "document" else [(0, 64)]
    u = uniform(counter_hash(5, PREFIX, ids[None], 3, index))
    for low, high, exponent in ((0.0, 1.0, 1.0), (0.25, 0.5, 1.0), (0.0, 1.0, 3.0), (0.1, 0.9, 0.5), (0.5, 0.5, 1.0)):
        config = PrefixConfig(low=low, high=high, exponent=exponent, granularity=granularity)
        fused = fused_positions(config, starts, ids, 3, 5)
        for (begin, end), draws in zip(spans, u):
            plain = 1 + torch.floor((low + (high - low) * draws**exponent) * (end - begin)).long()
            expected = torch.arange(end - begin) >= plain[:, None]
            assert torch.equal(fused[:, begin:end], expected & ~starts[:, begin:end]), (low, high, exponent)


@pytest.mark.parametrize("config", [ROW, DOCUMENT], ids=["row", "document"])
def test_a_chance_below_one_leaves_out_whole_mix_ins_and_changes_no_cut(config):
    count = 4000
    starts = starts_at(32, *[(16,)] * count)
    always, off = (fused_positions(c, starts, torch.arange(count), 2, 7) for c in (config, OFF))
    shares = {}
    for chance in (0.0, 0.3, 0.9):
        partly = dataclasses.replace(config, probability=chance)
        found = fused_positions(partly, starts, torch.arange(count), 2, 7)
        halves = [slice(0, 32)] if config is ROW else [slice(0, 16), slice(16, 32)]
        for half in halves:
            same, without = ((found[:, half] == other[:, half]).all(1) for other in (always, off))
            assert (same | without).all()
            clear = (always[:, half] != off[:, half]).any(1)
            shares[chance, half.start] = (same & clear).sum().item() / clear.sum().item()
    for (chance, _), share in shares.items():
        assert share == pytest.approx(chance, abs=0.035)
    if config is DOCUMENT:
        left, right = ((found[:, half] == off[:, half]).all(1).double() for half in halves)
        assert torch.corrcoef(torch.stack([left, right]))[0, 1].abs() < 0.06, "documents draw for themselves"


def test_a_chance_is_drawn_anew_in_each_pass():
    half = PrefixConfig(probability=0.5, low=1.0)
    starts = starts_at(8, *[()] * 2000)
    second, third = ((fused_positions(half, starts, torch.arange(2000), k, 7)).any(1).double() for k in (2, 3))
    assert second.mean() == pytest.approx(0.5, abs=0.05)
    assert torch.corrcoef(torch.stack([second, third]))[0, 1].abs() < 0.08
