"""Which rank is slow: every rank times the same small work between two steps.

The duration of a step tells nothing: all ranks wait for the slowest one. Matrix products of the rank's own device, with
no other rank in them, show a throttled GPU or a core that somebody else uses.
"""

import statistics
from dataclasses import dataclass
from typing import Callable, List, Optional, Tuple

import torch
import torch.distributed as dist

from megatron_fbt.config.logging import LoggingConfig
from megatron_fbt.core.parallel import Layout
from megatron_fbt.training.machine import matmul_tflops, node_name

SIZE = {"cpu": 256, "cuda": 2048}
"""Rows and columns of the matrices: well below a millisecond."""
REPEATS = 9


@dataclass(frozen=True)
class Slowest:
    """The slowest of all ranks."""

    rank: int
    node: str
    factor: float
    """Its duration over that of the median rank."""

    def describe(self) -> str:
        """For a person."""
        return f"slowest rank: {self.rank} on {self.node}, whose products take {self.factor:.2f} times the median"


def slowest_of(speeds: List[Tuple[str, float]]) -> Slowest:
    """The slowest rank.

    Args:
        speeds: node and speed of every rank, in their order.
    """
    values = [speed for _, speed in speeds]
    rank = min(range(len(values)), key=values.__getitem__)
    return Slowest(rank, speeds[rank][0], statistics.median(values) / values[rank])


class StragglerWatch:
    """Looks every logging.straggler_interval steps; collective.

    Args:
        config: logging section.
        layout: this process's place.
    """

    def __init__(self, config: LoggingConfig, layout: Layout):
        self.config, self.layout = config, layout
        self.measure: Callable[[torch.device, int, int], float] = matmul_tflops

    def look(self, step: int, say: Callable[[str], None]) -> Optional[Slowest]:
        """Measure if it is time.

        Args:
            step: that has just ended.
            say: tells the user a line, on rank 0.

        Returns:
            The slowest rank, the same everywhere; None if it is not time.
        """
        interval = self.config.straggler_interval
        if interval is None or step % interval or dist.get_world_size() == 1:
            return None
        kind = self.layout.device.type
        speed = self.measure(self.layout.device, SIZE[kind], REPEATS)
        speeds: List[Tuple[str, float]] = [("", 0.0)] * dist.get_world_size()
        dist.all_gather_object(speeds, (node_name(), speed), group=self.layout.cpu_group)
        found = slowest_of(speeds)
        say(("warning: " if found.factor > self.config.straggler_factor else "") + found.describe())
        return found
