"""A checkpoint's model over tensor- and pipeline-parallel processes: rounds through the stages, and logits.

Shapes: n columns, b rows, h hidden; states are [n, b, h].
"""

import contextlib
import copy
import os
from pathlib import Path
from typing import Iterator, Optional, Tuple, Union

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from megatron_fbt.config.checks import launcher_number, layout_problems
from megatron_fbt.config.memory import MemoryConfig
from megatron_fbt.config.parallel import ParallelConfig
from megatron_fbt.config.precision import PrecisionConfig
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.config.rules import raise_problems
from megatron_fbt.core.checkpoint_io import check_files
from megatron_fbt.core.parallel import initialize_parallel, shut_down_parallel
from megatron_fbt.core.stage import FBTStage
from megatron_fbt.errors import ConfigError
from megatron_fbt.hf.native import load_stage
from megatron_fbt.inference.native.rows import Rows
from megatron_fbt.training.failure import on_all_ranks, on_first_rank, speaks_first
from megatron_fbt.training.run_folder import find_step_folder, written_config


class NativeModel:
    """One copy of a model, of which each process holds its part. Every method is collective.

    Args:
        stage: this process's part, in evaluation mode.
        config: the configuration, with this layout in its section parallel.
    """

    def __init__(self, stage: FBTStage, config: PretrainConfig):
        self.stage, self.config, self.layout = stage, config, stage.layout
        self.vocab_size, self.hidden_size = stage.vocab_size, stage.config.hidden_size
        self.source = self.layout.tensor_size * (self.layout.pipeline_size - 1)
        """First process of the last stage: what it chooses, all take."""

    def plain_inputs(self, tokens: torch.Tensor) -> Optional[torch.Tensor]:
        """The stack's plain inputs of tokens [b, n]; None behind the first stage."""
        return self.stage.first_inputs(tokens, None, None) if self.layout.is_first_stage else None

    def fused_inputs(
        self, tokens: torch.Tensor, before: Optional[torch.Tensor], fused: torch.Tensor
    ) -> Optional[torch.Tensor]:
        """The stack's inputs, fused where told; None behind the first stage.

        Args:
            tokens: [b, n].
            before: states of the columns before these; needed on the first stage alone.
            fused: [n, b] bool; the other columns stay plain.
        """
        return self.stage.first_inputs(tokens, before, fused, aligned=True) if self.layout.is_first_stage else None

    def run(self, rows: Rows, inputs: Optional[torch.Tensor], begin: int, end: int) -> Optional[torch.Tensor]:
        """One round through the stages.

        Args:
            rows: the batch.
            inputs: of its columns [begin, end), on the first stage.
            begin: columns before it are in the cache.
            end: behind the last column.

        Returns:
            Top states on the last stage, None on the others.
        """
        layout, decoder = self.layout, self.stage.decoder
        hidden = inputs if layout.is_first_stage else self._receive(rows, end - begin, self._previous())
        if not layout.is_first_stage:
            decoder.set_input_tensor(hidden)
        hidden = decoder(hidden_states=hidden, **rows.attention(begin, end))
        if layout.is_last_stage:
            return hidden
        dist.send(hidden.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
        return None

    def passes(
        self, rows: Rows, tokens: torch.Tensor, begin: int, count: int, last: Optional[torch.Tensor] = None
    ) -> Optional[torch.Tensor]:
        """Parallel passes over some columns: the first one plain, the others fused with the states of the one before.

        Args:
            rows: the batch.
            tokens: [b, n], those of columns begin to begin + n.
            begin: columns before it are in the cache.
            count: passes, at least 1.
            last: state of the column before these, [1, b, h], on the first stage; None if there is none.

        Returns:
            Top states of the last pass on the last stage, None on the others.
        """
        length = tokens.size(1)
        fused = rows.fused_columns(begin, begin + length)
        states = self.run(rows, self.plain_inputs(tokens), begin, begin + length)
        for _ in range(count - 1):
            before = self.feed_back(rows, states, length)
            if before is not None:
                before = torch.cat([torch.zeros_like(before[:1]) if last is None else last, before[:-1]])
            states = self.run(rows, self.fused_inputs(tokens, before, fused), begin, begin + length)
        return states

    def feed_back(self, rows: Rows, states: Optional[torch.Tensor], columns: int) -> Optional[torch.Tensor]:
        """Bring top states from the last stage to the first one, where they are returned.

        Args:
            rows: the batch.
            states: of so many columns, on the last stage.
            columns: their number.
        """
        layout = self.layout
        if layout.pipeline_size == 1:
            return states
        if layout.is_last_stage:
            dist.send(states.contiguous(), parallel_state.get_pipeline_model_parallel_first_rank())
        if layout.is_first_stage:
            return self._receive(rows, columns, parallel_state.get_pipeline_model_parallel_last_rank())
        return None

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Over the true vocabulary, on the last stage: [n, b, h] -> float32 [n, b, v]."""
        parts = self.stage.logits(states)
        whole = gather_from_tensor_model_parallel_region(parts, self.stage.tp_group)
        return whole[..., : self.vocab_size].float()

    def agree(self, values: Optional[torch.Tensor], shape: Tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """What the last stage has found, on all processes."""
        if not self.layout.is_last_stage:
            values = torch.empty(shape, dtype=dtype, device=self.layout.device)
        if dist.get_world_size() > 1:
            dist.broadcast(values, src=self.source)
        return values

    def _previous(self) -> int:
        return parallel_state.get_pipeline_model_parallel_prev_rank()

    def _receive(self, rows: Rows, columns: int, source: int) -> torch.Tensor:
        shape = (columns, len(rows.tokens), self.hidden_size)
        states = torch.empty(shape, dtype=self.stage.config.params_dtype, device=self.layout.device)
        dist.recv(states, source)
        return states


def native_config(
    step: Path, tensor: int = 1, pipeline: int = 1, dtype: Optional[str] = None, world_size: Optional[int] = None
) -> PretrainConfig:
    """The configuration of a checkpoint, changed to a layout of its own; starts and loads nothing.

    Args:
        step: the checkpoint's folder.
        tensor: tensor-parallel size.
        pipeline: pipeline-parallel size.
        dtype: "fp32", "bf16" or "fp16"; None = the run's.
        world_size: processes there are; None = as the launcher says.

    Raises:
        CheckpointError: the configuration is missing or damaged.
        ConfigError: the model cannot be cut so, or there is another number of processes.
    """
    config = copy.deepcopy(written_config(step))
    config.parallel, config.memory = ParallelConfig(tensor, pipeline), MemoryConfig()
    config.precision, config.model.transformer_impl = PrecisionConfig(dtype or config.precision.dtype), "torch"
    raise_problems(config.parallel.problems() + config.precision.problems())
    raise_problems(layout_problems(config))
    processes = world_size or launcher_number(os.environ, "WORLD_SIZE") or 1
    if processes != tensor * pipeline:
        raise ConfigError(
            f"{processes} processes: tensor_model_parallel_size {tensor} x pipeline_model_parallel_size {pipeline} "
            f"needs {tensor * pipeline}; start so many: python -m megatron_fbt.launch --nproc_per_node "
            f"{tensor * pipeline} ..."
        )
    return config


@contextlib.contextmanager
def load(
    checkpoint: Union[str, Path],
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    dtype: Optional[str] = None,
    vocab_size: Optional[int] = None,
) -> Iterator[NativeModel]:
    """A checkpoint's model, in a layout of its own, for as long as the context lasts; collective.

    Joins the launcher's process group, or makes one of this process alone, and leaves it in the end; one that is there
    already stays. An exception says in its attribute `speaks` whether this process is to tell the user about it.

    Args:
        checkpoint: as in find_step_folder, of any layout.
        tensor_model_parallel_size: processes that share each layer.
        pipeline_model_parallel_size: stages.
        dtype: "fp32", "bf16" or "fp16"; None = the run's.
        vocab_size: entries of the vocabulary; None = model.vocab_size.

    Raises:
        ConfigError: the model cannot be cut so, or there is another number of processes.
        CheckpointError: the checkpoint is damaged or of another model.
    """
    step = find_step_folder(checkpoint)
    there = dist.is_initialized()
    world_size = dist.get_world_size() if there else None
    config = native_config(step, tensor_model_parallel_size, pipeline_model_parallel_size, dtype, world_size)
    layout = None
    try:
        layout = initialize_parallel(config.parallel, config.run.seed)
        on_first_rank(lambda: check_files(step) and None, layout.cpu_group)
        stages: list = []
        size = vocab_size or config.model.vocab_size
        on_all_ranks(lambda: stages.append(load_stage(step, config, size, layout)), layout.cpu_group)
        yield NativeModel(stages[0], config)
    except BaseException as error:
        error.speaks = speaks_first()
        raise
    finally:
        if there:
            parallel_state.destroy_model_parallel()
        else:
            shut_down_parallel(layout)
