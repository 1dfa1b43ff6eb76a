"""Optimizer state of a parameter in the parameter's own shape, whatever Megatron-Core's optimizer keeps it as.

The distributed optimizer holds flat ranges that follow its buckets. Checkpoints hold, for every parameter, tensors of
the parameter's shape, so that a run goes on in another layout and with sharding switched on or off; each rank writes
and reads the boxes that its ranges are.
"""

from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

import torch
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_fbt.core.muon import MOMENTUM, muon_of

MASTER = "master"
MOMENTS = ("exp_avg", "exp_avg_sq")


def _has_master(param: torch.nn.Parameter) -> bool:
    """A float32 weight is what is stepped; any other has a float32 master."""
    return param.dtype != torch.float32


def _moments(optimizer: MegatronOptimizer, param: torch.nn.Parameter) -> Tuple[str, ...]:
    muon = muon_of(optimizer)
    return (MOMENTUM,) if muon is not None and _main_param(optimizer, param) in muon.blocks else MOMENTS


def _main_param(optimizer: MegatronOptimizer, param: torch.nn.Parameter) -> Optional[torch.Tensor]:
    """The fp32 tensor that the inner optimizer steps for (this rank's part of) a parameter; None if it has no part."""
    if not isinstance(optimizer, DistributedOptimizer):
        return getattr(param, "main_param", param)
    if param not in optimizer.model_param_gbuf_map:
        return None
    group, order = optimizer.model_param_group_index_map[param]
    return optimizer.optimizer.param_groups[group]["params"][order]


def _owned_range(optimizer: MegatronOptimizer, param: torch.nn.Parameter) -> Tuple[int, int]:
    """Begin and end of this rank's part in the flattened parameter."""
    if not isinstance(optimizer, DistributedOptimizer):
        return 0, param.numel()
    owned = optimizer._get_model_param_range_map(param)["param"]
    return owned.start, owned.end


@dataclass(frozen=True)
class OwnedState:
    """This rank's part of a parameter's state."""

    begin: int
    """Of the range in the flattened parameter."""
    values: Dict[str, torch.Tensor]
    """By kind, [length of the range], float32: views of what the optimizer steps with."""


def owned_state(optimizer: MegatronOptimizer, param: torch.nn.Parameter) -> OwnedState:
    """What this rank has of a parameter's state; moments of a parameter that was never stepped are zeros."""
    main = _main_param(optimizer, param)
    if main is None:
        return OwnedState(0, {})
    state = optimizer.optimizer.state.get(main, {})
    values = {name: state[name] if name in state else torch.zeros_like(main) for name in _moments(optimizer, param)}
    if _has_master(param):
        values = {MASTER: main, **values}
    begin, _ = _owned_range(optimizer, param)
    return OwnedState(begin, {kind: value.detach().view(-1) for kind, value in values.items()})


def owned_weight(optimizer: MegatronOptimizer, param: torch.nn.Parameter) -> Optional[OwnedState]:
    """This rank's part of a weight in 8 bits, under the kind "": a copy of its master, rounded as other weights are.

    None for any other weight, which every rank holds as it is to be written.
    """
    if not is_float8tensor(param):
        return None
    main = _main_param(optimizer, param)
    begin, _ = (0, 0) if main is None else _owned_range(optimizer, param)
    master = torch.empty(0) if main is None else main.detach().view(-1)
    return OwnedState(begin, {"": master.to(param.dtype)})


def is_sharded(optimizer: MegatronOptimizer) -> bool:
    """Whether data-parallel ranks hold different parts of the state."""
    return isinstance(optimizer, DistributedOptimizer)


@torch.no_grad()
def make_state(optimizer: MegatronOptimizer, param: torch.nn.Parameter, updates: int) -> OwnedState:
    """Give this rank's part of a parameter a state to be filled.

    Args:
        optimizer: owner of the state.
        param: the model's parameter.
        updates: step count of this parameter; 0 leaves it without moments, as a parameter never stepped.

    Returns:
        What is to be filled, by kind; not initialised.
    """
    main = _main_param(optimizer, param)
    if main is None:
        return OwnedState(0, {})
    inner, moments = optimizer.optimizer, _moments(optimizer, param)
    inner.state.pop(main, None)
    if updates > 0:
        inner.state[main] = {name: torch.empty_like(main) for name in moments}
        if moments == MOMENTS and _counts_steps_by_parameter(optimizer):
            inner.state[main]["step"] = torch.tensor(float(updates), dtype=torch.float32)
    owned = owned_state(optimizer, param)
    kept = {kind: value for kind, value in owned.values.items() if kind == MASTER or updates > 0}
    return OwnedState(owned.begin, kept)


def set_group_steps(optimizer: MegatronOptimizer, updates: List[int]) -> None:
    """Tell optimizers that count steps by parameter group (fused ones) each group's count."""
    if _counts_steps_by_parameter(optimizer):
        return
    for group, count in zip(optimizer.param_groups, updates):
        group["step"] = count


def _counts_steps_by_parameter(optimizer: MegatronOptimizer) -> bool:
    muon = muon_of(optimizer)
    inner = optimizer.optimizer if muon is None else muon.adamw
    return isinstance(inner, (torch.optim.AdamW, torch.optim.Adam))
