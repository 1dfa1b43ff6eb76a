"""Full-Bandwidth Transformers (arXiv:2608.08888) on Megatron-Core."""

__version__ = "0.1.0"
