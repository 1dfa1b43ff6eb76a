"""The helper that runs all distributed tests must itself report faults and end in time."""

import os
import time

import pytest
import torch

from tests.distributed.launch import DistributedFailure, run_distributed


def _sum(rank, world_size, offset):
    value = torch.tensor([float(rank + offset)])
    torch.distributed.all_reduce(value)
    assert torch.get_num_threads() == 1 and os.environ["RANK"] == str(rank)
    return value, world_size


def _raise_on_one(rank, world_size):
    if rank == 1:
        raise ValueError("the real cause")
    torch.distributed.barrier()


def _die_on_zero(rank, world_size):
    if rank == 0:
        os._exit(9)
    time.sleep(100)


def _sleep(rank, world_size):
    time.sleep(100)


def test_values_come_back_in_rank_order():
    results = run_distributed(_sum, 2, 10)
    assert [(value.item(), world) for value, world in results] == [(21.0, 2), (21.0, 2)]


@pytest.mark.parametrize(
    "function, message",
    [(_raise_on_one, "rank 1 ---(.|\n)*the real cause"), (_die_on_zero, "exit code 9")],
)
def test_a_failing_rank_is_named_and_the_rest_ended(function, message):
    begin = time.monotonic()
    with pytest.raises(DistributedFailure, match=message):
        run_distributed(function, 2)
    assert time.monotonic() - begin < 40


def test_a_hang_ends_at_the_timeout():
    with pytest.raises(DistributedFailure, match=r"ranks \[0, 1\]: not finished in 1 s"):
        run_distributed(_sleep, 2, timeout=1, init_group=False)
