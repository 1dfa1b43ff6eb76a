"""Checkpoints of emulated FP8 runs with and without the delayed recipe's memory."""

from pathlib import Path
from typing import Dict, List, Tuple

import torch

from megatron_fbt.config.load import dump_yaml
from megatron_fbt.core.checkpoint_io import read_tensors
from megatron_fbt.core.fp8 import EXTRA_STATE, fp8_state
from megatron_fbt.core.parallel import Layout
from megatron_fbt.errors import CheckpointError
from megatron_fbt.training.checkpoint import Checkpointer, read_weights
from megatron_fbt.training.run_folder import TrainerState
from tests.distributed.fp8_case import DELAYED, SMALL
from tests.distributed.model_case import Built, Case, Grid, build, global_batch, own_part, start

DELAYED_RUN = Case("delayed", {**SMALL, **DELAYED})
PLAIN = Case("tensorwise", SMALL)
SHORTER = Case("shorter", {**DELAYED_RUN.overrides, "precision.fp8_amax_history_len": 2})
DEEPER = Case("deeper", {**DELAYED_RUN.overrides, "model.num_layers": 3})


def take(built: Built, steps: range) -> List:
    """Two-pass steps."""
    reports = []
    for step in steps:
        built.optimizer.zero_grad()
        totals = built.run(own_part(global_batch(step)[:4], built.layout), 2)
        reports.append(built.optimizer.step(totals, True, False))
    return reports


def save(rank: int, world_size: int, grid: Grid, folder: Path) -> Tuple[List, Dict]:
    """Two steps of both recipes, saved, and two more; the later reports of each, and the delayed one's memory."""
    layout, found, held = start(grid), [], {}
    for case in (DELAYED_RUN, PLAIN):
        built = build(case, grid, layout)
        take(built, range(2))
        state = TrainerState(step=2, updates=2, fusion_updates=2)
        Checkpointer(folder / case.name, None, layout).save(
            built.stage, built.optimizer, state, dump_yaml(built.config)
        )
        held.update({name: {kind: t.clone() for kind, t in kinds.items()} for name, kinds in fp8_state(built.stage)})
        found.append(take(built, range(2, 4)))
    return found, held


def load(layout: Layout, grid: Grid, case: Case, checkpoint: Path) -> Built:
    """A case's model with a checkpoint's values."""
    built = build(case, grid, layout)
    Checkpointer(checkpoint.parent, None, layout).load(checkpoint, built.stage, built.optimizer)
    return built


def resume(rank: int, world_size: int, grid: Grid, folder: Path) -> Dict:
    """Each recipe from each checkpoint."""
    layout = start(grid)
    delayed, plain = (folder / case.name / "step_00000002" for case in (DELAYED_RUN, PLAIN))
    found = {}
    for case, checkpoint in ((DELAYED_RUN, delayed), (PLAIN, plain), (PLAIN, delayed), (DELAYED_RUN, plain)):
        built = load(layout, grid, case, checkpoint)
        fresh = all(not kinds["amax_history"].any() for _, kinds in fp8_state(built.stage))
        found[case.name, checkpoint.parent.name] = (fresh, take(built, range(2, 4)))
    found["shorter"] = all(
        not kinds["amax_history"].any() for _, kinds in fp8_state(load(layout, grid, SHORTER, delayed).stage)
    )
    try:
        load(layout, grid, DEEPER, delayed)
    except CheckpointError as error:
        found["deeper"] = str(error)
    stored = [name for name in read_tensors(delayed) if name.startswith(EXTRA_STATE)]
    found["stored"], found["exported"] = stored, [*read_weights(delayed)]
    found["types"] = {str(tensor.dtype) for tensor in read_weights(delayed).values()}
    assert torch.float8_e4m3fn not in found["types"]
    return found
