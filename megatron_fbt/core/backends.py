"""Which layer backend runs, and whether the libraries are there that a configuration asks for."""

from megatron_fbt.config.deepspeed import ZERO_STAGES
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.core.cpu import on_gpu
from megatron_fbt.errors import ConfigError
from megatron_fbt.optional import deepspeed_problem, transformer_engine_problem


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
        'install it on a machine with an NVIDIA GPU: pip install --no-build-isolation "megatron-fbt[gpu]"'
    )


def backend_of(config: PretrainConfig) -> str:
    """`torch` or `transformer_engine`; emulated FP8 is torch's.

    Raises:
        ConfigError: Transformer Engine is asked for and cannot be used.
    """
    return "torch" if config.precision.fp8_emulated else resolve_backend(config.model.transformer_impl)


def check_backend(config: PretrainConfig) -> None:
    """Refuse what the libraries of this machine cannot do.

    Raises:
        ConfigError: Transformer Engine or DeepSpeed is asked for and cannot be used, or the former cannot mask the
            documents as configured.
    """
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
