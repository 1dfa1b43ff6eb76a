"""The model of a checkpoint in evaluation mode, and its logits by the training code itself, in one process."""

import copy
from pathlib import Path
from typing import List

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fbt.config.memory import MemoryConfig
from megatron_fbt.config.parallel import ParallelConfig
from megatron_fbt.config.plan import padded_vocab_size
from megatron_fbt.config.precision import PrecisionConfig
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.core.checkpoint_io import check_files, read_pieces
from megatron_fbt.core.cpu import on_gpu
from megatron_fbt.core.parallel import Layout, initialize_parallel, shut_down_parallel
from megatron_fbt.core.pieces import weight_pieces
from megatron_fbt.core.stage import FBTStage


def native_logits(
    checkpoint: Path, config: PretrainConfig, vocab_size: int, tokens: Tensor, starts: Tensor, passes: int
) -> List[Tensor]:
    """Logits of every pass, computed in float32 whatever the run's number format.

    Args:
        checkpoint: The step's folder, of any layout.
        config: What it was written with.
        vocab_size: Entries of the vocabulary.
        tokens: [N, T].
        starts: [N, T] bool, where documents begin; the first position of a row counts in any case.
        passes: Number of passes K.

    Returns:
        For each pass [N, T, vocab_size], float32, on the CPU.

    Raises:
        CheckpointError: The checkpoint is damaged or of another model.
    """
    config = copy.deepcopy(config)
    config.parallel, config.memory = ParallelConfig(), MemoryConfig()
    config.precision, config.model.transformer_impl = PrecisionConfig("fp32"), "torch"
    own_group = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # whatever a launcher's variables say
    dist.init_process_group("nccl" if on_gpu() else "gloo", **own_group)
    layout = None
    try:
        layout = initialize_parallel(config.parallel, config.run.seed)
        stage = load_stage(checkpoint, config, vocab_size, layout)
        return _run(stage, tokens, starts, passes)
    finally:
        shut_down_parallel(layout)


def load_stage(checkpoint: Path, config: PretrainConfig, vocab_size: int, layout: Layout) -> FBTStage:
    """This process's part of a checkpoint's model, in evaluation mode; every file that is read is checked.

    Args:
        checkpoint: The step's folder, of any layout.
        config: What it was written with, with the sections parallel and precision of this process.
        vocab_size: Entries of the vocabulary.
        layout: This process's place.

    Raises:
        CheckpointError: The checkpoint is damaged or of another model.
    """
    padded = padded_vocab_size(vocab_size, config.model.make_vocab_size_divisible_by, layout.tensor_size)
    stage = FBTStage(config, layout, vocab_size, padded).to(layout.device).eval()
    metadata = {"non_homogeneous_layers": True, "dp_cp_group": layout.data_group}
    wanted = stage.sharded_state_dict(metadata=metadata)
    pieces = [piece for parts in weight_pieces(wanted).values() for piece in parts]
    read_pieces(pieces, checkpoint, check_files(checkpoint))
    return stage


@torch.no_grad()
def _run(stage: FBTStage, tokens: Tensor, starts: Tensor, passes: int) -> List[Tensor]:
    """Row by row, so that little beside the model and the results is in memory."""
    found: List[List[Tensor]] = [[] for _ in range(passes)]
    for row, begins in zip(tokens.split(1), starts.split(1), strict=True):
        row, begins = row.to(stage.layout.device), begins.to(stage.layout.device).clone()
        begins[:, 0] = True
        states = None
        for logits in found:
            inputs = stage.first_inputs(row, states, None if states is None else ~begins.t())
            states = stage.run_layers(inputs, begins)
            logits.append(stage.logits(states).transpose(0, 1)[..., : stage.vocab_size].float().cpu())
    return [torch.cat(logits) for logits in found]
