"""Optional GPU libraries: found at run time, never required."""

import importlib
import importlib.util
import logging
import os
import sys
from importlib import metadata
from types import ModuleType
from typing import Optional

DEEPSPEED_VERSION = (0, 19, 8)
"""The first release that leaves the end of a step to the caller in every stage of ZeRO."""


def transformer_engine_problem() -> Optional[str]:
    """Why Transformer Engine cannot be imported here, or None if it can."""
    if "transformer_engine" in sys.modules and sys.modules["transformer_engine"] is None:
        return "its installation is broken"
    if importlib.util.find_spec("transformer_engine") is None:
        return "not installed"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # whatever a third-party import raises means "not usable"
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def apex_problem() -> Optional[str]:
    """Why NVIDIA's Apex cannot be used here, or None if it can. Another package has the same name."""
    if "apex" in sys.modules and sys.modules["apex"] is None:
        return "another package called apex, or a broken installation"
    if importlib.util.find_spec("apex") is None:
        return "not installed"
    try:
        importlib.import_module("apex.optimizers").FusedAdam  # noqa: B018
    except Exception:  # the foreign package imports whatever it likes
        return "another package called apex, or a broken installation"
    return None


def weight_gradient_kernel_problem() -> Optional[str]:
    """Why Apex's fused weight-gradient accumulation cannot be used here, or None if it can."""
    problem = apex_problem()
    if problem is None and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        return "built without --cuda_ext"
    return problem


def hide_broken_libraries() -> None:
    """Let Megatron-Core import as if Transformer Engine or Apex were absent where the installation is broken.

    PyPI's empty `transformer-engine` package raises RuntimeError on import, and a foreign `apex` whatever it likes, or
    nothing, and lacks what Megatron-Core then asks it for; Megatron-Core guards against ImportError.
    """
    if transformer_engine_problem() not in (None, "not installed"):
        sys.modules["transformer_engine"] = None
    if apex_problem() not in (None, "not installed"):
        sys.modules["apex"] = None


def deepspeed_problem() -> Optional[str]:
    """Why DeepSpeed cannot be used here, or None if it can; nothing is imported."""
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed"
    version = metadata.version("deepspeed")
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    if numbers < DEEPSPEED_VERSION:
        return f"DeepSpeed {version} is older than {'.'.join(map(str, DEEPSPEED_VERSION))}"
    return None


def import_deepspeed() -> ModuleType:
    """DeepSpeed without its chatter, and on a CPU without compiling operators that training does not need."""
    import torch

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed = importlib.import_module("deepspeed")
    deepspeed.utils.logger.setLevel(logging.ERROR)
    if not on_gpu:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
