"""Which layer backend runs, and whether the libraries are there that a configuration asks for."""

import dataclasses
from typing import Optional

import torch

from megatron_fbt.config.deepspeed import ZERO_STAGES
from megatron_fbt.config.fp8 import CAPABILITY
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.config.reuse import reuse_problems
from megatron_fbt.config.rules import raise_problems
from megatron_fbt.core.cpu import on_gpu
from megatron_fbt.errors import ConfigError
from megatron_fbt.optional import deepspeed_problem, transformer_engine_problem, weight_gradient_kernel_problem

INSTALL = 'pip install --no-build-isolation "megatron-fbt[gpu]"'


def resolve_backend(transformer_impl: str) -> str:
    """`torch` or `transformer_engine`, from model.transformer_impl.

    Raises:
        ConfigError: Transformer Engine is asked for and cannot be used.
    """
    if transformer_impl == "torch":
        return "torch"
    problem = transformer_engine_problem() if on_gpu() else "no GPU"
    if problem is None:
        return "transformer_engine"
    if transformer_impl == "auto":
        return "torch"
    raise ConfigError(
        f"model.transformer_impl is transformer_engine, which cannot be used here ({problem}). Use torch or auto, or "
        f"install it on a machine with an NVIDIA GPU: {INSTALL}"
    )


def backend_of(config: PretrainConfig) -> str:
    """`torch` or `transformer_engine`; emulated FP8 is torch's, any other is Transformer Engine's.

    Raises:
        ConfigError: Transformer Engine is asked for and cannot be used.
    """
    precision = config.precision
    if precision.fp8 is None:
        return resolve_backend(config.model.transformer_impl)
    if precision.fp8_emulated:
        return "torch"
    problem = fp8_problem(precision.fp8_recipe)
    if problem is not None:
        raise ConfigError(
            f"precision.fp8 = {precision.fp8!r}: {problem}. Set precision.fp8 to null, or precision.fp8_emulated to "
            f"true for a study; on a machine with such a GPU: {INSTALL}"
        )
    return "transformer_engine"


def as_here(config: PretrainConfig) -> PretrainConfig:
    """The configuration with the layer backend that this machine takes; as it is where none can run it."""
    try:
        backend = backend_of(config)
    except ConfigError:
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, transformer_impl=backend))


def check_reuse(config: PretrainConfig) -> None:
    """Refuse feedback.prefix_reuse = true where the layer backend that this machine takes cannot do it.

    Raises:
        ConfigError: naming what stands in its way.
    """
    raise_problems(reuse_problems(as_here(config)))


def fp8_problem(recipe: str) -> Optional[str]:
    """Why this machine has no products of an FP8 recipe, or None if it has."""
    if not on_gpu():
        return "there is no GPU"
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    needed = CAPABILITY[recipe]
    device = f"{name} has compute capability {capability[0]}.{capability[1]}, but the {recipe} recipe needs"
    if capability < needed:
        return f"{device} {needed[0]}.{needed[1]}"
    if recipe == "mxfp8" and capability >= (12, 0):
        return f"{device} one below 12.0"
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if recipe == "blockwise" and cuda < (12, 9):
        return f"the blockwise recipe needs CUDA 12.9, but PyTorch was built with {torch.version.cuda}"
    missing = transformer_engine_problem()
    return None if missing is None else f"Transformer Engine cannot be used ({missing})"


def fuses_weight_gradients(config: PretrainConfig) -> bool:
    """Whether layers add their weight gradients to the fp32 buffers themselves, by a kernel of Apex.

    Raises:
        ConfigError: it is asked for and cannot be done.
    """
    if not config.precision.gradient_accumulation_fusion:
        return False
    problem = weight_gradient_kernel_problem() if on_gpu() else "there is no GPU"
    if problem is not None:
        raise ConfigError(
            f"precision.gradient_accumulation_fusion = true: NVIDIA's Apex cannot be used here ({problem}). Set it to "
            "false, or build Apex with --cpp_ext and --cuda_ext (docs/precision.md)"
        )
    return True


def check_backend(config: PretrainConfig) -> None:
    """Refuse what the libraries of this machine cannot do.

    Raises:
        ConfigError: Transformer Engine or DeepSpeed is asked for and cannot be used, or the former cannot mask the
            documents, or compute suffixes, as configured.
    """
    fuses_weight_gradients(config)
    check_reuse(config)
    sharding = config.optimizer.sharding
    problem = deepspeed_problem() if sharding in ZERO_STAGES else None
    if problem is not None:
        raise ConfigError(
            f"optimizer.sharding = {sharding!r}: {problem}; install it with pip install 'megatron-fbt[zero]', or set "
            "optimizer.sharding to megatron"
        )
    backend, data = backend_of(config), config.data
    if backend == "torch" or not data.reset_attention_mask:
        return
    rows = config.training.micro_batch_size
    if rows != 1 or not data.reset_position_ids:
        raise ConfigError(
            f"data.reset_attention_mask = true: the transformer_engine backend takes documents as sequences of one row "
            f"with positions of their own, but training.micro_batch_size = {rows} and data.reset_position_ids = "
            f"{str(data.reset_position_ids).lower()}; set them to 1 and true, or model.transformer_impl to torch"
        )
