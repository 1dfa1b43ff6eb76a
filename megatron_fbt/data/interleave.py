"""Items taken in turn, each as often as its quota says: the item of every place without looking at those before it."""

import heapq
from fractions import Fraction
from typing import List, Sequence, Tuple, Union

_Node = Union[int, Tuple]
"""An item, or (quota of the left side, quota of both, left side, right side)."""


class Interleaving:
    """An order of sum(quotas) places in which item i comes exactly quotas[i] times, evenly spread.

    Two items with quotas L and R alternate so that of the first m places round(m L / (L + R)) belong to the first one.
    More of them are put together two by two, the rarest first, and each pair shares the places of its sum in the same
    way. All of it is integer arithmetic of any size, and there is no table: a place costs a walk down the pairs.
    After any number of places an item has come as often as its share says, give or take less than two.

    Args:
        quotas: how often each item comes, 0 or more.
    """

    def __init__(self, quotas: Sequence[int]):
        self.quotas = list(quotas)
        self.length = sum(self.quotas)
        parts: List[Tuple[int, int, _Node]] = [(quota, item, item) for item, quota in enumerate(quotas) if quota > 0]
        heapq.heapify(parts)
        number = len(self.quotas)
        while len(parts) > 1:
            (right, _, rarer), (left, _, commoner) = heapq.heappop(parts), heapq.heappop(parts)
            heapq.heappush(parts, (left + right, number, (left, left + right, commoner, rarer)))
            number += 1
        self._root: _Node = parts[0][2] if parts else 0

    def place(self, number: int) -> Tuple[int, int]:
        """Which item comes at a place, and how often it has come before.

        Args:
            number: 0 to length - 1.
        """
        node = self._root
        while not isinstance(node, int):
            left, both, first, second = node
            before = (2 * number * left + both) // (2 * both)
            if (2 * (number + 1) * left + both) // (2 * both) > before:
                node, number = first, before
            else:
                node, number = second, number - before
        return node, number

    def counts(self, number: int) -> List[int]:
        """How often each item comes in the first so many places."""
        found = [0] * len(self.quotas)
        waiting: List[Tuple[_Node, int]] = [(self._root, number)] if self.length else []
        while waiting:
            node, number = waiting.pop()
            if isinstance(node, int):
                found[node] = number
                continue
            left, both, first, second = node
            before = (2 * number * left + both) // (2 * both)
            waiting += [(first, before), (second, number - before)]
        return found


def apportion(total: int, weights: Sequence) -> List[int]:
    """Whole numbers that add up to a total, each less than one from its exact share.

    Args:
        total: at least 0.
        weights: integers or fractions, not negative, not all zero; floats are taken as they are, exactly.
    """
    exact = [Fraction(weight) for weight in weights]
    whole = sum(exact)
    shares = [total * weight / whole for weight in exact]
    quotas = [int(share) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda item: (quotas[item] - shares[item], item))
    for item in by_rest[: total - sum(quotas)]:
        quotas[item] += 1
    return quotas
