"""Emulated FP8 in one layout: layers against a plain reference, and steps of a small model."""

from dataclasses import dataclass
from typing import Any, Dict, List, Tuple

import torch
from megatron.core import tensor_parallel

from megatron_fbt.core.fp8 import EmulatedProducts, begin_step, fp8_state
from megatron_fbt.core.parallel import Layout
from megatron_fbt.core.schedule import run_passes
from megatron_fbt.core.specs import transformer_config
from megatron_fbt.model.fp8 import E4M3, E5M2, SCALINGS, quantise
from megatron_fbt.training.lr_schedule import LearningRate
from tests.distributed.model_case import Case, Grid, build, global_batch, own_part, piece, start

ROWS_USED = 4
"""Micro-batches of a step."""
SMALL = {"model.num_layers": 2, "precision.fp8": "hybrid", "precision.fp8_emulated": True}
DELAYED = {"precision.fp8_recipe": "delayed", "precision.fp8_amax_history_len": 3}


@dataclass
class Steps:
    """What some steps of a case did on one rank."""

    reports: List[Any]
    final: Any
    state: Dict[str, Dict[str, torch.Tensor]]
    """Of the delayed recipe, by module and name."""
    counts: List[Dict[str, int]]
    """For each step: how often each operand kind of each module was quantised, {module.kind: count}."""


def count_quantisations(stage) -> Dict[str, int]:
    """Count from now on; the dictionary fills as the model runs."""
    counts: Dict[str, int] = {}
    for name, module in stage.named_modules():
        if not isinstance(module, EmulatedProducts):
            continue
        for kind, operand in module.operands.items():
            key, plain = f"{name}.{kind}", type(operand).__call__

            class Counted(type(operand)):
                """An operand that counts its calls."""

                def __call__(self, x, remember, key=key, plain=plain):
                    counts[key] = counts.get(key, 0) + 1
                    return plain(self, x, remember)

            operand.__class__ = Counted
    return counts


def run_steps(case: Case, grid: Grid, layout: Layout) -> Steps:
    """Optimizer steps of a case, with a validation of other rows after each."""
    built = build(case, grid, layout)
    counts, per_step, reports, active = count_quantisations(built.stage), [], [], False
    for step, passes in enumerate(case.passes):
        active = active or passes > 1
        LearningRate(built.config.optimizer, 0, 1000).apply(built.optimizer, 0)
        built.stage.train()
        built.optimizer.zero_grad()
        counts.clear()
        totals = run_passes(
            built.stage,
            own_part(global_batch(step)[:ROWS_USED], layout),
            passes,
            built.recipe,
            on_last_backward=built.optimizer.on_last_backward,
            through=built.optimizer.through,
        )
        per_step.append(dict(counts))
        reports.append(built.optimizer.step(totals, active, False))
        built.stage.eval()
        with torch.no_grad():
            run_passes(
                built.stage,
                own_part(global_batch(50 + step), layout)[:2],
                2,
                built.recipe,
                forward_only=True,
                through=built.optimizer.through,
            )
    state = {name: {k: t.clone() for k, t in held.items()} for name, held in fp8_state(built.stage)}
    weights = dict(built.stage.named_parameters())
    zero3 = case.overrides.get("optimizer.sharding") == "zero3"
    return Steps(reports, None if zero3 else piece(built, weights), state, per_step)


def run_fp8(rank: int, world_size: int, grid: Grid, cases: List[Case]) -> Dict[str, Steps]:
    """Steps of several cases in one layout."""
    layout = start(grid)
    return {case.name: run_steps(case, grid, layout) for case in cases}


def layer_reference(
    x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, recipe: str, parts: int, column: bool
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output and gradients of a whole layer whose `parts` tensor-parallel shards scale by themselves.

    Args:
        x: [n, i].
        weight: [o, i].
        grad: [n, o].
        recipe: of precision.
        parts: shards.
        column: whether outputs are split; else inputs are.
    """
    scaling = SCALINGS[recipe]
    along, two = scaling.activations, scaling.power_of_two
    across, weight_across = along and along[::-1], scaling.weights and scaling.weights[::-1]
    y, x_grad, weight_grad = torch.zeros_like(grad), torch.zeros_like(x), torch.zeros_like(weight)
    for part in range(parts):
        outs, ins = [slice(None)] * 2
        size = (weight.size(0) if column else weight.size(1)) // parts
        if column:
            outs = slice(part * size, (part + 1) * size)
        else:
            ins = slice(part * size, (part + 1) * size)
        own_x, own_w, own_g = x[:, ins], weight[outs, ins], grad[:, outs]
        y[:, outs] += (
            quantise(own_x, E4M3, along, two).float() @ quantise(own_w, E4M3, scaling.weights, two).float().t()
        )
        x_grad[:, ins] += quantise(own_g, E5M2, along, two).float() @ quantise(own_w, E4M3, weight_across, two).float()
        weight_grad[outs, ins] = (
            quantise(own_g, E5M2, across, two).float().t() @ quantise(own_x, E4M3, across, two).float()
        )
    return y, x_grad, weight_grad


def layers(rank: int, world_size: int) -> Dict[Tuple[str, str, bool], float]:
    """Largest relative error of output and gradients against the reference, by (recipe, kind, sequence parallel)."""
    from megatron_fbt.core.fp8 import emulated

    layout = start(Grid(tensor=world_size))
    generator = torch.Generator().manual_seed(3)
    x, weight, grad = (
        torch.randn(shape, generator=generator) * torch.exp(torch.randn(shape, generator=generator))
        for shape in ((256, 1, 256), (256, 256), (256, 1, 256))
    )
    found = {}
    for recipe in ("tensorwise", "blockwise", "mxfp8"):
        for kind in (tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear):
            for sequence in [False, True][:world_size]:
                grid = Grid(tensor=world_size, sequence_parallel=sequence)
                config = Case("", {**SMALL, "precision.fp8_recipe": recipe}).config(grid)
                column = kind is tensor_parallel.ColumnParallelLinear
                options = {"gather_output": False} if column else {"input_is_parallel": True, "skip_bias_add": True}
                mcore = transformer_config(config)
                layer = emulated(kind, config.precision)(
                    256, 256, config=mcore, init_method=mcore.init_method, bias=False, **options
                )
                split = 0 if column else 1
                own = weight.chunk(world_size, split)[layout.tensor_rank]
                layer.weight.data.copy_(own)
                begin_step(layer)
                rows = layout.tensor_rank if sequence else 0
                shards = world_size if sequence else 1

                def local(t, is_split, rows=rows, shards=shards):
                    """A rank's part: by channel where the layer splits it, else by position."""
                    return t.chunk(world_size, 2)[layout.tensor_rank] if is_split else t.chunk(shards)[rows]

                leaf = local(x, not column).clone().requires_grad_()
                out = layer(leaf)[0]
                out.backward(local(grad, column))
                y, x_grad, weight_grad = layer_reference(x[:, 0], weight, grad[:, 0], recipe, world_size, column)
                pairs = [
                    (out, local(y[:, None], column)),
                    (leaf.grad, local(x_grad[:, None], not column)),
                    (layer.weight.grad, weight_grad.chunk(world_size, split)[layout.tensor_rank]),
                ]
                errors = [((a - b).norm() / b.norm()).item() for a, b in pairs]
                found[recipe, kind.__name__, sequence] = max(errors)
    return found
