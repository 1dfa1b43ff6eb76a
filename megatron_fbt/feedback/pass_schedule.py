"""How many passes K a global batch is trained with (method section 4)."""

from typing import Dict, Sequence

from megatron_fbt.config.feedback import PassPhase
from megatron_fbt.feedback.counter import PASS_COUNT, counter_hash, uniform


def phase_at(step: int, phase_starts: Sequence[int]) -> int:
    """Index of the phase that a step (counted from 0) belongs to."""
    return max(index for index, start in enumerate(phase_starts) if start <= step)


def passes_at(step: int, seed: int, phase_starts: Sequence[int], schedule: Sequence[PassPhase]) -> int:
    """Pass count of one global batch, keyed by (seed, step) alone: equal on every rank and after a resume.

    Args:
        step: optimizer step, counted from 0.
        seed: run.seed.
        phase_starts: first step of each phase.
        schedule: phases with their distributions.
    """
    return draw_passes(step, seed, schedule[phase_at(step, phase_starts)].passes)


def draw_passes(step: int, seed: int, distribution: Dict[int, float]) -> int:
    """Draw K from {K: probability} for one step."""
    u = uniform(counter_hash(seed, PASS_COUNT, step)).item() * sum(distribution.values())
    for passes in sorted(distribution):
        u -= distribution[passes]
        if u < 0:
            return passes
    return max(passes for passes, probability in distribution.items() if probability > 0)
