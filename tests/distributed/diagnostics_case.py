"""Diagnostics and sequential validation: measured by the passes in a layout, and by hand in one process."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Dict, List

import torch

from megatron_fbt.core.parallel import Layout
from megatron_fbt.core.schedule import run_passes
from megatron_fbt.core.sequential import SequentialRecipe, score_answers
from megatron_fbt.data.batch import MicroBatch
from megatron_fbt.feedback.diagnostics import PassDiagnostics
from megatron_fbt.feedback.jitter import jitter_noise
from megatron_fbt.model.layers import rms_normalize
from tests.distributed.model_case import SEQUENCE, Built, Case, Grid, build, global_batch, own_part, start
from tests.distributed.run_case import SHARP_PHASE, run, run_config

PASSES = 3
HALF = SEQUENCE // 2
SETTLED = HALF + 2
"""Passes after which all positions of a row hold their recurrent values, whatever the weights, even for FUSED(1)."""
COUNTED = ("aten::", "c10d::", "gloo:")
"""Beginnings of the names of operators and collectives."""
CASE = Case("", {"feedback.jitter.scale": 0.1, "feedback.loss_weights.per_pass": [1.0, 2.0]})


def one_document(batch: MicroBatch) -> MicroBatch:
    """The same rows as one document each."""
    starts = torch.zeros_like(batch.document_starts)
    starts[:, 0] = True
    return dataclasses.replace(batch, document_starts=starts)


def sharpen(built: Built) -> None:
    """Larger gate weights, so that some gates are saturated."""
    with torch.no_grad():
        built.stage.fusion.token_gate.weight.mul_(4.0)


def measure(rank: int, world_size: int, grid: Grid) -> Dict[str, Dict[str, float]]:
    """What a layout's passes say."""
    layout = start(grid)
    built = build(CASE, grid, layout)
    if layout.is_first_stage:
        sharpen(built)
    diagnostics = PassDiagnostics(PASSES, layout)
    built.optimizer.zero_grad()
    batches = own_part(global_batch(0), layout)
    run_passes(built.stage, batches, PASSES, built.recipe, diagnostics=diagnostics)
    found = {"health": diagnostics.reduce()}
    for fused_passes in (0, 1):
        shard = SEQUENCE // layout.sequence_shards
        recipe = SequentialRecipe(
            built.config.feedback,
            1,
            training=False,
            fused_passes=fused_passes,
            last_pass=SETTLED,
            first_row=layout.tensor_rank * shard if layout.sequence_shards > 1 else 0,
        )
        rows = score_answers([one_document(batch) for batch in batches])
        with torch.no_grad():
            totals = run_passes(built.stage, rows, SETTLED, recipe, forward_only=True)
        assert not recipe.prompts
        sums = torch.cat([totals.nll, totals.tokens[None]])
        if not (layout.is_last_stage and layout.tensor_rank == 0):
            sums.zero_()
        torch.distributed.all_reduce(sums)
        found[f"fused {fused_passes}"] = (sums[:-1] / sums[-1]).tolist()
    return found


def by_hand(rank: int, world_size: int) -> Dict[str, Dict[str, float]]:
    """The same numbers from states that are all kept, position by position."""
    layout: Layout = start(Grid())
    built = build(CASE, Grid(), layout)
    sharpen(built)
    with torch.no_grad():
        batches = global_batch(0)
        found = {"health": health(built, batches)}
        for fused_passes in (0, 1):
            rows = [one_document(batch) for batch in batches]
            found[f"fused {fused_passes}"] = answer_loss(built, rows, fused_passes)
    return found


def health(built: Built, batches: List[MicroBatch]) -> Dict[str, float]:
    """Norms and shares by loops over positions."""
    recipe, stage = built.recipe, built.stage
    squares = {name: [0.0] * (PASSES + 1) for name in ("update", "open", "state", "values", "fused")}
    gates: List[torch.Tensor] = []
    for batch in batches:
        states = []
        for k in range(1, PASSES + 1):
            inputs = stage.first_inputs(batch.tokens, None, None)
            if k > 1:
                noise = jitter_noise(recipe.jitter_scale, batch.sample_ids, torch.arange(SEQUENCE), k, 64, recipe.seed)
                fused = recipe.fused(batch, k).t()
                inputs = stage.first_inputs(batch.tokens, states[-1] + noise, fused)
                squares["fused"][k] += fused.sum().item()
            states.append(stage.run_layers(inputs, batch.document_starts))
            for row in range(len(batch.tokens)):
                for t in range(SEQUENCE):
                    if batch.loss_mask[row, t] == 0:
                        continue
                    h = states[-1][t, row].double()
                    squares["state"][k] += h.square().sum().item()
                    squares["values"][k] += h.numel()
                    if k > 1 and t >= k:
                        squares["update"][k] += (h - states[-2][t, row].double()).square().sum().item()
                        squares["open"][k] += h.square().sum().item()
        normed = rms_normalize(stage.embed(batch.tokens), stage.config.layernorm_epsilon)
        gates.append(torch.sigmoid(normed @ stage.fusion.token_gate.weight.t()))
    gate = torch.stack(gates)
    found = {"gate_low_share": (gate < 0.05).float().mean().item()}
    found["gate_high_share"] = (gate > 0.95).float().mean().item()
    positions = len(batches) * batches[0].tokens.numel()
    for k in range(1, PASSES + 1):
        found[f"state_rms_pass_{k}"] = (squares["state"][k] / squares["values"][k]) ** 0.5
        if k > 1:
            found[f"update_norm_pass_{k}"] = (squares["update"][k] / squares["open"][k]) ** 0.5
            found[f"fused_share_pass_{k}"] = squares["fused"][k] / positions
    return found


def answer_loss(built: Built, batches: List[MicroBatch], fused_passes: int) -> float:
    """Mean NLL over the second halves, token by token after the prompt."""
    stage, total, tokens = built.stage, 0.0, 0.0
    for batch in batches:
        head = batch.tokens[:, :HALF]
        starts = batch.document_starts
        inputs = stage.first_inputs(head, None, None)
        for _ in range(fused_passes):
            states = stage.run_layers(inputs, starts[:, :HALF])
            inputs = stage.first_inputs(head, states, ~starts[:, :HALF].t())
        states = [stage.run_layers(inputs, starts[:, :HALF])]
        for t in range(HALF, SEQUENCE):
            u = step_input(built, batch.tokens[:, t : t + 1], states[-1][-1:])
            inputs = torch.cat([inputs, u])
            states.append(stage.run_layers(inputs, starts[:, : t + 1])[-1:])
        nll = stage.losses(torch.cat(states), batch.labels)[HALF - 1 :] * batch.loss_mask.t()[HALF - 1 :]
        total, tokens = total + nll.sum().item(), tokens + batch.loss_mask[:, HALF - 1 :].sum().item()
    return total / tokens


def step_input(built: Built, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """u = N((W_U h) * sigmoid(W_G N(e))), [1, b, h], written out."""
    stage, eps = built.stage, built.stage.config.layernorm_epsilon
    gate = torch.sigmoid(rms_normalize(stage.embed(tokens), eps) @ stage.fusion.token_gate.weight.t())
    return rms_normalize((states @ stage.fusion.state_proj.weight.t()) * gate, eps)


def step_costs(rank: int, world_size: int, folder: str, corpus: str) -> Dict[str, List[Dict[str, int]]]:
    """The profiler's counts of a run without diagnostics and of one that measures in every tenth step.

    Returns:
        {run: [{operator or collective: calls} of each step in which there may be several passes]}.
    """
    from megatron_fbt.training.trainer import Trainer

    plain, found = Trainer._step, {}
    # The first run of a process fills caches.
    for name, interval in (("first", None), ("off", None), ("on", 10)):
        costs = found[name] = []

        def step(trainer, signals, costs=costs):
            if trainer.state.step < SHARP_PHASE:
                return plain(trainer, signals)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
                result = plain(trainer, signals)
            # Autograd adds gradients in place or not as references to them happen to live: one operator here.
            counts = Counter()
            for event in profiler.key_averages():
                if event.key.startswith(COUNTED):
                    counts[event.key.rstrip("_")] += event.count
            costs.append(counts)
            return result

        Trainer._step = step
        layout = (world_size, 1)
        # With prefix reuse a step that measures also gathers what passes have not computed.
        fields = {"logging__diagnostics_interval": interval, "feedback__prefix_reuse": False}
        config = run_config(Path(folder) / name, corpus, layout, **fields)
        assert run(config) == "finished"
    Trainer._step = plain
    return found
