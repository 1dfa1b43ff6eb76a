"""Full-Bandwidth Transformers (arXiv:2608.08888) on Megatron-Core."""

from megatron_fbt.optional import hide_broken_transformer_engine

__version__ = "0.1.0"

hide_broken_transformer_engine()
