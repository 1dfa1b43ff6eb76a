"""Checkpoints of runs with Transformer Engine's delayed recipe, over layers of its shape.

Each of the stand-ins has `fp8_meta`, empty until `init_fp8_metadata` is called in a context, as its first forward does,
and then scales and histories of its three forward and two backward operands, which round what it computes.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict

import torch
from megatron.core import tensor_parallel

from megatron_fbt.config.load import dump_yaml
from megatron_fbt.core.checkpoint_io import read_tensors
from megatron_fbt.core.fp8 import EXTRA_STATE, fp8_state
from megatron_fbt.errors import CheckpointError
from megatron_fbt.model.fp8 import E4M3, E5M2, largest, quantise, scale_of
from megatron_fbt.training.checkpoint import Checkpointer, read_weights
from megatron_fbt.training.run_folder import TrainerState
from tests.distributed.engine import replace_engine
from tests.distributed.fp8_checkpoint_case import take
from tests.distributed.fp8_context_case import Recorder
from tests.distributed.model_case import Built, Case, Grid, build, start

SMALL = {
    "model.num_layers": 2,
    "model.make_vocab_size_divisible_by": 16,
    "precision.fp8": "hybrid",
    "precision.fp8_amax_history_len": 16,
    "precision.fp8_recipe": "delayed",
}
ENGINE = Case("engine", {**SMALL, "precision.dtype": "bf16"})
LONGER = Case("longer", {**ENGINE.overrides, "precision.fp8_amax_history_len": 17})
DEEPER = Case("deeper", {**ENGINE.overrides, "model.num_layers": 3})
EMULATED = Case("emulated", {**ENGINE.overrides, "precision.fp8_emulated": True})
TENSORWISE = Case("tensorwise", {**ENGINE.overrides, "precision.fp8_recipe": "tensorwise"})
RESUMED = [(ENGINE, ENGINE), (LONGER, ENGINE), (TENSORWISE, ENGINE), (EMULATED, ENGINE), (ENGINE, EMULATED)]
"""Cases, and whose checkpoint they go on from."""
RECORDER = Recorder()


class Rounded(torch.autograd.Function):
    """Rounds a matrix forward, or its gradient backward, with an earlier scale, and updates the scale."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, state: Any, dtype: torch.dtype, backward: bool, update: bool) -> torch.Tensor:
        """[s, b, h]; operand 0 of the state is this one."""
        ctx.arguments = state, dtype, update
        ctx.rounds = backward
        return x.clone() if backward else rounded(x, state, dtype, update)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        """See above."""
        return rounded(grad, *ctx.arguments) if ctx.rounds else grad, None, None, None, None


def rounded(x: torch.Tensor, state: Any, dtype: torch.dtype, update: bool) -> torch.Tensor:
    """With the state's scale, which the largest value then changes."""
    low = quantise(x.flatten(0, -2), dtype, None, scale=state.scale[0]).float().view(x.shape).to(x.dtype)
    if update:
        state.amax_history.copy_(state.amax_history.roll(-1, 0))
        state.amax_history[-1, 0] = largest(x)
        state.scale[0] = scale_of(state.amax_history[:, 0].max(), dtype)
    return low


class EngineLayer:
    """Goes before Megatron-Core's parallel linear layers in the list of bases."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.fp8_meta: Dict[str, Any] = {"fp8_checkpoint": False}

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """In a context of the delayed recipe."""
        assert RECORDER.active[-1].recipe == "delayed"
        if "scaling_fwd" in self.fp8_meta:
            return
        length = self.config.fp8_amax_history_len
        for direction, operands in (("fwd", 3 * num_gemms), ("bwd", 2 * num_gemms)):
            state = SimpleNamespace(scale=torch.ones(operands), amax_history=torch.zeros(length, operands))
            self.fp8_meta[f"scaling_{direction}"] = state

    def _forward_impl(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.config.fp8_recipe != "delayed":
            return super()._forward_impl(input, *args, **kwargs)
        self.init_fp8_metadata()
        update = torch.is_grad_enabled()
        input = Rounded.apply(input, self.fp8_meta["scaling_fwd"], E4M3, False, update)
        output = super()._forward_impl(input, *args, **kwargs)
        return Rounded.apply(output, self.fp8_meta["scaling_bwd"], E5M2, True, update)


class EngineColumn(EngineLayer, tensor_parallel.ColumnParallelLinear):
    """Rounds inputs and output gradients."""


class EngineRow(EngineLayer, tensor_parallel.RowParallelLinear):
    """Rounds inputs and output gradients."""


def held(built: Built) -> Dict[str, Dict[str, torch.Tensor]]:
    """A copy of the recipe's memory."""
    return {name: {kind: t.clone() for kind, t in kinds.items()} for name, kinds in fp8_state(built.stage)}


def load(case: Case, layout: Any, grid: Grid, checkpoint: Path) -> Built:
    """A case's model with a checkpoint's values, before its first forward."""
    built = build(case, grid, layout)
    Checkpointer(checkpoint.parent, None, layout).load(checkpoint, built.stage, built.optimizer)
    return built


def run(rank: int, world_size: int, grid: Grid, folder: Path) -> Dict[str, Any]:
    """Two steps of two recipes, saved, and two more; then runs that go on from them."""
    replace_engine(EngineColumn, EngineRow, RECORDER.get_fp8_context)
    layout, found = start(grid), {}
    for case in (ENGINE, EMULATED):
        built = build(case, grid, layout)
        found["new", case.name] = held(built)
        take(built, range(2))
        state = TrainerState(step=2, updates=2, fusion_updates=2)
        keeper = Checkpointer(folder / case.name, None, layout)
        keeper.save(built.stage, built.optimizer, state, dump_yaml(built.config))
        found["saved", case.name] = held(built)
        found["unbroken", case.name] = take(built, range(2, 4))
    for case, source in RESUMED:
        built = load(case, layout, grid, folder / source.name / "step_00000002")
        found["loaded", case.name, source.name] = held(built)
        found["resumed", case.name, source.name] = take(built, range(2, 4))
    engine = folder / "engine" / "step_00000002"
    try:
        load(DEEPER, layout, grid, engine)
    except CheckpointError as error:
        found["deeper"] = str(error)
    found["stored"] = {n: t for n, t in read_tensors(engine).items() if n.startswith(EXTRA_STATE)}
    found["exported"] = [*read_weights(engine)]
    return found
