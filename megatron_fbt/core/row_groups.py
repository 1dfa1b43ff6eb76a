"""Which rows of a step share a micro-batch, and where their extra passes begin (method section 4, prefix reuse).

All rows of a micro-batch begin at the smallest of their prefixes. So rows with prefixes of about one length are put
together: of the given order, that of each pass's prefixes and that of their sums, the one in which the passes compute
fewest positions. A step's rows on a rank stay the same, and so do its losses and gradients, which are sums over them.

Shapes: m micro-batches, b rows in each, n = m * b rows, s positions.
"""

from typing import Callable, List, Sequence, Tuple

import torch

from megatron_fbt.data.batch import MicroBatch

_ROW_FIELDS = ("tokens", "labels", "loss_mask", "document_starts", "sample_ids", "feedback_region")


def group_rows(
    micro_batches: Sequence[MicroBatch], passes: int, fused: Callable[[MicroBatch, int], torch.Tensor]
) -> Tuple[Sequence[MicroBatch], List[List[int]]]:
    """The micro-batches of a step with their rows in the cheapest order; those given where that is theirs.

    Args:
        micro_batches: of this rank, in the order of the samples.
        passes: K >= 2.
        fused: positions fused in a pass counted from 1, [b, s] bool; the same on every stage.

    Returns:
        Micro-batches; by micro-batch and extra pass the first position that is fused in some row, s if there is none.
    """
    hosts = [batch.host for batch in micro_batches]
    (rows,) = _deal(hosts, [range(sum(len(host.sample_ids) for host in hosts))])
    starts = torch.stack([_first_true(fused(rows, number)) for number in range(2, passes + 1)]).tolist()
    groups = cheapest_groups(starts, len(hosts))
    begin = [list(smallest) for smallest in zip(*(_smallest(keys, groups) for keys in starts), strict=True)]
    if groups == _split(range(len(starts[0])), len(hosts)):
        return micro_batches, begin
    dealt = _deal(micro_batches, groups)
    if hosts[0] is not micro_batches[0]:
        for batch, host in zip(dealt, _deal(hosts, groups), strict=True):
            batch.on_host = host
    return dealt, begin


def cheapest_groups(starts: Sequence[Sequence[int]], micro_batches: int) -> List[List[int]]:
    """Numbers of the rows of each micro-batch, in the order in which they have most to spare; of equal ones the first.

    Args:
        starts: first position that is fused, [K - 1][n].
        micro_batches: m.
    """
    rows = range(len(starts[0]))
    orders = [_split(rows, micro_batches)]
    if len(rows) > micro_batches > 1:
        sums = [sum(of_row) for of_row in zip(*starts, strict=True)]
        orders += [_split(sorted(rows, key=keys.__getitem__), micro_batches) for keys in (*starts, sums)]
    return max(orders, key=lambda groups: sum(sum(_smallest(keys, groups)) for keys in starts))


def _split(order: Sequence[int], micro_batches: int) -> List[List[int]]:
    """Neighbours together."""
    size = len(order) // micro_batches
    return [list(order[begin : begin + size]) for begin in range(0, len(order), size)]


def _smallest(keys: Sequence[int], groups: Sequence[Sequence[int]]) -> List[int]:
    """Of each group."""
    return [min(keys[row] for row in group) for group in groups]


def _first_true(mask: torch.Tensor) -> torch.Tensor:
    """[n, s] bool -> [n], s where all are false."""
    return torch.where(mask.any(1), mask.int().argmax(1), mask.size(1))


def _deal(batches: Sequence[MicroBatch], groups: Sequence[Sequence[int]]) -> List[MicroBatch]:
    """A micro-batch of each group of rows, which are counted through all batches; no index goes to a device."""
    columns = {}
    for name in _ROW_FIELDS:
        parts = [getattr(batch, name) for batch in batches]
        rows = None if any(part is None for part in parts) else [row for part in parts for row in part.unbind()]
        columns[name] = [None if rows is None else torch.stack([rows[i] for i in group]) for group in groups]
    return [MicroBatch(**dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]
