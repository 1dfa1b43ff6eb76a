"""Rows of a step are dealt to its micro-batches so that extra passes compute as few positions as they can."""

import itertools
from typing import List

import pytest
import torch

from megatron_fbt.config.feedback import PrefixConfig
from megatron_fbt.core.row_groups import cheapest_groups, group_rows
from megatron_fbt.data.batch import MicroBatch
from megatron_fbt.feedback.prefix import fused_positions

SEQUENCE = 24


def batches_of(micro_batches: int, rows: int, on_host: bool = False) -> List[MicroBatch]:
    """Random micro-batches; with on_host each has a copy for the CPU, as on a machine with a device."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for index in range(micro_batches):
        tokens, labels = torch.randint(1, 99, (2, rows, SEQUENCE), generator=generator)
        starts = torch.rand(rows, SEQUENCE, generator=generator) < 0.1
        starts[:, 0] = True
        region = torch.rand(rows, SEQUENCE, generator=generator) < 0.5
        numbers = 100 + index * rows + torch.arange(rows)
        batch = MicroBatch(tokens, labels, torch.rand(rows, SEQUENCE, generator=generator), starts, numbers, region)
        if on_host:
            batch.on_host = MicroBatch(None, None, None, starts.clone(), numbers.clone(), region.clone())
        found.append(batch)
    return found


def fused(batch: MicroBatch, pass_number: int) -> torch.Tensor:
    """The recipe's, by row."""
    return fused_positions(PrefixConfig(), batch.document_starts, batch.sample_ids, pass_number, seed=5)


def rows_of(batches: List[MicroBatch]) -> dict:
    """All fields of each row by sample number."""
    names = ("tokens", "labels", "loss_mask", "document_starts", "feedback_region")
    columns = [[row.tolist() for batch in batches for row in getattr(batch, name)] for name in names]
    return dict(zip((int(i) for batch in batches for i in batch.sample_ids), zip(*columns)))


@pytest.mark.parametrize("passes", [2, 3])
@pytest.mark.parametrize("on_host", [False, True])
def test_rows_stay_whole_and_each_is_there_once(passes, on_host):
    given = batches_of(5, 3, on_host)
    dealt, starts = group_rows(given, passes, fused)
    assert [len(batch.sample_ids) for batch in dealt] == [3] * 5
    assert rows_of(dealt) == rows_of(given) and len(rows_of(dealt)) == 15
    assert [batch.sample_ids.tolist() for batch in dealt] != [batch.sample_ids.tolist() for batch in given]
    for batch, begin in zip(dealt, starts, strict=True):
        assert (batch.on_host is not None) == on_host
        for name in ("document_starts", "sample_ids", "feedback_region"):
            assert torch.equal(getattr(batch.host, name), getattr(batch, name))
        masks = [fused(batch, number) for number in range(2, passes + 1)]
        assert begin == [min(row.index(True) if any(row) else SEQUENCE for row in mask.tolist()) for mask in masks]


def test_rows_of_one_are_not_moved():
    given = batches_of(6, 1)
    assert group_rows(given, 3, fused)[0] is given
    given = batches_of(1, 6)
    assert group_rows(given, 2, fused)[0] is given


def test_rows_in_their_cheapest_order_stay_there():
    once, starts = group_rows(batches_of(4, 2), 2, fused)
    again, same = group_rows(once, 2, fused)
    assert again is once and same == starts


def spared(starts: List[List[int]], groups: List[List[int]]) -> int:
    """Positions that no pass computes, of one row of each group."""
    return sum(min(keys[row] for row in group) for keys in starts for group in groups)


def test_with_two_passes_no_order_is_cheaper():
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        starts = torch.randint(1, 30, (1, 6), generator=generator).tolist()
        others = ([order[:2], order[2:4], order[4:]] for order in itertools.permutations(range(6)))
        assert spared(starts, cheapest_groups(starts, 3)) == max(spared(starts, groups) for groups in others)


def test_with_three_passes_none_of_them_is_forgotten():
    one = [[1, 9, 2, 8, 3, 7], [5, 5, 5, 5, 5, 5]]
    assert cheapest_groups(one, 3) == [[0, 2], [4, 5], [3, 1]]
    assert cheapest_groups(one[::-1], 3) == [[0, 2], [4, 5], [3, 1]]
    both = [[8, 2, 2, 8, 8, 9], [9, 9, 1, 3, 3, 9]]  # each pass's own order spares 25, that of the sums 31
    assert cheapest_groups(both, 3) == [[2, 1], [3, 4], [0, 5]]
    assert spared(both, cheapest_groups(both, 3)) == 31


def test_nothing_fused_counts_as_the_whole_row():
    given = batches_of(2, 2)
    given[0].feedback_region[1], given[1].feedback_region[0] = False, False

    def answers(batch: MicroBatch, number: int) -> torch.Tensor:
        return fused_positions(
            PrefixConfig(granularity="prompt"),
            batch.document_starts,
            batch.sample_ids,
            number,
            5,
            batch.feedback_region,
        )

    dealt, starts = group_rows(given, 2, answers)
    assert starts[1] == [SEQUENCE] and starts[0][0] < SEQUENCE
    assert dealt[1].sample_ids.tolist() == [101, 102]
