"""This rank's ranges of weights and optimizer states in DeepSpeed's flat shards, as checkpoints write and read them."""

import contextlib
from dataclasses import dataclass
from typing import Iterator, Optional, Tuple

import torch
import torch.distributed as dist

from megatron_fbt.core.optimizer_state import MASTER, MOMENTS, OwnedState
from megatron_fbt.core.stage import FBTStage
from megatron_fbt.core.zero import ZeroEngine


@dataclass(frozen=True)
class Shard:
    """Where a parameter's range lies in the flat float32 tensor that is stepped for it."""

    flat: torch.Tensor
    start: int
    """Of the range, in the flat tensor."""
    begin: int
    """Of the range, in the flattened parameter."""
    length: int

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The range, in a tensor like the flat one."""
        return tensor.detach().narrow(0, self.start, self.length)


def shard_of(engine: ZeroEngine, param: torch.nn.Parameter) -> Optional[Shard]:
    """This rank's shard of a parameter; None if it has none of it."""
    if hasattr(param, "ds_id"):
        group, start, _ = engine.optimizer.grad_position[engine.optimizer.get_param_id(param)]
        begin, length = _own_range(param)
        return Shard(engine.optimizer.fp32_partitioned_groups_flat[group], start, begin, length) if length else None
    mapping = param._hp_mapping
    if mapping is None:
        return None
    (flat,) = engine.adamw.param_groups[mapping.param_group_index]["params"]
    inside = mapping.lp_fragment_address
    return Shard(flat, mapping.hp_fragment_address.start, inside.start, inside.numel)


def _own_range(param: torch.nn.Parameter) -> Tuple[int, int]:
    """Begin and length of what this rank holds of a parameter that zero3 has sharded, without the padding."""
    size = param.ds_tensor.ds_numel
    begin = min(dist.get_rank(param.ds_process_group) * size, param.ds_numel)
    return begin, min(size, param.ds_numel - begin)


@contextlib.contextmanager
def whole_shapes(stage: FBTStage) -> Iterator[None]:
    """Within it, weights that zero3 has sharded have their whole shapes again, over a single element of memory."""
    held = {param: param.data for param in stage.parameters() if hasattr(param, "ds_id")}
    for param, data in held.items():
        param.data = data.new_empty(1).expand(param.ds_shape)
    try:
        yield
    finally:
        for param, data in held.items():
            param.data = data


def owned_weight(param: torch.nn.Parameter) -> OwnedState:
    """What this rank has of a weight that zero3 has sharded, in the weight's number format."""
    begin, length = _own_range(param)
    return OwnedState(begin, {"": param.ds_tensor.detach().view(-1)[:length]})


def owned_state(engine: ZeroEngine, param: torch.nn.Parameter) -> OwnedState:
    """What this rank has of a parameter's state; moments of a parameter that was never stepped are zeros."""
    shard = shard_of(engine, param)
    if shard is None:
        return OwnedState(0, {})
    state = engine.adamw.state.get(shard.flat, {})
    values = {
        name: shard.view(state[name]) if name in state else torch.zeros(shard.length, device=shard.flat.device)
        for name in MOMENTS
    }
    if param.dtype != torch.float32:
        values = {MASTER: shard.view(shard.flat), **values}
    return OwnedState(shard.begin, values)


@torch.no_grad()
def make_state(engine: ZeroEngine, param: torch.nn.Parameter, updates: int) -> OwnedState:
    """Give this rank's shard of a parameter a state to be filled; see optimizer_state.make_state.

    DeepSpeed keeps masters of float32 weights too, so they are to be filled in any case.
    """
    shard = shard_of(engine, param)
    if shard is None:
        return OwnedState(0, {})
    states = engine.adamw.state
    values = {MASTER: shard.view(shard.flat)}
    if updates == 0:
        states.pop(shard.flat, None)
        return OwnedState(shard.begin, values)
    state = states[shard.flat]
    if not state:
        state.update({name: torch.zeros_like(shard.flat, requires_grad=False) for name in MOMENTS})
    state["step"] = torch.tensor(float(updates), dtype=torch.float32)
    return OwnedState(shard.begin, {**values, **{name: shard.view(state[name]) for name in MOMENTS}})
