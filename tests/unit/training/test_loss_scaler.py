"""The loss scale follows overflows as Megatron-Core's does."""

import random

import pytest

from megatron_fbt.config.precision import PrecisionConfig
from megatron_fbt.training.loss_scaler import LossScaler


def fp16(**options):
    return PrecisionConfig(dtype="fp16", **options)


@pytest.mark.parametrize("hysteresis", [1, 2, 5])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_scales_are_those_of_megatron_core(monkeypatch, hysteresis, share):
    import torch
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    from megatron_fbt.core.cpu import enable_cpu_mode

    enable_cpu_mode()
    config = fp16(initial_loss_scale=2.0**20, loss_scale_window=7, hysteresis=hysteresis)
    ours, generator = LossScaler(config), random.Random(3)
    theirs = DynamicGradScaler(2.0**20, config.min_loss_scale, 2.0, 0.5, 7, hysteresis)
    seen = set()
    for _ in range(200):
        assert ours.scale == theirs.scale.item()
        overflow = generator.random() < share
        ours.update(overflow)
        theirs.update(torch.tensor(overflow))
        seen.add(ours.scale)
    assert len(seen) > 5


def test_a_scale_at_its_minimum_may_not_fall():
    scaler = LossScaler(fp16(initial_loss_scale=4.0, min_loss_scale=2.0, hysteresis=1))
    assert scaler.may_fall
    scaler.update(True)
    assert scaler.scale == 2.0 and not scaler.may_fall
    scaler.update(True)
    assert scaler.scale == 2.0


def test_a_resumed_run_may_have_a_smaller_window_and_a_larger_minimum():
    scaler = LossScaler(fp16(initial_loss_scale=64.0, loss_scale_window=2, min_loss_scale=8.0))
    scaler.restore([4.0, 5, 2])
    assert scaler.scale == 8.0
    scaler.update(False)
    assert scaler.scale == 16.0


def test_a_constant_scale_stays():
    scaler = LossScaler(fp16(loss_scale=128.0))
    scaler.restore([4.0, 1, 1])
    for overflow in (True, True, True, False):
        scaler.update(overflow)
    assert scaler.scale == 128.0 and not scaler.may_fall


def test_a_state_goes_on_where_it_was():
    config = fp16(initial_loss_scale=64.0, loss_scale_window=3, hysteresis=2)
    one, other = LossScaler(config), LossScaler(config)
    events = [False, True, False, False, True, True, False, False, False, True, False]
    for event in events[:5]:
        one.update(event)
    other.restore(one.state)
    for event in events[5:]:
        one.update(event)
        other.update(event)
        assert one.state == other.state
