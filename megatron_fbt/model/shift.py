"""Shift right by one position, on a whole sequence or on one that context-parallel ranks share."""

import torch
import torch.distributed as dist


def shift_right(states: torch.Tensor) -> torch.Tensor:
    """Row t of the result is row t - 1 of the input; row 0 is zero.

    Args:
        states: [s, b, ...], the whole sequence.
    """
    return torch.cat([torch.zeros_like(states[:1]), states[:-1]])


class _LastRows(torch.autograd.Function):
    """Last row of each chunk of the sequence, in the order of the sequence, on every rank."""

    @staticmethod
    def forward(ctx, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """[2, b, ...], this rank's two chunks -> [2 n, b, ...]."""
        ctx.group, ctx.rank = group, dist.get_rank(group)
        found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, own.contiguous(), group=group)
        early, late = torch.stack(found, dim=1)  # [n, b, ...] each; rank r holds chunks r and 2 n - 1 - r
        return torch.cat([early, late.flip(0)])

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        """The gradient of a row is where its one reader is."""
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return torch.stack([grad[ctx.rank], grad[-1 - ctx.rank]]), None


def shift_right_across_shards(states: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """shift_right of a sequence that is split over context-parallel ranks in Megatron-Core's zig-zag order.

    The sequence is cut into 2 n chunks, of which rank r holds number r and number 2 n - 1 - r. Two boundary rows of
    each rank travel.

    Args:
        states: [s/n, b, ...], this rank's two chunks.
        group: the n context-parallel ranks.

    Returns:
        The same rows of the shifted sequence, [s/n, b, ...].
    """
    early, late = states.chunk(2)
    last_rows = _LastRows.apply(torch.stack([early[-1], late[-1]]), group)
    rank, chunks = dist.get_rank(group), last_rows.size(0)
    before_early = last_rows[rank - 1 : rank] if rank > 0 else torch.zeros_like(states[:1])
    before_late = last_rows[chunks - 2 - rank : chunks - 1 - rank]
    return torch.cat([before_early, early[:-1], before_late, late[:-1]])
