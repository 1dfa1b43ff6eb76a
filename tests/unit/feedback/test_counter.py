"""The hash behind every draw: exact values, independence of its arguments, moments."""

import itertools
import random

import numpy
import pytest
import torch

from megatron_fbt.feedback.counter import (
    DROPOUT,
    INITIAL_WEIGHT,
    JITTER,
    PASS_COUNT,
    PREFIX,
    counter_hash,
    normal,
    uniform,
)

BITS = 2**64
LARGE = [2**31 - 1, 2**31, 2**32 + 1, 3 * 10**12, 2**62]


def by_definition(seed: int, stream: int, *counters: int) -> int:
    """The hash in Python's own integers."""

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % BITS
        x = (x ^ x >> 27) * 0x94D049BB133111EB % BITS
        return x ^ x >> 31

    golden = 0x9E3779B97F4A7C15
    state = mix((seed + (stream << 56) + golden) % BITS)
    for counter in counters:
        state = mix((state + (counter + 1) * golden) % BITS)
    return state


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0, 0), 0xE220A8397B1DCDAF),  # the first outputs of SplitMix64 as published, for seeds 0 and 1234567
        ((1234567, 0), 6457827717110365317),
        ((0, 1, 0), 0x59AC5A68D6A61DC1),
        ((0, 2, 0), 0x52AEAA4FCBE94889),
        ((1234, 1, 0), 0xA8BBDE725EFC574C),
        ((1234, 1, 1), 0x1C9D0E3E4E78D65B),
        ((1234, 2, 0), 0xBE6ECC404C809887),
        ((1234, 3, 7, 2, 5), 0xC2691ED6F5BFA1A0),
        ((1234, 4, 2**31 - 1), 0x001888EDFC419744),
        ((1234, 4, 2**31), 0x2CD32E6A2485FC5D),
        ((1234, 4, 2**32 + 1), 0x1D9464F9A334EA71),
        ((1234, 4, 3 * 10**12), 0x7E49984857777CB3),
    ],
)
def test_golden_values(arguments, expected):
    assert counter_hash(*arguments).item() % BITS == expected
    assert by_definition(*arguments) == expected


def test_streams_keep_their_numbers():
    assert (PASS_COUNT, PREFIX, JITTER, INITIAL_WEIGHT, DROPOUT) == (1, 2, 3, 4, 5)


def test_tensors_and_integers_broadcast_to_the_same_bits():
    rows, columns = torch.tensor(LARGE), torch.tensor([0, 2**33, 7])
    found = counter_hash(2**32 - 1, JITTER, rows[:, None], 3, columns[None])
    assert found.shape == (5, 3) and found.dtype == torch.int64
    for i, j in itertools.product(range(5), range(3)):
        assert found[i, j].item() % BITS == by_definition(2**32 - 1, JITTER, LARGE[i], 3, columns[j].item())


def test_no_two_neighbouring_arguments_share_a_draw():
    seeds, streams, counters = [0, 1, 1234, 2**31, 2**32 - 1, 2**56 - 1], range(1, 6), [0, 1, 256, *LARGE[:3]]
    draws = [counter_hash(*arguments).item() for arguments in itertools.product(seeds, streams, counters, counters)]
    assert len(set(draws)) == len(draws) == 6 * 5 * 6 * 6


@pytest.mark.parametrize(("seed", "stream"), [(-1, 1), (2**56, 1), (2**70, 1), (0, 128), (0, -1)])
def test_arguments_that_would_share_draws_are_refused(seed, stream):
    with pytest.raises(AssertionError, match="share draws"):
        counter_hash(seed, stream, 0)


def test_global_generators_are_neither_read_nor_moved():
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    first = counter_hash(1, 2, torch.arange(50))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate() and (before[2] == numpy.random.get_state()[1]).all()
    torch.manual_seed(77)
    torch.rand(3)
    assert torch.equal(counter_hash(1, 2, torch.arange(50)), first)


def test_uniform_uses_the_upper_53_bits_and_stays_below_one():
    bits = torch.tensor([0, -1, -(2**63), 2**63 - 1, 2**11, 2**11 - 1])
    expected = [0.0, 1 - 2.0**-53, 0.5, 0.5 - 2.0**-53, 2.0**-53, 0.0]
    assert uniform(bits).tolist() == expected
    assert uniform(bits).dtype == torch.float64


def test_normal_is_finite_at_the_ends_of_its_range():
    bits = torch.tensor([0, -1, -(2**63), 2**63 - 1, 2**32 - 1, 2**31])
    found = normal(bits)
    assert found.dtype == torch.float64 and found.isfinite().all()
    assert found[0].item() == pytest.approx((2 * 33 * 0.6931471805599453) ** 0.5, rel=1e-12)
    assert found[5].item() == pytest.approx(-found[0].item(), rel=1e-12)  # half a turn


@pytest.mark.parametrize("stream", [PASS_COUNT, INITIAL_WEIGHT])
def test_moments(stream):
    count = 400_000
    bits = counter_hash(1234, stream, torch.arange(count))
    u, z = uniform(bits), normal(bits)
    assert u.mean().item() == pytest.approx(0.5, abs=5 / (12 * count) ** 0.5)
    assert u.var().item() == pytest.approx(1 / 12, rel=0.01)
    assert z.mean().item() == pytest.approx(0, abs=5 / count**0.5)
    assert z.var().item() == pytest.approx(1, rel=0.012)
    assert (z**4).mean().item() == pytest.approx(3, rel=0.04)
    assert (z.abs() < 1).double().mean().item() == pytest.approx(0.6827, abs=0.004)
    assert torch.corrcoef(torch.stack([z[:-1], z[1:]]))[0, 1].abs() < 5 / count**0.5
    histogram = torch.histc(u.float(), 64, 0, 1)
    assert ((histogram - count / 64) ** 2 / (count / 64)).sum() < 120  # chi-square, 63 degrees of freedom


def test_every_bit_is_fair_and_every_counter_bit_flips_half_of_them():
    numbers = torch.arange(20_000)
    bits = counter_hash(0, PREFIX, numbers)
    shares = torch.stack([(bits >> k & 1).double().mean() for k in range(64)])
    assert (shares - 0.5).abs().max() < 0.02
    for k in (0, 7, 31, 32, 47, 61):
        changed = bits ^ counter_hash(0, PREFIX, numbers ^ (1 << k))
        flips = torch.stack([(changed >> j & 1).double().mean() for j in range(64)])
        assert (flips - 0.5).abs().max() < 0.02
