"""Puts stand-ins in the place of Transformer Engine's layers and contexts, in this process."""

from typing import Any, Callable

from megatron.core.transformer import transformer_block

from megatron_fbt.core import backends, fp8, specs
from megatron_fbt.model.layers import RMSNorm, SDPAttention


def replace_engine(column: type, row: type, get_fp8_context: Callable[..., Any]) -> None:
    """Layers of the transformer_engine backend, and Megatron-Core's function for contexts, wherever it is called."""
    parts = {"norm": RMSNorm, "column": column, "row": row, "attention": SDPAttention}
    plain = specs._layer_parts
    specs._layer_parts = lambda backend, fp8=None: parts if backend == "transformer_engine" else plain(backend, fp8)
    backends.fp8_problem = lambda recipe: None
    for module in (specs, transformer_block, fp8):
        module.get_fp8_context = get_fp8_context
