"""Where extra passes can compute their suffix alone, and what that saves."""

import math
from typing import List, Optional

from megatron_fbt.config.deepspeed import ZERO_STAGES
from megatron_fbt.config.feedback import PrefixConfig
from megatron_fbt.config.pretrain import PretrainConfig

_MOST_GROUPS = 64
"""Micro-batches from which on their number no longer matters to what is spared."""


def reuse_obstacle(config: PretrainConfig) -> Optional[str]:
    """Field, value and reason for which prefix reuse cannot be; None if nothing in the configuration speaks against it.

    What model.transformer_impl auto comes to is left to the machine, see core/backends.py, as_here.
    """
    model = config.model
    for name in ("attention_dropout", "hidden_dropout"):
        if getattr(model, name) > 0:
            return f"model.{name} = {getattr(model, name):g} draws other masks in each pass, so that prefixes differ"
    if config.precision.fp8 is not None:
        return f"precision.fp8 = {config.precision.fp8!r} scales a tensor by its largest value, which a suffix may lack"
    if config.optimizer.sharding in ZERO_STAGES:
        return f"optimizer.sharding = {config.optimizer.sharding!r} has not been shown to give equal gradients with it"
    return _engine_obstacle(config) if model.transformer_impl == "transformer_engine" else None


def _engine_obstacle(config: PretrainConfig) -> Optional[str]:
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
    """Whether a run reuses prefixes; see reuse_obstacle."""
    return config.feedback.prefix_reuse is not False and reuse_obstacle(config) is None


def saved_share(config: PretrainConfig, passes: int, micro_batches: int) -> Optional[float]:
    """Expected share of the positions of a batch's extra passes that prefix reuse does not compute.

    A rank's rows can be dealt to its micro-batches in the order of one pass's prefixes (see core/row_groups.py), the
    other passes' are counted as they come: with K > 2 a little more is spared.

    Args:
        config: validated.
        passes: K of the batch.
        micro_batches: of a step on each rank.

    Returns:
        None = it depends on the data.
    """
    if not reuses_prefix(config) or passes == 1:
        return 0.0
    if config.feedback.prefix.granularity != "row":
        return None
    rows = config.training.micro_batch_size
    ordered, given = (smallest_prefixes(config.feedback.prefix, rows, count) for count in (micro_batches, 1))
    return (ordered + (passes - 2) * given) / (passes - 1)


def smallest_prefixes(prefix: PrefixConfig, rows: int, micro_batches: int) -> float:
    """Expected length of a micro-batch's smallest prefix as a share of the row, its rows being dealt in order.

    Of c prefixes low + (high - low) U^e the j-th smallest has E[U^e] = B(j + e, c + 1 - j) / B(j, c + 1 - j). Rows
    without a mix-in, whose prefix is about nothing, come before them.

    Args:
        prefix: mix-in, by row.
        rows: of a micro-batch.
        micro_batches: of a step on each rank.
    """
    groups = min(micro_batches, _MOST_GROUPS)
    count, expected = rows * groups, 0.0
    for mixed in range(1, count + 1):
        chance = _chance(mixed, count, prefix.probability)
        places = (group * rows + 1 - (count - mixed) for group in range(groups) if chance > 0)
        powers = [_ordered_power(place, mixed, prefix.exponent) for place in places if place > 0]
        expected += chance * sum(prefix.low + (prefix.high - prefix.low) * power for power in powers) / groups
    return expected


def _chance(mixed: int, count: int, probability: float) -> float:
    """Of so many rows with a mix-in among `count`: the binomial distribution."""
    if probability in (0, 1):
        return float(mixed == count * probability)
    ways = math.lgamma(count + 1) - math.lgamma(mixed + 1) - math.lgamma(count - mixed + 1)
    return math.exp(ways + mixed * math.log(probability) + (count - mixed) * math.log1p(-probability))


def _ordered_power(place: int, count: int, exponent: float) -> float:
    """E[U^e] of the place-th smallest of `count` uniform numbers U."""
    return math.exp(
        math.lgamma(place + exponent) + math.lgamma(count + 1) - math.lgamma(place) - math.lgamma(count + 1 + exponent)
    )
