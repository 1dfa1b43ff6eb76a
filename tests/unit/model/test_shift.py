"""Shift right by one position."""

import torch

from megatron_fbt.model.shift import shift_right


def test_row_t_is_row_t_minus_one():
    states = torch.arange(1.0, 25.0).view(4, 3, 2)
    found = shift_right(states)
    assert not found[0].any() and torch.equal(found[1:], states[:-1])
    assert not shift_right(states[:1]).any()


def test_the_last_row_gets_no_gradient():
    states = torch.ones(4, 2, 3, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.arange(1.0, 5.0)[:, None, None]
    (shift_right(states) * weights).sum().backward()
    assert states.grad[:, 0, 0].tolist() == [2, 3, 4, 0]
    assert shift_right(states).dtype == torch.bfloat16
