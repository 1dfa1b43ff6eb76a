"""What to compute again in the backward, from a budget of memory (memory.budget_gib)."""

import dataclasses
import math
from dataclasses import dataclass
from typing import List, Mapping, Sequence

from megatron_fbt.config.fp8 import precision_problems
from megatron_fbt.config.memory import MemoryConfig, RecomputePolicy
from megatron_fbt.config.memory_report import largest_rank
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.config.reuse import saved_share
from megatron_fbt.errors import ConfigError
from megatron_fbt.text_table import table_lines
from megatron_fbt.training.flops import attention_flops_per_token, layer_flops_per_token, step_flops

POLICIES = (
    RecomputePolicy(),
    RecomputePolicy("selective", "early"),
    RecomputePolicy("selective", "all"),
    RecomputePolicy("full", "early"),
    RecomputePolicy("full", "all"),
)


@dataclass(frozen=True)
class RecomputeOption:
    """A policy, what it costs and what it needs."""

    policy: RecomputePolicy
    repeated: float
    """Operations computed again, as a share of those of forward and backward: the mean over the run's steps."""
    total: int
    """Estimated bytes on the fullest process in the deepest batch."""


def recompute_options(
    config: PretrainConfig, pass_shares: Mapping[int, float], data_parallel_size: int, vocab_size: int
) -> List[RecomputeOption]:
    """All policies that the configuration allows and that differ, the one of the least computation first.

    Args:
        config: validated; its own policy is not looked at.
        pass_shares: {K: share of the run's steps}.
        data_parallel_size: ranks over which states are sharded.
        vocab_size: entries of the vocabulary, without padding.
    """
    found, micro_batches = [], config.training.num_microbatches(data_parallel_size)
    extra = {passes: 1.0 - (saved_share(config, passes, micro_batches) or 0.0) for passes in pass_shares}
    for policy in POLICIES:
        asked = with_policy(config, policy)
        if (policy.recompute_passes == "early" and config.feedback.max_passes == 1) or precision_problems(asked):
            continue
        memory = largest_rank(asked, config.optimizer.sharding, data_parallel_size, vocab_size)
        found.append(RecomputeOption(policy, _repeated(asked, pass_shares, extra, vocab_size), memory.total))
    return sorted(found, key=lambda option: option.repeated)


def with_policy(config: PretrainConfig, policy: RecomputePolicy) -> PretrainConfig:
    """The configuration with a policy instead of a budget; sections that do not differ are shared."""
    memory = dataclasses.replace(config.memory, budget_gib=None, **vars(policy))
    return dataclasses.replace(config, memory=memory)


def choose(memory: MemoryConfig, options: Sequence[RecomputeOption]) -> RecomputePolicy:
    """The policy of the least computation that fits the budget; the given one without a budget.

    Raises:
        ConfigError: nothing fits.
    """
    if memory.budget_gib is None:
        return memory.policy
    for option in options:
        if option.total <= memory.budget_gib * 2**30:
            return option.policy
    least = min(options, key=lambda option: option.total)
    raise ConfigError(
        f"memory.budget_gib = {memory.budget_gib}: the fullest process needs {_gib(least.total)} GiB with "
        f"recompute {least.policy}, the smallest estimate; give at least that, or shard further (more processes, "
        "optimizer.sharding), or make training.micro_batch_size smaller"
    )


def option_table(options: Sequence[RecomputeOption], chosen: RecomputePolicy, budget_gib: float) -> List[str]:
    """Lines of a table, the chosen policy marked."""
    rows = [(f"memory.recompute in {budget_gib:g} GiB", "GiB in all", "computed again")]
    for option in options:
        mark = " (this run)" if option.policy == chosen else ""
        rows.append((f"  {option.policy}{mark}", _gib(option.total), f"{option.repeated:.1%}"))
    return table_lines(rows)


def _gib(size: int) -> str:
    """Bytes in GiB, rounded up, so that a budget of as much is enough."""
    return f"{math.ceil(1000 * size / 2**30) / 1000:.3f}"


def _repeated(
    config: PretrainConfig, pass_shares: Mapping[int, float], extra: Mapping[int, float], vocab_size: int
) -> float:
    """See RecomputeOption; extra is the share of the rows that an extra pass computes, by K."""
    policy, model, length = config.memory.policy, config.model, config.data.sequence_length
    again = {
        "none": 0.0,
        "selective": attention_flops_per_token(model, length),
        "full": layer_flops_per_token(model, length),
    }
    one, two = (step_flops(model, length, vocab_size, 1, passes) for passes in (1, 2))
    repeated = computed = 0.0
    for passes, share in pass_shares.items():
        for number in range(1, passes + 1):
            rows = 1.0 if number == 1 else extra[passes]
            repeated += share * rows * again[policy.of_pass(last=number == passes)]
            computed += share * rows * (one if number == 1 else two - one)
    return repeated / computed if computed else 0.0
