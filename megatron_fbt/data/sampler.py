"""Which samples a rank reads: a pure function of the number of samples consumed so far."""

from typing import List

from megatron_fbt.errors import ConfigError


def micro_batch_sample_ids(
    consumed_samples: int,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> List[List[int]]:
    """Sample numbers of the next global batch that one data-parallel rank works on.

    Micro-batch m of rank r holds ``consumed + (m * data_parallel_size + r) * micro_batch_size`` and the numbers that
    follow, so the global batch is the same set of samples in every layout.

    Args:
        consumed_samples: Samples of all ranks in all earlier steps.
        global_batch_size: Samples of this step, of all ranks.
        micro_batch_size: Samples in one micro-batch.
        data_parallel_rank: 0 to data_parallel_size - 1.
        data_parallel_size: Number of data-parallel ranks.

    Returns:
        One list of ``micro_batch_size`` numbers for each micro-batch.

    Raises:
        ConfigError: The global batch cannot be cut evenly.
    """
    if min(global_batch_size, micro_batch_size, data_parallel_size) < 1 or consumed_samples < 0:
        raise ConfigError(
            f"a batch needs positive sizes: global_batch_size {global_batch_size}, micro_batch_size "
            f"{micro_batch_size}, data-parallel size {data_parallel_size}, consumed samples {consumed_samples}"
        )
    if not 0 <= data_parallel_rank < data_parallel_size:
        raise ConfigError(f"data-parallel rank {data_parallel_rank} is not one of {data_parallel_size}")
    stride = micro_batch_size * data_parallel_size
    if global_batch_size % stride:
        raise ConfigError(
            f"training.global_batch_size {global_batch_size} is not a multiple of micro_batch_size {micro_batch_size} "
            f"x data-parallel size {data_parallel_size} = {stride}"
        )
    firsts = range(
        consumed_samples + data_parallel_rank * micro_batch_size, consumed_samples + global_batch_size, stride
    )
    return [list(range(first, first + micro_batch_size)) for first in firsts]
