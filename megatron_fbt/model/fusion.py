"""The fusion layers: how the previous position's state enters the input (method sections 1 and 5).

Every variant has two [D, D] matrices, one for the state and one for the token, split over tensor-parallel ranks by
output. So no rank holds a whole matrix, and any layout's checkpoint is cut along one dimension.
"""

import contextlib
from typing import Callable, ContextManager, Dict, Type

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fbt.model.layers import rms_normalize
from megatron_fbt.model.shift import shift_right


class Fusion(MegatronModule):
    """u_t = N(mix(W_state h_{t-1}, W_token N(e_t))) * s.

    Args:
        config: Megatron-Core's configuration.
        input_scale: s, the RMS of a plain input.
        tp_group: tensor-parallel group.
        linear: builds the two matrices as Megatron-Core's column-parallel layer.
        context: what their products run in.
    """

    state_matrix: str
    """Attribute that holds W_state; part of the weight's name in checkpoints and exports."""
    token_matrix: str
    """Attribute that holds W_token."""

    def __init__(
        self,
        config: TransformerConfig,
        input_scale: float,
        tp_group: torch.distributed.ProcessGroup,
        linear: Callable = tensor_parallel.ColumnParallelLinear,
        context: Callable[[], ContextManager] = contextlib.nullcontext,
    ):
        super().__init__(config=config)
        self.input_scale = input_scale
        self.tp_group, self.context = tp_group, context
        for name in (self.state_matrix, self.token_matrix):
            matrix = linear(
                config.hidden_size,
                config.hidden_size,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                tp_group=tp_group,
            )
            setattr(self, name, matrix)

    def forward(self, normed_tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Fused inputs for every position; row 0 is fused with a zero state.

        The column-parallel product gathers the sequence, so the shift right by one needs no exchange of its own.

        Args:
            normed_tokens: N(e), [s, b, h], or [s/tp, b, h] under sequence parallelism.
            states: h of the previous pass, not shifted, the same shape.

        Returns:
            u, the same shape.
        """
        return self._fuse(normed_tokens, shift_right(self._value(states)))

    def step(self, normed_tokens: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """As forward, given the state of the position before each token, as decoding has it."""
        return self._fuse(normed_tokens, self._value(previous))

    def prepare(self, states: torch.Tensor) -> torch.Tensor:
        """What W_state is applied to, row by row."""
        return states

    def mix(self, value: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """Element-wise, of W_state h and W_token N(e)."""
        return value + token

    def prepare(self, states: torch.Tensor) -> torch.Tensor:
        """N(h)."""
        return rms_normalize(states, self.config.layernorm_epsilon)


FUSIONS: Dict[str, Type[Fusion]] = {"gate": GateFusion, "concat": ConcatFusion, "add": AddFusion}


def build_fusion(
    kind: str,
    config: TransformerConfig,
    input_scale: float,
    tp_group: torch.distributed.ProcessGroup,
    linear: Callable = tensor_parallel.ColumnParallelLinear,
    context: Callable[[], ContextManager] = contextlib.nullcontext,
) -> Fusion:
    """The fusion layer that `feedback.fusion` names; see Fusion."""
    return FUSIONS[kind](config, input_scale, tp_group, linear, context)
