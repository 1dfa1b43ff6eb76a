"""Number formats."""

from dataclasses import dataclass
from typing import Literal


@dataclass
class PrecisionConfig:
    """Formats of weights, activations and gradients."""

    dtype: Literal["fp32", "bf16"] = "bf16"
    """bf16 keeps fp32 master weights and optimizer states, and reduces gradients in fp32."""
