"""Which layer backend runs."""

from megatron_fbt.core.cpu import on_gpu
from megatron_fbt.errors import ConfigError
from megatron_fbt.optional import transformer_engine_problem


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
