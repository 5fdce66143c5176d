"""Intersections and differences of key group ranges."""

from __future__ import annotations

import random
from itertools import pairwise

from storage.key_group_sets import ByKeyGroups, KeyGroupsLeft, to_pairs, within, without, without_all
from storage.key_groups import KeyGroupRange


def members(parts: tuple[KeyGroupRange, ...]) -> set[int]:
    """Return the key groups, and check that the ranges ascend and do not overlap."""
    assert all(one.last < other.first for one, other in pairwise(parts))
    return {key_group for part in parts for key_group in range(part.first, part.last + 1)}


def any_range(chance: random.Random) -> KeyGroupRange:
    """Return a range of a few key groups."""
    first, last = sorted(chance.choices(range(12), k=2))
    return KeyGroupRange(first, last)


def test_ranges_behave_as_sets() -> None:
    """Intersection and difference equal those of plain sets."""
    chance = random.Random(4)

    for _ in range(500):
        whole, taken, bounds = any_range(chance), [any_range(chance) for _ in range(3)], any_range(chance)
        left = without_all(whole, taken)
        expected = members((whole,)) - {key_group for other in taken for key_group in members((other,))}

        assert members(left) == expected
        assert members(within(left, bounds)) == expected & members((bounds,))
        assert members(without(left, bounds)) == expected - members((bounds,))


def test_each_key_group_is_taken_once() -> None:
    """Each call takes those of its key groups that no earlier one took."""
    chance = random.Random(5)
    for _ in range(200):
        whole = any_range(chance)
        left, expected = KeyGroupsLeft(whole), members((whole,))
        for wanted in [any_range(chance) for _ in range(5)]:
            assert members(left.take(wanted)) == expected & members((wanted,))
            expected -= members((wanted,))


def test_items_are_found_by_their_key_groups() -> None:
    """A look-up returns the items that share a key group with a range, whether or not they overlap each other."""
    chance = random.Random(6)
    for _ in range(200):
        ranges = [any_range(chance) for _ in range(chance.randrange(6))]
        items = ByKeyGroups(range(len(ranges)), ranges.__getitem__)
        wanted = any_range(chance)
        expected = [number for number, one in enumerate(ranges) if one.intersects(wanted)]

        assert items.within(wanted) == sorted(expected, key=lambda number: ranges[number].first)


def test_pairs_are_first_and_last() -> None:
    """On the wire a range is a pair, both ends included."""
    assert to_pairs(without((KeyGroupRange(0, 9),), KeyGroupRange(3, 4))) == [[0, 2], [5, 9]]
