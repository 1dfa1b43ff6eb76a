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

    def suffix(self, normed_tokens: torch.Tensor, states: torch.Tensor, start: int) -> torch.Tensor:
        """As forward, for positions from `start` >= 1 on.

        Args:
            normed_tokens: N(e) of these positions, [s - start, b, h], or [(s - start)/tp, b, h].
            states: h of the previous pass, of the whole row, not shifted, [s, b, h] or [s/tp, b, h].
            start: the first of them.
        """
        return self._fuse(normed_tokens, self._value(states)[start - 1 : -1])

    def _value(self, states: torch.Tensor) -> torch.Tensor:
        """W_state h, [s, b, h/tp]."""
        with self.context():
            return getattr(self, self.state_matrix)(self.prepare(states))[0]

    def _fuse(self, normed_tokens: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with self.context():
            token = getattr(self, self.token_matrix)(normed_tokens)[0]
        return rms_normalize(self._whole_rows(self.mix(value, token)), self.config.layernorm_epsilon) * self.input_scale

    def _whole_rows(self, x: torch.Tensor) -> torch.Tensor:
        """[s, b, h/tp] -> [s, b, h], or [s/tp, b, h] under sequence parallelism."""
        if self.tp_group.size() == 1:
            return x
        if not self.config.sequence_parallel:
            return tensor_parallel.gather_from_tensor_model_parallel_region(x, self.tp_group)
        rows = tensor_parallel.all_to_all_hp2sp(x, self.tp_group)
        return rows.view(-1, x.size(1), self.config.hidden_size)


class GateFusion(Fusion):
    """u_t = N((W_U h_{t-1}) * sigmoid(W_G N(e_t))) * s."""

    state_matrix, token_matrix = "state_proj", "token_gate"

    def mix(self, value: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """The token only gates."""
        return value * torch.sigmoid(token)


class AddFusion(Fusion):
    """u_t = N(W_U h_{t-1} + W_T N(e_t)) * s."""

    state_matrix, token_matrix = "state_proj", "token_proj"


class ConcatFusion(Fusion):
    """u_t = N(W_C [N(h_{t-1}); N(e_t)]) * s, W_C [D, 2D] kept as its state half and its token half."""

    state_matrix, token_matrix = "concat_state_proj", "concat_token_proj"

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
