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
    starts = torch.stack([_first_true(fused(rows, number)) for number in range(2, passes + 1)])
    order = cheapest_order(starts, len(hosts))
    groups = order.view(len(hosts), -1).tolist()
    begin = starts[:, order].unflatten(1, (len(hosts), -1)).amin(2).t().tolist()
    if sum(groups, []) == list(range(len(order))):
        return micro_batches, begin
    dealt = _deal(micro_batches, groups)
    if hosts[0] is not micro_batches[0]:
        for batch, host in zip(dealt, _deal(hosts, groups), strict=True):
            batch.on_host = host
    return dealt, begin


def cheapest_order(starts: torch.Tensor, micro_batches: int) -> torch.Tensor:
    """Numbers of the rows [n] in the order in which micro-batches of neighbours have most to spare.

    Args:
        starts: first position that is fused, [K - 1, n].
        micro_batches: m.
    """
    orders = [torch.arange(starts.size(1))]
    if starts.size(1) > micro_batches > 1:
        orders += [keys.argsort(stable=True) for keys in (*starts, starts.sum(0))]
    spared = [starts[:, order].unflatten(1, (micro_batches, -1)).amin(2).sum() for order in orders]
    return orders[int(torch.stack(spared).argmax())]


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
