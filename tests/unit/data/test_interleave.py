"""Taking turns by quota: exact counts, small deviations on the way, any place without those before it, any size."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fbt.data.interleave import Interleaving, apportion

HUGE = [2**31 - 1, 2**31, 2**32 + 1, 3 * 10**12]


@given(st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any))
def test_each_item_comes_as_often_as_its_quota_and_never_far_from_its_share(quotas):
    order, seen, total = Interleaving(quotas), Counter(), sum(quotas)
    assert order.length == total
    for place in range(total):
        assert order.counts(place) == [seen[item] for item in range(len(quotas))]
        item, before = order.place(place)
        assert before == seen[item]
        seen[item] += 1
        assert max(abs(seen[i] - quotas[i] * (place + 1) / total) for i in range(len(quotas))) < 2
    assert [seen[item] for item in range(len(quotas))] == quotas == order.counts(total)


def test_two_items_alternate_by_hand():
    assert [Interleaving([3, 1]).place(n) for n in range(4)] == [(0, 0), (0, 1), (1, 0), (0, 2)]
    assert [Interleaving([2, 2]).place(n)[0] for n in range(4)] in ([0, 1, 0, 1], [1, 0, 1, 0])


@pytest.mark.parametrize("total", HUGE)
def test_counts_of_any_size_are_exact(total):
    weights = [10.0 ** -(i % 13) * (1 + i) for i in range(300)]
    quotas = apportion(total, weights)
    assert sum(quotas) == total
    order = Interleaving(quotas)
    assert order.counts(total) == quotas
    for number in (0, 1, 2**31 - 2, total // 3, total - 2, total - 1):
        before, after = order.counts(number), order.counts(number + 1)
        item, times = order.place(number)
        assert before[item] == times and sum(before) == number
        before[item] += 1
        assert before == after


@given(st.integers(0, 10**13), st.lists(st.floats(0, 1e12), min_size=1, max_size=40).filter(any))
def test_shares_are_less_than_one_from_exact_ones(total, weights):
    quotas, whole = apportion(total, weights), sum(map(Fraction, weights))
    assert sum(quotas) == total
    assert all(abs(q - total * Fraction(w) / whole) < 1 for q, w in zip(quotas, weights, strict=True))
    assert all(q == 0 for q, w in zip(quotas, weights, strict=True) if w == 0)
