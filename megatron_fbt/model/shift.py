"""Shift right by one position."""

import torch


def shift_right(states: torch.Tensor) -> torch.Tensor:
    """Row t of the result is row t - 1 of the input; row 0 is zero.

    Args:
        states: [s, b, ...], the whole sequence.
    """
    return torch.cat([torch.zeros_like(states[:1]), states[:-1]])
