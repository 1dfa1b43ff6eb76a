"""Uniform noise on the carried state, in training (method section 4)."""

import torch

from megatron_fbt.feedback.counter import JITTER, counter_hash

MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)
CHANNEL_STEP = 0x9E3779B1 - 2**32


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int32 [...], as a new tensor."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def jitter_noise(
    scale: float, sample_ids: torch.Tensor, positions: torch.Tensor, pass_number: int, hidden_size: int, seed: int
) -> torch.Tensor:
    """Noise for the state that pass `pass_number` reads, for the positions that this rank holds.

    Each (sample, pass, position) has a 64-bit key; a 32-bit hash of key and channel gives the element: the same on
    CPU and GPU, as only integer arithmetic and exact float steps are used.

    Args:
        scale: half-width of the uniform distribution.
        sample_ids: [b] int64.
        positions: [s] int64, positions in the row of the rows of the result.
        pass_number: k >= 2, the pass that reads the state.
        hidden_size: channels.
        seed: run.seed.

    Returns:
        float32 [s, b, h], uniform in [-scale, scale).
    """
    key = counter_hash(seed, JITTER, sample_ids[None, :], pass_number, positions[:, None])  # [s, b]
    low, high = (key & 0xFFFFFFFF).to(torch.int32), (key >> 32).to(torch.int32)
    channels = torch.arange(hidden_size, dtype=torch.int32, device=key.device) * CHANNEL_STEP
    x = low[..., None] + channels  # [s, b, h]
    x ^= _shift_right(x, 16)
    x *= MULTIPLIERS[0]
    x ^= high[..., None]
    x ^= _shift_right(x, 15)
    x *= MULTIPLIERS[1]
    x ^= _shift_right(x, 16)
    return _shift_right(x, 8).float().mul_(2.0**-23).sub_(1.0).mul_(scale)
