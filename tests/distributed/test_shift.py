"""The shift over context-parallel shards is the shift of the whole sequence, with its gradient."""

import pytest
import torch
import torch.distributed as dist

from megatron_fbt.model.shift import shift_right, shift_right_across_shards
from tests.distributed.launch import run_distributed

S, B, H = 48, 2, 3


def measure(rank: int, world_size: int):
    """Largest error of values and gradients for groups of the first 2, 3 and 4 ranks."""
    generator = torch.Generator().manual_seed(0)
    whole, weight = (torch.randn(S, B, H, dtype=torch.float64, generator=generator) for _ in range(2))
    whole.requires_grad_()
    expected = shift_right(whole)
    (expected * weight).sum().backward()
    groups = {size: dist.new_group(range(size)) for size in (2, 3, 4)}
    return {size: errors(whole, expected, weight, rank, group) for size, group in groups.items() if rank < size}


def errors(whole, expected, weight, rank, group):
    chunks = torch.arange(S).chunk(2 * dist.get_world_size(group))
    rows = torch.cat([chunks[rank], chunks[-1 - rank]])
    own = whole.detach()[rows].clone().requires_grad_()
    found = shift_right_across_shards(own, group)
    (found * weight[rows]).sum().backward()
    return (found - expected[rows]).abs().max().item(), (own.grad - whole.grad[rows]).abs().max().item()


@pytest.fixture(scope="module")
def measured():
    return run_distributed(measure, 4, timeout=60)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shift_over_zig_zag_shards_is_the_whole_one(measured, size):
    assert [rank[size] for rank in measured[:size]] == [(0.0, 0.0)] * size
