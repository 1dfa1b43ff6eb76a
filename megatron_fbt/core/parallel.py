"""Process groups of a run, by Megatron-Core."""

import datetime
import os
from dataclasses import dataclass
from typing import Optional

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_fbt.config.parallel import ParallelConfig
from megatron_fbt.core.cpu import current_device, enable_cpu_mode, on_gpu
from megatron_fbt.feedback.counter import DROPOUT, counter_hash


@dataclass(frozen=True)
class Layout:
    """This process's place in the tensor x pipeline x data parallel grid.

    Ranks count tensor-parallel first, then data-parallel, then pipeline, as Megatron-Core orders them.
    """

    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    data_rank: int
    data_size: int
    sequence_parallel: bool
    device: torch.device
    batch_group: Optional[dist.ProcessGroup]
    """The tensor-parallel ranks over gloo: batches travel between CPUs and no rank waits for its GPU. None if alone."""
    data_group: dist.ProcessGroup
    cpu_group: Optional[dist.ProcessGroup] = None
    """All ranks over gloo, for agreements that need no GPU; None where the default group is that."""

    @property
    def is_first_stage(self) -> bool:
        """Holds the embedding and the fusion layer."""
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Holds the final norm and the output head."""
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def sequence_shards(self) -> int:
        """In how many parts the sequence of a hidden state is split between ranks."""
        return self.tensor_size if self.sequence_parallel else 1

    def own_rows(self, sequence_length: int) -> slice:
        """Positions of a row whose hidden states this rank holds."""
        size = sequence_length // self.sequence_shards
        begin = self.tensor_rank * size if self.sequence_shards > 1 else 0
        return slice(begin, begin + size)


def initialize_parallel(config: ParallelConfig, seed: int) -> Layout:
    """Join the process group of the launcher, or one of a single process, and build Megatron-Core's groups.

    Args:
        config: sizes of the layout; the world size must have been checked against it.
        seed: base seed of Megatron-Core's generators (dropout).
    """
    enable_cpu_mode()
    if on_gpu():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    timeout = datetime.timedelta(seconds=config.collective_timeout_s)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu() else "gloo", timeout=timeout, **_single_process())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        distributed_timeout_minutes=config.collective_timeout_s / 60,
        create_gloo_process_groups=False,
    )
    seed_dropout(seed, step=0)
    return _current_layout(config.sequence_parallel, timeout)


def _batch_group(timeout: datetime.timedelta) -> Optional[dist.ProcessGroup]:
    """Every rank creates the group of every tensor-parallel group, in the same order, and keeps its own."""
    own = dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group())
    if len(own) == 1:
        return None
    groups = {}
    for first in range(0, dist.get_world_size(), len(own)):  # Megatron-Core numbers tensor-parallel ranks first
        ranks = tuple(range(first, first + len(own)))
        groups[ranks] = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
    return groups[tuple(own)]


def _single_process() -> dict:
    if "RANK" in os.environ:
        return {}
    store = dist.HashStore()
    return {"store": store, "rank": 0, "world_size": 1}


def _current_layout(sequence_parallel: bool, timeout: datetime.timedelta) -> Layout:
    """This rank's place as Megatron-Core's parallel state holds it."""
    return Layout(
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=parallel_state.get_pipeline_model_parallel_world_size(),
        data_rank=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        data_size=parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        sequence_parallel=sequence_parallel,
        device=current_device(),
        batch_group=_batch_group(timeout),
        data_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        cpu_group=dist.new_group(timeout=timeout, backend="gloo") if on_gpu() else None,
    )


def seed_dropout(seed: int, step: int) -> None:
    """Seed Megatron-Core's dropout generators for one step, so that a resumed step draws the same masks.

    Data-parallel ranks and stages draw different masks; a tensor-parallel group shares those that it must.
    """
    stage = parallel_state.get_pipeline_model_parallel_rank()
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    key = counter_hash(seed, DROPOUT, step, stage, replica).item() % 2**31
    tensor_parallel.model_parallel_cuda_manual_seed(key, force_reset_rng=True)


def shut_down_parallel(layout: Optional[Layout]) -> None:
    """Leave all process groups."""
    if layout is not None:
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
