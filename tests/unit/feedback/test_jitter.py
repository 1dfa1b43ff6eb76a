"""Noise on the carried state: exact values, range, moments, and the same element wherever it is computed."""

import itertools

import pytest
import torch

from megatron_fbt.feedback.jitter import jitter_noise


def noise(ids, positions, pass_number=2, hidden=8, seed=1234, scale=1.0) -> torch.Tensor:
    """[s, b, h]."""
    return jitter_noise(scale, torch.as_tensor(ids), torch.as_tensor(positions), pass_number, hidden, seed)


def test_golden_values():
    found = jitter_noise(0.02, torch.tensor([0, 3 * 10**12]), torch.tensor([0, 5]), 2, 3, 1234)
    expected = [
        [[-0.009256257675588131, -0.011639437638223171, -0.012901303358376026]]
        + [[0.003247525542974472, -0.0034228467848151922, 0.0035102199763059616]],
        [[-0.006047396454960108, 0.018468361347913742, -0.012949354015290737]]
        + [[0.00513286329805851, -0.007066137623041868, 0.008177733048796654]],
    ]
    assert found.tolist() == expected


def test_shape_type_and_range():
    found = noise(torch.arange(40), torch.arange(50), hidden=64)
    assert found.shape == (50, 40, 64) and found.dtype == torch.float32
    assert -1 <= found.min() < -0.999 and 0.999 < found.max() < 1
    assert noise([1], [2], scale=0.02).abs().max() <= 0.02


def test_scale_zero_is_no_noise_and_scale_is_a_factor():
    assert not noise([1, 2], [0, 1, 2], scale=0.0).any()
    assert torch.equal(noise([1, 2], [0, 1], scale=0.25), 0.25 * noise([1, 2], [0, 1]))


def test_moments():
    found = noise(torch.arange(30), torch.arange(100), hidden=128).double()
    count = found.numel()
    assert found.mean().item() == pytest.approx(0, abs=5 / (3 * count) ** 0.5)
    assert found.var().item() == pytest.approx(1 / 3, rel=0.01)
    histogram = torch.histc(found.float(), 64, -1, 1)
    assert ((histogram - count / 64) ** 2 / (count / 64)).sum() < 120  # chi-square, 63 degrees of freedom


@pytest.mark.parametrize("axis", ["position", "sample", "channel", "far channel"])
def test_neighbours_are_uncorrelated(axis):
    found = noise(torch.arange(24), torch.arange(64), hidden=96).double()
    a, b = {
        "position": (found[1:], found[:-1]),
        "sample": (found[:, 1:], found[:, :-1]),
        "channel": (found[..., 1:], found[..., :-1]),
        "far channel": (found[..., 64:], found[..., :-64]),
    }[axis]
    correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].abs()
    assert correlation < 5 / a.numel() ** 0.5


def test_samples_passes_positions_and_seeds_have_noise_of_their_own():
    places = itertools.product([0, 1, 2**31, 2**32 + 1, 3 * 10**12], [0, 1, 31, 2**31], [2, 3, 16], [0, 1, 1234])
    rows = [noise([sample], [position], k, 64, seed).flatten() for sample, position, k, seed in places]
    stacked = torch.stack(rows)
    assert len(stacked) == 180
    assert len(torch.unique(stacked, dim=0)) == 180
    assert (torch.corrcoef(stacked) - torch.eye(180)).abs().max() < 0.75


def test_an_element_is_the_same_in_any_sequence_shard_and_any_batch():
    ids, positions = torch.arange(6) + 2**32 - 3, torch.arange(24)
    whole = noise(ids, positions, 3)
    for shards, size in itertools.product([1, 2, 4, 8], [1, 2, 6]):
        rows = [torch.cat([noise(i, p, 3) for i in ids.split(size)], dim=1) for p in positions.chunk(shards)]
        assert torch.equal(torch.cat(rows), whole)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    assert torch.equal(noise(ids[order], positions, 3), whole[:, order])


def test_fewer_channels_are_the_first_of_many():
    assert torch.equal(noise([3], [1, 2], hidden=5), noise([3], [1, 2], hidden=64)[..., :5])


def test_global_generators_are_neither_read_nor_moved():
    before, first = torch.get_rng_state(), noise([1], [1])
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(99)
    assert torch.equal(noise([1], [1]), first)
