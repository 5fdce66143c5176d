"""Sets of key groups as ascending, disjoint ranges, and their intersection and difference. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from storage.key_groups import KeyGroupRange

KeyGroups = tuple[KeyGroupRange, ...]
"""Ascending ranges without overlap; empty for no key group at all."""


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
