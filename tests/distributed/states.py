"""Optimizer states as a whole, whatever parts of them the ranks hold."""

from typing import Dict

import torch
import torch.distributed as dist

from megatron_fbt.core.optimizer_state import MASTER, MOMENTS, is_sharded, owned_state


def whole_state(optimizer, param: torch.nn.Parameter, data_group: dist.ProcessGroup) -> Dict[str, torch.Tensor]:
    """Master weight and moments of a parameter in its shape; collective where states are sharded."""
    owned = owned_state(optimizer, param)
    kinds = [kind for kind in owned.values if kind != MASTER] or list(MOMENTS)
    found = {kind: torch.zeros(param.numel()) for kind in (MASTER, *kinds)}
    for kind, values in owned.values.items():
        found[kind][owned.begin : owned.begin + values.numel()] = values
    if is_sharded(optimizer):
        for value in found.values():
            dist.all_reduce(value, group=data_group)
    if param.dtype == torch.float32:
        found[MASTER] = param.detach().view(-1).clone()
    return {kind: value.view(param.shape) for kind, value in found.items()}
