"""What test_muon.py asserts on: Muon in Megatron-Core's wrappers beside loops written with torch alone."""

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List

import torch

from megatron_fbt.core.grad_sync import reduce_gradients
from megatron_fbt.core.muon import hidden_matrices
from megatron_fbt.training.lr_schedule import LearningRate
from tests.distributed.model_case import Built, Grid, Piece, build, piece, start
from tests.distributed.recipe_case import cut, in_layout, rows, small
from tests.distributed.states import whole_state

PASSES = (1, 1, 2, 1, 3)
"""The fusion layer wakes up in the third step and has no gradient in the fourth."""
SAMPLES = 20
"""Length of the learning-rate schedule; a step reads four rows."""
SETTINGS = {
    "optimizer__type": "muon",
    "optimizer__lr": 3e-3,
    "optimizer__min_lr": 1e-3,
    "optimizer__muon_lr": 0.02,
    "optimizer__muon_weight_decay": 0.3,
    "optimizer__muon_momentum": 0.9,
    "optimizer__muon_ns_steps": 4,
    "optimizer__clip_grad": 1.5,
    "model__qk_layernorm": True,
}
VARIANTS: Dict[str, Dict[str, Any]] = {
    "grouped queries": {"model__num_attention_heads": 4, "model__num_query_groups": 2},
    "one query group": {"model__num_query_groups": 1, "optimizer__muon_adjust_lr_fn": "match_rms_adamw"},
    "untied, output gate": {"model__share_embeddings_and_output_weights": False, "model__attention_output_gate": True},
    "concat": {"feedback__fusion": "concat"},
    "bf16": {"precision__dtype": "bf16"},
}


@dataclass
class Loop:
    """Weights and moments (Muon's momentum or AdamW's first moment) at the beginning and after every step."""

    weights: List[Piece]
    moments: List[Piece]
    norms: List[float]


def ours(built: Built) -> Loop:
    """Five steps by the optimizer under test."""
    schedule, loop, active = LearningRate(built.config.optimizer, 0, SAMPLES), Loop([], [], []), False
    _record(built, loop)
    for step, passes in enumerate(PASSES):
        active = active or passes > 1
        schedule.apply(built.optimizer, 4 * step)
        built.optimizer.zero_grad()
        totals = built.run(cut(rows(), 1, built.layout), passes)
        loop.norms.append(built.optimizer.step(totals, active, False).grad_norm)
        _record(built, loop)
    return loop


def _record(built: Built, loop: Loop) -> None:
    weights = dict(built.stage.named_parameters())
    states = {name: whole_state(built.optimizer.megatron, w, built.layout.data_group) for name, w in weights.items()}
    assert all(state["master"].to(weights[name].dtype).equal(weights[name]) for name, state in states.items())
    moments = {name: state.get("momentum_buffer", state.get("exp_avg")) for name, state in states.items()}
    loop.weights.append(piece(built, weights))
    loop.moments.append(piece(built, moments))


def separate(name: str, weight: torch.Tensor, config) -> List[torch.Tensor]:
    """The matrices in a weight, by hand: which rows of it belong to query, output gate, key, value, or gate and up."""
    model = config.model
    if name.endswith("linear_fc1.weight"):
        return [weight[: model.ffn_size].clone(), weight[model.ffn_size :].clone()]
    if not name.endswith("linear_qkv.weight"):
        return [weight.clone()]
    kinds = []
    heads = model.num_attention_heads // model.query_groups
    for _ in range(model.query_groups):
        kinds += ["q"] * heads + ["gate"] * heads * model.attention_output_gate + ["k", "v"]
    owner = [kind for kind in kinds for _ in range(model.head_size)]
    assert len(owner) == len(weight)
    return [weight[[row == kind for row in owner]].clone() for kind in ("q", "gate", "k", "v") if kind in owner]


def by_torch(built: Built) -> Loop:
    """The same steps by torch.optim.Muon and torch.optim.AdamW on copies of the weights."""
    config, stage = built.config, built.stage
    options, loop = config.optimizer, Loop([piece(built, dict(stage.named_parameters()))], [], [])
    names = [name for name, _ in stage.named_parameters()]
    hidden = [n for n in names if n.endswith("weight") and ("linear" in n or "fusion" in n)]
    assert sorted(hidden) == sorted(hidden_matrices(stage))
    parts = {
        name: [
            torch.nn.Parameter(part)
            for part in (separate(name, param.detach().float(), config) if name in hidden else [param.detach().float()])
        ]
        for name, param in stage.named_parameters()
    }
    optimizers = {}
    for name in names:
        if name in hidden:
            muon = {"momentum": options.muon_momentum, "ns_steps": options.muon_ns_steps}
            optimizers[name] = torch.optim.Muon(parts[name], adjust_lr_fn=options.muon_adjust_lr_fn, **muon)
        else:
            optimizers[name] = torch.optim.AdamW(parts[name], betas=(0.9, 0.95), eps=1e-8)
    for step in range(len(PASSES)):
        built.optimizer.zero_grad()
        built.run(cut(rows(), 1, built.layout), PASSES[step])
        reduce_gradients(built.optimizer.model)
        found = {name: param.main_grad.clone() for name, param in stage.named_parameters()}
        tokens = rows().loss_mask.sum().item()
        norm = sum((value.double() / tokens).square().sum() for value in found.values()).sqrt().item()
        decay = min(1.0, (SAMPLES - 4 * step) / 5)
        loop.norms.append(norm)
        for name, optimizer in optimizers.items():
            if name.startswith("fusion.") and step < 2:
                continue
            group, gradient = optimizer.param_groups[0], found[name] * (min(1.0, 1.5 / (norm + 1e-6)) / tokens)
            if name in hidden:
                group["lr"], group["weight_decay"] = 0.02 * (1 / 3 + 2 / 3 * decay), 0.3
            else:
                group["lr"], group["weight_decay"] = 1e-3 + 2e-3 * decay, 0.1 if gradient.dim() == 2 else 0.0
            for part, value in zip(parts[name], separate(name, gradient, config) if name in hidden else [gradient]):
                part.grad = value
            optimizer.step()
        with torch.no_grad():
            for name, param in stage.named_parameters():
                param.copy_(joined(name, parts[name], config))
        loop.weights.append(piece(built, dict(stage.named_parameters())))
    return loop


def joined(name: str, parts: List[torch.Tensor], config) -> torch.Tensor:
    """The inverse of `separate`, through the numbers of the rows."""
    if len(parts) == 1:
        return parts[0].detach()
    height = sum(len(part) for part in parts)
    places = separate(name, torch.arange(height)[:, None], config)
    weight = torch.empty(height, parts[0].size(1))
    for rows_, part in zip(places, parts):
        weight[rows_[:, 0]] = part.detach()
    return weight


@contextmanager
def iterated_in_float32() -> Iterator[None]:
    """torch.optim.Muon rounds a gradient to bfloat16 before it iterates, and the iteration enlarges what differs.

    Layouts sum in other orders, so only without that rounding can their steps be compared.
    """
    rounds = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = torch.Tensor.clone
    try:
        yield
    finally:
        torch.Tensor.bfloat16 = rounds


def alone(rank: int, world_size: int) -> Dict[str, Any]:
    """{variant: (ours, by torch)} in one process; "" is what other layouts are compared with."""
    layout = start(Grid())
    with iterated_in_float32():
        found = {"": ours(build(small("", **SETTINGS, **VARIANTS["grouped queries"]), Grid(), layout))}
    for name, fields in VARIANTS.items():
        case = small(name, **SETTINGS, **fields)
        found[name] = (ours(build(case, Grid(), layout)), by_torch(build(case, Grid(), layout)))
    return found


def together(rank: int, world_size: int) -> Dict[str, Loop]:
    """The first variant in layouts of two processes, gradients reduced while the last backward runs."""
    case = small("", **SETTINGS, **VARIANTS["grouped queries"], parallel__overlap_grad_reduce=True)
    grids = (Grid(data=2), Grid(pipeline=2))
    with iterated_in_float32():
        return {str(g): in_layout(g, {"": lambda layout, g=g: ours(build(case, g, layout))})[""] for g in grids}
