"""Counter-based randomness: every draw is a pure function of a seed, a stream and counters.

There is no generator state to save: the same draw comes out on every rank, in every layout, on CPU and GPU, under
recompute and after a resume. One hash serves pass counts, prefix cuts, jitter and initial weights.
"""

import math
from typing import Union

import torch

PASS_COUNT, PREFIX, JITTER, INITIAL_WEIGHT, DROPOUT, DATA_ORDER, TOKEN = 1, 2, 3, 4, 5, 6, 7
"""Streams: draws of different kinds never share a counter."""

Counter = Union[int, torch.Tensor]

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def _wrap(x: int) -> int:
    """A Python integer as int64 holds it."""
    return (x + 2**63) % 2**64 - 2**63


def _shift_right(x: Counter, bits: int) -> Counter:
    """Logical right shift of 64 bits, an integer or int64 [...]."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Counter) -> Counter:
    """Finalizer of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit integers; int64 wraps."""
    wrap = _wrap if isinstance(x, int) else torch.Tensor.long
    x = wrap((x ^ _shift_right(x, 30)) * MULTIPLIERS[0])
    x = wrap((x ^ _shift_right(x, 27)) * MULTIPLIERS[1])
    return x ^ _shift_right(x, 31)


def counter_hash(seed: int, stream: int, *counters: Counter) -> torch.Tensor:
    """64 pseudo-random bits for each combination of counters.

    Args:
        seed: 0 <= seed < 2**56.
        stream: what the draw is for, below 128: it takes the bits above the seed's.
        counters: integers or int64 tensors, broadcast against each other.

    Returns:
        int64 tensor of the broadcast shape (0-d if all counters are integers).
    """
    assert 0 <= seed < 2**56 and 0 <= stream < 128, "seeds out of range would share draws between streams"
    state = _mix(_wrap((seed | (stream << 56)) + GOLDEN))
    for counter in counters:  # integers stay Python's: a tensor of them would be copied to the device, which waits
        step = (counter + 1) * GOLDEN
        step = _wrap(step) if isinstance(step, int) else step
        state = _wrap(state + step) if isinstance(state, int) and isinstance(step, int) else state + step
        state = _mix(state)
    return torch.tensor(state, dtype=torch.int64) if isinstance(state, int) else state


def uniform(bits: torch.Tensor) -> torch.Tensor:
    """Map 64-bit hashes to float64 uniform in [0, 1)."""
    return _shift_right(bits, 11).double() * 2.0**-53


def normal(bits: torch.Tensor) -> torch.Tensor:
    """Map 64-bit hashes to float64 standard normal values (Box-Muller on the two halves)."""
    radius = torch.sqrt(-2 * torch.log((_shift_right(bits, 32).double() + 0.5) * 2.0**-32))
    return radius * torch.cos((bits & (2**32 - 1)).double() * (2 * math.pi * 2.0**-32))
