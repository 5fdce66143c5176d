"""Sets of key groups as ascending, disjoint ranges, and their intersection and difference. No I/O."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from storage.key_groups import KeyGroupRange

_T = TypeVar("_T")

KeyGroups = tuple[KeyGroupRange, ...]
"""Ascending ranges without overlap; empty if there is no key group."""


def within(key_groups: Iterable[KeyGroupRange], bounds: KeyGroupRange) -> KeyGroups:
    """Return the key groups inside `bounds`."""
    return tuple(
        KeyGroupRange(max(part.first, bounds.first), min(part.last, bounds.last))
        for part in key_groups
        if part.intersects(bounds)
    )


def without(key_groups: Iterable[KeyGroupRange], taken: KeyGroupRange) -> KeyGroups:
    """Return the key groups outside `taken`."""
    left: list[KeyGroupRange] = []
    for part in key_groups:
        if not part.intersects(taken):
            left.append(part)
            continue
        if part.first < taken.first:
            left.append(KeyGroupRange(part.first, taken.first - 1))
        if taken.last < part.last:
            left.append(KeyGroupRange(taken.last + 1, part.last))
    return tuple(left)


def without_all(key_groups: KeyGroupRange, taken: Iterable[KeyGroupRange]) -> KeyGroups:
    """Return the part of a range that is outside all of `taken`."""
    left: KeyGroups = (key_groups,)
    for other in taken:
        left = without(left, other)
    return left


def to_pairs(key_groups: Sequence[KeyGroupRange]) -> list[list[int]]:
    """Return the ranges as JSON-able pairs of first and last."""
    return [[part.first, part.last] for part in key_groups]


class KeyGroupsLeft:
    """
    The key groups of a range that nobody has taken yet; the time to take some hardly grows with the number of parts.

    Args:
        all_of_them: The range.
    """

    def __init__(self, all_of_them: KeyGroupRange) -> None:
        self._parts = [all_of_them]

    def take(self, wanted: KeyGroupRange) -> KeyGroups:
        """Take those of these key groups that are left, and return them."""
        begin = bisect_left(self._parts, wanted.first, key=lambda part: part.last)
        end = bisect_right(self._parts, wanted.last, key=lambda part: part.first)
        found = self._parts[begin:end]
        self._parts[begin:end] = without(found, wanted)
        return within(found, wanted)


class ByKeyGroups(Generic[_T]):
    """
    Items with ranges of key groups, for look-ups in a time that hardly grows with their number.

    Args:
        items: The items; their ranges may overlap.
        key_groups_of: Returns the range of an item.
    """

    def __init__(self, items: Iterable[_T], key_groups_of: Callable[[_T], KeyGroupRange]) -> None:
        self._items = sorted(((key_groups_of(item), item) for item in items), key=lambda pair: pair[0].first)
        self._firsts = [key_groups.first for key_groups, _ in self._items]
        self._last_so_far = list(accumulate((key_groups.last for key_groups, _ in self._items), max))

    def within(self, wanted: KeyGroupRange) -> list[_T]:
        """Return the items that have some of these key groups, by their first ones."""
        begin, end = bisect_left(self._last_so_far, wanted.first), bisect_right(self._firsts, wanted.last)
        return [item for key_groups, item in self._items[begin:end] if key_groups.intersects(wanted)]
