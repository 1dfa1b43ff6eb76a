"""The fusion layer: how the previous position's state enters the input (method section 1)."""

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fbt.model.layers import rms_normalize
from megatron_fbt.model.shift import shift_right


class GateFusion(MegatronModule):
    """u_t = N((W_U h_{t-1}) * sigmoid(W_G N(e_t))) * s, with both matrices split over tensor-parallel ranks by output.

    Args:
        config: Megatron-Core's configuration.
        input_scale: s, the RMS of a plain input.
        tp_group: tensor-parallel group.
    """

    def __init__(self, config: TransformerConfig, input_scale: float, tp_group: torch.distributed.ProcessGroup):
        super().__init__(config=config)
        self.input_scale = input_scale
        self.tp_group = tp_group
        self.state_proj, self.token_gate = (
            tensor_parallel.ColumnParallelLinear(
                config.hidden_size,
                config.hidden_size,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                tp_group=tp_group,
            )
            for _ in range(2)
        )

    def forward(self, normed_tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Fused inputs for every position; row 0 is zero.

        The column-parallel product gathers the sequence, so the shift right by one needs no exchange of its own.

        Args:
            normed_tokens: N(e), [s, b, h], or [s/tp, b, h] under sequence parallelism.
            states: h of the previous pass, not shifted, the same shape.

        Returns:
            u, the same shape.
        """
        value = shift_right(self.state_proj(states)[0])  # [s, b, h/tp]
        gate = torch.sigmoid(self.token_gate(normed_tokens)[0])
        return rms_normalize(self._whole_rows(value * gate), self.config.layernorm_epsilon) * self.input_scale

    def _whole_rows(self, x: torch.Tensor) -> torch.Tensor:
        """[s, b, h/tp] -> [s, b, h], or [s/tp, b, h] under sequence parallelism."""
        if self.tp_group.size() == 1:
            return x
        if not self.config.sequence_parallel:
            return tensor_parallel.gather_from_tensor_model_parallel_region(x, self.tp_group)
        rows = tensor_parallel.all_to_all_hp2sp(x, self.tp_group)
        return rows.view(-1, x.size(1), self.config.hidden_size)


def build_fusion(
    kind: str, config: TransformerConfig, input_scale: float, tp_group: torch.distributed.ProcessGroup
) -> MegatronModule:
    """The fusion layer that `feedback.fusion` names."""
    return {"gate": GateFusion}[kind](config, input_scale, tp_group)
