"""Where extra passes can compute their suffix alone, and what that saves."""

import math
from typing import List, Optional

from megatron_fbt.config.deepspeed import ZERO_STAGES
from megatron_fbt.config.pretrain import PretrainConfig


def reuse_obstacle(config: PretrainConfig) -> Optional[str]:
    """Field, value and reason for which prefix reuse cannot be; None if nothing in the configuration speaks against it.

    The layer backend, which model.transformer_impl auto leaves to the machine, is checked where the model is built.
    """
    model = config.model
    for name in ("attention_dropout", "hidden_dropout"):
        if getattr(model, name) > 0:
            return f"model.{name} = {getattr(model, name):g} draws other masks in each pass, so that prefixes differ"
    if config.precision.fp8 is not None:
        return f"precision.fp8 = {config.precision.fp8!r} scales a tensor by its largest value, which a suffix may lack"
    if config.optimizer.sharding in ZERO_STAGES:
        return f"optimizer.sharding = {config.optimizer.sharding!r} has not been shown to give equal gradients with it"
    return engine_obstacle(config) if model.transformer_impl == "transformer_engine" else None


def engine_obstacle(config: PretrainConfig) -> Optional[str]:
    """The same, of Transformer Engine's attention; null leaves prefix reuse off there until a GPU has confirmed it."""
    if config.data.reset_attention_mask:
        return (
            "data.reset_attention_mask = true gives Transformer Engine the documents as sequences, of which a suffix "
            "may have an end alone"
        )
    if config.feedback.prefix_reuse is None:
        return "Transformer Engine computes suffixes on request alone, until a GPU has confirmed it: set it to true"
    return None


def reuse_problems(config: PretrainConfig) -> List[str]:
    """Prefix reuse is asked for where it cannot be."""
    obstacle = reuse_obstacle(config)
    if not config.feedback.prefix_reuse or obstacle is None:
        return []
    return [f"feedback.prefix_reuse = true: {obstacle}; change that, or set feedback.prefix_reuse to null or false"]


def reuses_prefix(config: PretrainConfig) -> bool:
    """Whether a run reuses prefixes, unless the machine chooses Transformer Engine and that has an obstacle."""
    return config.feedback.prefix_reuse is not False and reuse_obstacle(config) is None


def saved_share(config: PretrainConfig) -> Optional[float]:
    """Expected share of an extra pass's positions that prefix reuse does not compute; None = it depends on the data.

    A micro-batch of b rows begins at the smallest of b prefixes low + (high - low) U^e, and E[min U^e] = b B(e + 1, b).
    """
    prefix, rows = config.feedback.prefix, config.training.micro_batch_size
    if not reuses_prefix(config) or config.feedback.max_passes == 1:
        return 0.0
    if prefix.granularity != "row":
        return None
    smallest = math.exp(
        math.lgamma(prefix.exponent + 1) + math.lgamma(rows + 1) - math.lgamma(prefix.exponent + rows + 1)
    )
    return prefix.probability**rows * (prefix.low + (prefix.high - prefix.low) * smallest)
