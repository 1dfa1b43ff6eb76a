"""Full-Bandwidth Transformers (arXiv:2608.08888) on Megatron-Core."""

from megatron_fbt.optional import hide_broken_libraries

__version__ = "0.1.0"

hide_broken_libraries()
