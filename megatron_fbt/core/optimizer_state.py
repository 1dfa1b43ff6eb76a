"""Optimizer state of a parameter in the parameter's own shape, whatever Megatron-Core's optimizer keeps it as.

The distributed optimizer holds flat ranges that follow its buckets. Checkpoints hold, for every parameter, tensors of
the parameter's shape, so that a run goes on in another layout and with sharding switched on or off.
"""

from typing import Dict, List, Optional, Tuple

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_fbt.core.muon import MOMENTUM, muon_of

MASTER = "master"
MOMENTS = ("exp_avg", "exp_avg_sq")


def state_kinds(optimizer: MegatronOptimizer, param: torch.nn.Parameter) -> Tuple[str, ...]:
    """Names of the tensors that make up a parameter's state: the master weight, then AdamW's moments or Muon's."""
    return (MASTER, *_moments(optimizer, param))


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


def read_state(
    optimizer: MegatronOptimizer, param: torch.nn.Parameter, data_group: dist.ProcessGroup
) -> Dict[str, torch.Tensor]:
    """Master weight and moments (state_kinds) of one parameter, float32 on the CPU, in the parameter's shape.

    Collective over the data-parallel group where states are sharded.
    """
    moments = _moments(optimizer, param)
    whole = torch.zeros(1 + len(moments), param.numel(), dtype=torch.float32, device=param.device)
    main = _main_param(optimizer, param)
    if main is not None:
        begin, end = _owned_range(optimizer, param)
        state = optimizer.optimizer.state.get(main, {})
        whole[0, begin:end] = main.detach().flatten()
        for row, name in enumerate(moments, start=1):
            if name in state:
                whole[row, begin:end] = state[name].flatten()
    if isinstance(optimizer, DistributedOptimizer):
        dist.all_reduce(whole, group=data_group)
    return {name: whole[row].view(param.shape).cpu() for row, name in enumerate((MASTER, *moments))}


@torch.no_grad()
def write_state(
    optimizer: MegatronOptimizer, param: torch.nn.Parameter, values: Dict[str, torch.Tensor], updates: int
) -> None:
    """Set master weight and moments of one parameter from tensors of its shape.

    Args:
        optimizer: owner of the state.
        param: the model's parameter.
        values: by state_kinds.
        updates: step count of this parameter; 0 leaves it without moments, as a parameter never stepped.
    """
    main = _main_param(optimizer, param)
    if main is None:
        return
    begin, end = _owned_range(optimizer, param)
    main.copy_(values[MASTER].flatten()[begin:end].view(main.shape))
    if updates == 0:
        return
    inner, moments = optimizer.optimizer, _moments(optimizer, param)
    state = {name: values[name].flatten()[begin:end].view(main.shape).to(main.device) for name in moments}
    if moments == MOMENTS and _counts_steps_by_parameter(optimizer):
        state["step"] = torch.tensor(float(updates), dtype=torch.float32)
    inner.state[main] = {name: tensor.clone() for name, tensor in state.items()}


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
