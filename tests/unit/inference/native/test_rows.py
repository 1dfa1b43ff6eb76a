"""Padding, positions and masks of a batch, by hand."""

from types import SimpleNamespace

import pytest
import torch

from megatron_fbt.inference.native.rows import Rows

PROMPTS = [[7], [4, 5, 6]]


def make(prompts=PROMPTS, window=None, **options):
    rotary = lambda length: torch.arange(length).view(-1, 1, 1, 1).float()  # noqa: E731  (angle = position)
    stage = SimpleNamespace(
        layout=SimpleNamespace(device="cpu"),
        config=SimpleNamespace(params_dtype=torch.float32),
        context=SimpleNamespace(window=window, rotary=rotary),
    )
    return Rows(stage, prompts, **options)


def seen(mask):
    """[b or 1, 1, queries, keys] as lists of the keys that each query sees."""
    assert set(mask.unique().tolist()) <= {0.0, float("-inf")}
    return [[(query == 0).nonzero()[:, 0].tolist() for query in row[0]] for row in mask]


def test_padding_is_left_of_the_tokens_and_has_no_positions():
    rows = make(new_tokens=2)
    assert rows.tokens.tolist() == [[0, 0, 7], [4, 5, 6]]
    assert rows.positions.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert rows.rotary[:, :, 0, 0].t().tolist() == rows.positions.tolist()
    assert rows.fused_columns(0, 3).t().tolist() == [[False, False, False], [False, True, True]]
    assert rows.fused_columns(3, 5).t().tolist() == [[True, True], [True, True]]


def test_nothing_attends_to_padding():
    rows = make(new_tokens=2)
    assert seen(rows.attention(0, 3)["attention_mask"].full) == [[[0], [1], [2]], [[0], [0, 1], [0, 1, 2]]]
    later = rows.attention(4, 5)
    assert seen(later["attention_mask"].full) == [[[2, 3, 4]], [[0, 1, 2, 3, 4]]]
    assert later["attention_mask"].window is None
    assert later["inference_context"].sequence_len_offset == 4


def test_a_window_counts_the_query_itself():
    masks = make(window=2, new_tokens=2).attention(2, 5)["attention_mask"]
    assert seen(masks.window) == [[[2], [2, 3], [3, 4]], [[1, 2], [2, 3], [3, 4]]]
    assert seen(masks.full) == [[[2], [2, 3], [2, 3, 4]], [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]]


def test_equal_lengths_need_a_mask_only_behind_the_cache():
    rows = make([[1, 2], [3, 4]], new_tokens=1)
    assert rows.attention(0, 2)["attention_mask"] is None
    assert seen(rows.attention(2, 3)["attention_mask"].full) == [[[0, 1, 2]]]


@pytest.mark.parametrize("window", [None, 2])
def test_every_query_sees_something(window):
    masks = make(window=window, new_tokens=3).attention(0, 6)["attention_mask"]
    for mask in (masks.full, masks.window):
        assert mask is None or (mask == 0).any(-1).all()
