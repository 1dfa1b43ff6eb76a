"""The sampler: every sample of a batch once, in any layout, at any count."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fbt.data.sampler import micro_batch_sample_ids
from megatron_fbt.errors import ConfigError

COUNTS = [0, 1, 2**31 - 1, 2**31, 2**32 + 1, 3 * 10**12]


def all_ids(consumed, accumulation, micro_batch_size, ranks):
    batch = accumulation * micro_batch_size * ranks
    per_rank = [micro_batch_sample_ids(consumed, batch, micro_batch_size, rank, ranks) for rank in range(ranks)]
    # Global order: micro-batch by micro-batch, rank by rank.
    return [number for m in range(accumulation) for rank in per_rank for number in rank[m]]


@given(st.sampled_from(COUNTS), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_the_ranks_together_read_the_batch_in_order(consumed, accumulation, micro_batch_size, ranks):
    batch = accumulation * micro_batch_size * ranks
    assert all_ids(consumed, accumulation, micro_batch_size, ranks) == list(range(consumed, consumed + batch))


def test_one_rank_reads_the_documented_numbers():
    assert micro_batch_sample_ids(100, 12, 2, 1, 3) == [[102, 103], [108, 109]]


def test_impossible_batches_are_refused_with_their_numbers():
    with pytest.raises(ConfigError, match="global_batch_size 10 is not a multiple of micro_batch_size 2 x .*3 = 6"):
        micro_batch_sample_ids(0, 10, 2, 0, 3)
    with pytest.raises(ConfigError, match="rank 3 is not one of 3"):
        micro_batch_sample_ids(0, 6, 2, 3, 3)
    with pytest.raises(ConfigError, match="positive sizes"):
        micro_batch_sample_ids(0, 6, 0, 0, 3)
