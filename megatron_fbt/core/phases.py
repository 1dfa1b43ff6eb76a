"""Time limits of phases that are slow by nature, in which ranks wait for each other longer than in a step."""

import contextlib
import datetime
from typing import Iterator, Optional

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from megatron_fbt.config.parallel import ParallelConfig
from megatron_fbt.core.parallel import Layout


@contextlib.contextmanager
def phase(config: ParallelConfig, layout: Layout, limit_s: float) -> Iterator[None]:
    """Have collectives that begin in it wait for up to limit_s instead of parallel.collective_timeout_s.

    Args:
        config: parallel section.
        layout: this process's place.
        limit_s: seconds after which a rank gives up waiting for another one.
    """
    _set_timeouts(layout, limit_s)
    try:
        yield
    finally:
        _set_timeouts(layout, config.collective_timeout_s)


def _set_timeouts(layout: Layout, seconds: float) -> None:
    groups: set[Optional[dist.ProcessGroup]] = {None, layout.cpu_group, layout.batch_group}
    for group in groups:  # None is the default group
        _set_pg_timeout(datetime.timedelta(seconds=seconds), group)
