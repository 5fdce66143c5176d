"""Intersections and differences of key group ranges."""

from __future__ import annotations

import random
from itertools import pairwise

from storage.key_group_sets import to_pairs, within, without, without_all
from storage.key_groups import KeyGroupRange


def members(parts: tuple[KeyGroupRange, ...]) -> set[int]:
    """Return the key groups, and check that the ranges ascend and do not overlap."""
    assert all(one.last < other.first for one, other in pairwise(parts))
    return {key_group for part in parts for key_group in range(part.first, part.last + 1)}


def test_ranges_behave_as_sets() -> None:
    """Intersection and difference equal those of plain sets."""
    chance = random.Random(4)

    def any_range() -> KeyGroupRange:
        first, last = sorted(chance.choices(range(12), k=2))
        return KeyGroupRange(first, last)

    for _ in range(500):
        whole, taken, bounds = any_range(), [any_range() for _ in range(3)], any_range()
        left = without_all(whole, taken)
        expected = members((whole,)) - {key_group for other in taken for key_group in members((other,))}

        assert members(left) == expected
        assert members(within(left, bounds)) == expected & members((bounds,))
        assert members(without(left, bounds)) == expected - members((bounds,))


def test_pairs_are_first_and_last() -> None:
    """On the wire a range is a pair, both ends included."""
    assert to_pairs(without((KeyGroupRange(0, 9),), KeyGroupRange(3, 4))) == [[0, 2], [5, 9]]
