"""What number formats a run computes in: what is installed, what the device has, and each part's products by pass."""

from dataclasses import dataclass
from importlib import metadata
from typing import Any, Dict, List, Optional, Tuple

import torch

from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.config.reuse import reuse_obstacle, reuses_prefix
from megatron_fbt.core.backends import as_here, backend_of, fuses_weight_gradients
from megatron_fbt.core.cpu import on_gpu
from megatron_fbt.errors import ConfigError
from megatron_fbt.optional import apex_problem, transformer_engine_problem, weight_gradient_kernel_problem
from megatron_fbt.text_table import table_lines


@dataclass(frozen=True)
class PrecisionReport:
    """Of this machine, which need not be the one that trains."""

    installed: Dict[str, str]
    """Version by library, or why it cannot be used."""
    device: str
    backend: Optional[str]
    """Layer backend; None = this machine cannot run the configuration."""
    problem: Optional[str]
    """Why it cannot."""
    weights: str
    """What they are kept and gathered in."""
    fused_weight_gradients: bool
    extra_passes: str
    """What they compute of each row."""
    products: List[Tuple[str, str, str, str]]
    """Part of the model, then the format of its products in pass 1, in later passes and when computed again."""

    def as_dict(self) -> Dict[str, Any]:
        """For JSON."""
        names = ("part", "pass_1", "later_passes", "recomputed")
        return {**vars(self), "products": [dict(zip(names, row)) for row in self.products]}

    def describe(self) -> str:
        """Aligned tables for a person."""
        facts = [*self.installed.items(), ("device here", self.device)]
        facts.append(("layer backend", self.backend or "none: not on this machine"))
        facts.append(("weights", self.weights))
        facts.append(
            ("weight gradients", "added in fp32 by Apex's kernel" if self.fused_weight_gradients else "PyTorch")
        )
        facts.append(("extra passes", self.extra_passes))
        rows = [("products", "pass 1", "later passes", "recomputed"), *self.products]
        lines = table_lines(facts, str.ljust) + [""] + table_lines(rows, str.ljust)
        return "\n".join(lines + ([f"note: {self.problem}"] if self.problem else [])) + "\n"


def precision_report(config: PretrainConfig) -> PrecisionReport:
    """The report of a validated configuration; refuses nothing, see check_backend."""
    backend = problem = None
    fused = False
    try:
        backend, fused = backend_of(config), fuses_weight_gradients(config)
    except ConfigError as error:
        problem = str(error)
    extra = _extra_passes(as_here(config))
    return PrecisionReport(_installed(), _device(), backend, problem, _weights(config), fused, extra, _products(config))


def _extra_passes(config: PretrainConfig) -> str:
    if config.feedback.max_passes == 1:
        return "there are none"
    obstacle = reuse_obstacle(config)
    if reuses_prefix(config):
        return "what follows their plain prefix (feedback.prefix_reuse)"
    return "whole rows" if obstacle is None else f"whole rows (feedback.prefix_reuse: {obstacle})"


def _installed() -> Dict[str, str]:
    kernel = weight_gradient_kernel_problem()
    apex = _version("apex", apex_problem())
    return {
        "Transformer Engine": _version("transformer-engine", transformer_engine_problem()),
        "NVIDIA Apex": apex if kernel is None or apex_problem() else f"{apex}, {kernel}",
    }


def _version(package: str, problem: Optional[str]) -> str:
    if problem is not None:
        return problem
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _device() -> str:
    if not on_gpu():
        return "no GPU"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, CUDA {torch.version.cuda}"


def _weights(config: PretrainConfig) -> str:
    precision = config.precision
    kept = f"fp8 e4m3 where products are fp8, {precision.dtype} elsewhere"
    kept = kept if precision.fp8_param_gather else precision.dtype
    return f"{kept}; updated in fp32" if precision.dtype != "fp32" else kept


def _products(config: PretrainConfig) -> List[Tuple[str, str, str, str]]:
    precision, layers = config.precision, config.model.num_layers
    low = f"fp8 {precision.fp8}, {precision.fp8_recipe}" + (", emulated" if precision.fp8_emulated else "")
    later = config.feedback.max_passes > 1
    found = []
    first = 0
    for layer in range(1, layers + 1):
        kind = precision.in_fp8(first, layers)
        if layer < layers and precision.in_fp8(layer, layers) == kind:
            continue
        name = f"layer {layer}" if layer == first + 1 else f"layers {first + 1} to {layer}"
        value = low if kind else precision.dtype
        again = value if config.memory.policy.recompute == "full" else "-"
        found.append((name, value, value if later else "-", again))
        first = layer
    fusion = low if precision.fp8_fusion else precision.dtype
    head = low if precision.fp8_head else precision.dtype
    again = precision.dtype if config.memory.policy.recompute != "none" else "-"
    found.append(("attention scores", precision.dtype, precision.dtype if later else "-", again))
    found.append(("fusion layer", "-", fusion if later else "-", "-"))
    found.append(("output head", head, head if later else "-", "-"))
    return found
