"""Number formats."""

from dataclasses import dataclass
from typing import List, Literal

from megatron_fbt.config.rules import Rules, Section


@dataclass
class PrecisionConfig(Section):
    """Formats of weights, activations and gradients."""

    dtype: Literal["fp32", "bf16"] = "bf16"
    """bf16 keeps fp32 master weights and optimizer states, and reduces gradients in fp32."""

    def problems(self) -> List[str]:
        """See Section."""
        return Rules("precision", self).problems
