"""Runs whose weights are kept and gathered in 8 bits, and their checkpoints, over stand-ins for Transformer Engine."""

from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch

from megatron_fbt.config.load import dump_yaml
from megatron_fbt.core.checkpoint_io import read_tensors
from megatron_fbt.training.checkpoint import Checkpointer, read_weights
from megatron_fbt.training.run_folder import TrainerState
from tests.distributed.fp8_checkpoint_case import take
from tests.distributed.low_weights import LowTensor, install
from tests.distributed.model_case import Built, Case, Grid, build, start

SHARED = {
    "model.num_layers": 3,
    "model.make_vocab_size_divisible_by": 16,
    "precision.dtype": "bf16",
    "precision.fp8": "hybrid",
    "precision.fp8_fusion": True,
    "precision.num_layers_at_end_in_bf16": 1,
    "optimizer.sharding": "megatron",
}
LOW = Case("low", {**SHARED, "precision.fp8_param_gather": True})
BLOCKS = Case("blocks", {**LOW.overrides, "precision.fp8_recipe": "mxfp8"})
PLAIN = Case("plain", SHARED)
CASES = [LOW, BLOCKS, PLAIN]
RESUMED = [(LOW, LOW), (BLOCKS, BLOCKS), (LOW, PLAIN), (PLAIN, LOW)]
"""Cases, and whose checkpoint they go on from."""


def low_weights(built: Built) -> Dict[str, torch.Tensor]:
    """Those that are kept in 8 bits, dequantised."""
    named = built.stage.named_parameters()
    return {name: param.dequantize() for name, param in named if isinstance(param, LowTensor)}


def options(built: Built) -> Tuple[bool, bool, Optional[str]]:
    """What Megatron-Core was told: whether it gathers weights in FP8, and how, and the recipe."""
    buffers, optimizer = built.optimizer.model.ddp_config, built.optimizer.megatron.config
    assert buffers.reuse_grad_buf_for_mxfp8_param_ag == optimizer.reuse_grad_buf_for_mxfp8_param_ag
    return buffers.fp8_param_gather, buffers.reuse_grad_buf_for_mxfp8_param_ag, optimizer.fp8_recipe


def blank(built: Built) -> List[float]:
    """What layers make of memory that holds ones, before it is quantised for the first time."""
    methods = (built.stage.config.init_method, built.stage.config.output_layer_init_method)
    memories = [torch.ones(2) for _ in methods]
    for method, memory in zip(methods, memories):
        method(memory)
    return [memory.amax().item() for memory in memories]


def run(rank: int, world_size: int, grid: Grid, folder: Path) -> Dict[str, Any]:
    """Each case: two steps, saved, and two more; then every case from every checkpoint."""
    install()
    layout, found = start(grid), {}
    for case in CASES:
        built = build(case, grid, layout)
        found["kept", case.name] = sorted(low_weights(built))
        found["bytes", case.name] = built.optimizer.held_bytes().weights
        found["options", case.name] = options(built)
        found["blank", case.name] = blank(built)
        first = take(built, range(2))
        state = TrainerState(step=2, updates=2, fusion_updates=2)
        keeper = Checkpointer(folder / case.name, None, layout)
        keeper.save(built.stage, built.optimizer, state, dump_yaml(built.config))
        found["unbroken", case.name] = first + take(built, range(2, 4))
        found["end", case.name] = low_weights(built)
    checkpoints = {case.name: folder / case.name / "step_00000002" for case in CASES}
    for case, source in RESUMED:
        built = build(case, grid, layout)
        keeper = Checkpointer(checkpoints[source.name].parent, None, layout)
        keeper.load(checkpoints[source.name], built.stage, built.optimizer)
        found["resumed", case.name, source.name] = take(built, range(2, 4))
    built = build(LOW, grid, layout)
    Checkpointer(folder / "plain", None, layout).load_weights(checkpoints["plain"], built.stage, built.optimizer)
    found["begun"] = low_weights(built)
    found["stored"] = {name: read_tensors(checkpoint) for name, checkpoint in checkpoints.items()}
    found["exported"] = read_weights(checkpoints["low"])
    return found
