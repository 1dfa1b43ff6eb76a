"""Muon for the hidden matrices, AdamW for the rest, as one optimizer inside Megatron-Core's wrappers."""

from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_fbt.config.optimizer import OptimizerConfig
from megatron_fbt.core.stage import FBTStage
from megatron_fbt.errors import ConfigError

MUON_GROUP = "muon"
"""Key that marks the parameter groups that Muon steps."""
MOMENTUM = "momentum_buffer"
"""torch.optim.Muon's name for its state."""


@dataclass(frozen=True)
class RowBlocks:
    """How a weight is put together from matrices: `repeats` times, `sizes[i]` rows of matrix i after each other."""

    repeats: int
    sizes: Tuple[int, ...]

    def split(self, weight: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """[repeats * sum(sizes), columns] -> for each matrix a view [repeats, size, columns]."""
        return weight.view(self.repeats, sum(self.sizes), weight.size(1)).split(self.sizes, dim=1)


def hidden_matrices(stage: FBTStage) -> Dict[str, RowBlocks]:
    """The weights that Muon steps by name: every matrix but embedding and output head.

    Megatron-Core keeps queries (and output gates), keys and values of a query group next to each other in one weight,
    and the MLP's gate above its up projection in another. Each is a matrix of its own.
    """
    config = stage.config
    head, groups = config.kv_channels, config.num_query_groups
    queries = config.num_attention_heads // groups * head
    gates = (queries,) if config.attention_output_gate else ()
    found = {}
    for name, param in stage.named_parameters():
        if param.dim() != 2 or name.startswith(("embedding.", "output_layer.")):
            continue
        if name.endswith("linear_qkv.weight"):
            found[name] = RowBlocks(groups, (queries, *gates, head, head))
        elif name.endswith("linear_fc1.weight"):
            found[name] = RowBlocks(1, (param.size(0) // 2,) * 2)
        else:
            found[name] = RowBlocks(1, (param.size(0),))
    return found


def muon_group(config: OptimizerConfig) -> dict:
    """Settings of the parameter groups that Muon steps, as Megatron-Core's learning-rate schedule reads them."""
    return {
        MUON_GROUP: True,
        "lr": config.muon_lr,
        "max_lr": config.muon_lr,
        "min_lr": config.muon_lr * config.min_lr / config.lr,
        "weight_decay": config.muon_weight_decay,
        "start_wd": config.muon_weight_decay,
        "end_wd": config.muon_weight_decay,
    }


class MuonWithAdamW:
    """Steps the groups marked MUON_GROUP by torch.optim.Muon and the others by the optimizer that it replaces.

    Muon sees a weight's matrices one after the other: a matrix whose rows lie together as a view, any other as a copy
    that is written back. States are kept by weight, in the weight's shape.

    Args:
        config: optimizer section.
        adamw: holds all groups.
        blocks: for each weight that Muon steps, the matrices in it.

    Raises:
        ConfigError: torch has no Muon.
    """

    def __init__(self, config: OptimizerConfig, adamw: torch.optim.Optimizer, blocks: Dict[torch.Tensor, RowBlocks]):
        if not hasattr(torch.optim, "Muon"):
            raise ConfigError(
                f"optimizer.type = 'muon': torch {torch.__version__} has no torch.optim.Muon; install torch 2.9 or "
                "later, or set it to adamw"
            )
        self.adamw, self.blocks = adamw, blocks
        self.param_groups: List[dict] = adamw.param_groups
        """All groups; while some are left out here, they are not stepped."""
        self.state = adamw.state
        self.muon = torch.optim.Muon(
            list(blocks),
            lr=config.muon_lr,
            momentum=config.muon_momentum,
            ns_steps=config.muon_ns_steps,
            adjust_lr_fn=config.muon_adjust_lr_fn,
        )

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter of param_groups from its gradient."""
        self.adamw.param_groups = [group for group in self.param_groups if not group.get(MUON_GROUP)]
        self.adamw.step()
        for group in self.param_groups:
            if group.get(MUON_GROUP):
                for param in group["params"]:
                    self._step_weight(param, group)
        self.muon.state, self.muon.param_groups = {}, []

    def _step_weight(self, param: torch.Tensor, group: dict) -> None:
        state = self.state[param]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(param)
        split = self.blocks[param].split
        for weight, gradient, momentum in zip(split(param), split(param.grad), split(state[MOMENTUM])):
            columns = param.size(1)
            matrix, buffer = weight.reshape(-1, columns), momentum.reshape(-1, columns)
            matrix.grad = gradient.reshape(-1, columns)
            self.muon.state = {matrix: {MOMENTUM: buffer}}
            settings = {name: group[name] for name in ("lr", "weight_decay")}
            self.muon.param_groups = [{**self.muon.defaults, **settings, "params": [matrix]}]
            self.muon.step()
            for whole, part in ((weight, matrix), (momentum, buffer)):
                if part.data_ptr() != whole.data_ptr():
                    whole.copy_(part.view_as(whole))


def install_muon(config: OptimizerConfig, stage: FBTStage, optimizer: MegatronOptimizer) -> None:
    """Put Muon into Megatron-Core's optimizer, whose groups for it are marked MUON_GROUP."""
    named = dict(stage.named_parameters())
    blocks = {getattr(named[name], "main_param", named[name]): rows for name, rows in hidden_matrices(stage).items()}
    optimizer.optimizer = MuonWithAdamW(config, optimizer.optimizer, blocks)


def muon_of(optimizer: MegatronOptimizer) -> Optional[MuonWithAdamW]:
    """The Muon inside Megatron-Core's optimizer, if there is one."""
    return optimizer.optimizer if isinstance(optimizer.optimizer, MuonWithAdamW) else None
