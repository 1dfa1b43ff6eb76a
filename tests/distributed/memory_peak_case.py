"""What test_memory_peaks.py asserts on: bytes of a step above its state, counted and estimated, on one rank."""

import gc
from dataclasses import dataclass, field
from typing import Any, Dict, List, Sequence, Tuple

import torch

from benchmarks.tensor_bytes import TensorBytes
from megatron_fbt.config.activation_memory import peak_activations
from megatron_fbt.config.feedback import PassPhase
from megatron_fbt.core.schedule import run_passes
from megatron_fbt.data.batch import MicroBatch, document_starts
from tests.distributed.model_case import EOD, Built, Case, Grid, build, start

LENGTH = 128
POLICIES = [("none", "all"), ("selective", "early"), ("selective", "all"), ("full", "early"), ("full", "all")]
WHOLE_ROWS = {"feedback.prefix.low": 0.0, "feedback.prefix.high": 0.0}
"""Prefixes of one position: extra passes compute all but one."""


@dataclass(frozen=True)
class Model:
    """Fields beside those of the tests' small model, and the policies and passes that are measured."""

    overrides: Dict[str, Any] = field(default_factory=dict)
    policies: Sequence[Tuple[str, str]] = (POLICIES[0], POLICIES[3], POLICIES[4])
    passes: Sequence[int] = (1, 2, 3)


MODELS = {
    "as many keys as queries": Model({"model.num_query_groups": 4}, POLICIES),
    "fewer keys": Model({}, POLICIES),
    "in full": Model({"feedback.prefix_reuse": False}, passes=(3,)),
    "whole logits": Model({"memory.chunked_loss": False, "training.z_loss.coefficient": 0.01}, passes=(3,)),
    "windows": Model({"model.sliding_window": 40, "model.window_attn_skip_freq": 2}, passes=(3,)),
    "wider attention": Model({"model.qk_layernorm": True, "model.attention_output_gate": True}, passes=(3,)),
}
PIPELINE = {"fewer keys": Model({}, POLICIES[::2])}


def rows(micro_batches: int, length: int = LENGTH) -> List[MicroBatch]:
    """Rows of one document."""
    text = torch.randint(1, 1003, (micro_batches, length + 1), generator=torch.Generator().manual_seed(5))
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    starts, numbers = document_starts(tokens, EOD), torch.arange(micro_batches)
    parts = (x.split(1) for x in (tokens, labels, torch.ones(tokens.shape), starts, numbers))
    return [MicroBatch(*part) for part in zip(*parts)]


def count(built: Built, batches: List[MicroBatch], passes: int) -> TensorBytes:
    """Bytes of a step's forward and backward above weights and gradients."""
    built.stage.train()
    built.optimizer.zero_grad()
    params = list(built.stage.parameters())
    gc.collect()
    with TensorBytes() as counted:
        counted.ignore(*params, *(param.main_grad for param in params))
        run_passes(built.stage, batches, passes, built.recipe)
    return counted


def measure(rank: int, world_size: int, grid: Grid, models: Dict[str, Model]) -> Dict[Tuple, Tuple[int, int, int]]:
    """{(model, recompute, recompute_passes, K): (peak, bytes left after the step, estimate)}."""
    layout, found = start(grid), {}
    for name, model in models.items():
        fields = {"data.sequence_length": LENGTH, "training.micro_batch_size": 1, **WHOLE_ROWS, **model.overrides}
        built = build(Case("", fields), grid, layout)
        batches = rows(4 if grid.pipeline > 1 else 1)
        count(built, batches, 2)
        for policy in model.policies:
            for passes in model.passes:
                _set(built, policy, passes)
                counted = count(built, batches, passes)
                estimate = sum(peak_activations(built.config, layout.pipeline_rank, 1003))
                found[name, *policy, passes] = (counted.peak, counted.now, estimate)
    return found


def one_graph(rank: int, world_size: int) -> Tuple[int, int, int]:
    """Peaks of K = 2 with a backward for each pass and with one for both, and bytes of the layers' weights."""
    fields = {"data.sequence_length": 32, "training.micro_batch_size": 1, "memory.recompute": "full"}
    built = build(Case("", fields), Grid(), start(Grid()))
    built.stage.reuses_prefix = False
    peaks = []
    for built.stage.one_backward in (False, True):
        peaks.append(count(built, rows(1, 32), 2).peak)
    return (*peaks, sum(4 * param.numel() for param in built.stage.decoder.layers.parameters()))


def _set(built: Built, policy: Tuple[str, str], passes: int) -> None:
    config = built.config
    config.memory.recompute, config.memory.recompute_passes = policy
    config.feedback.schedule = [PassPhase(0.0, {passes: 1.0})]
