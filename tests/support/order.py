"""
In which order the tests run, so that no process is left with a long one at the end.

xdist's `worksteal` gives each process one contiguous part of the list, and an idle process takes from the tail of
another's part. So each part begins with long tests of its own, and ends with short ones that cost nothing to move.
Tests with Spark compute and tests with other servers wait, so the last part has these first: both run side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import TypeVar

LONG_S = 600.0
"""A test that may take this long is dealt by itself; shorter ones stay with their module, whose servers they share."""

_T = TypeVar("_T")


def dealt(
    items: Sequence[_T], cost_s: Callable[[_T], float], module: Callable[[_T], object], processes: int
) -> list[_T]:
    """
    Return the items as one list of as many parts as there are processes, each from long to short.

    In the last one of several parts, modules with a cost come from short to long, after the tests that are long.
    Items without a cost fill the parts up, so that they are exactly those that xdist cuts: the first tests of a part,
    which are the longest, would else be the last ones of another process.

    Args:
        items: Modules stay whole and in this order, but for tests that are long, and where a part ends.
        cost_s: How long a test may take; 0 where that is not worth knowing.
        module: What a test shares servers with.
        processes: At least 1.
    """
    groups: dict[tuple[str, object], list[_T]] = {}
    for item in items:
        key = ("long", id(item)) if cost_s(item) >= LONG_S else ("module", module(item))
        groups.setdefault(key, []).append(item)
    costs = {key: max(map(cost_s, group)) for key, group in groups.items()}
    known = sorted((key for key in groups if costs[key]), key=costs.__getitem__, reverse=True)
    parts = [known[number::processes] for number in range(processes)]
    if processes > 1:
        parts[-1].sort(key=lambda key: costs[key] if costs[key] < LONG_S else 0.0)
    fill = iter([item for key, group in groups.items() if not costs[key] for item in group])
    order: list[_T] = []
    for number, part in enumerate(parts):
        order += [item for key in part for item in groups[key]]
        order += islice(fill, max(0, _end_of_part(len(items), number, processes) - len(order)))
    return order


def _end_of_part(items: int, number: int, processes: int) -> int:
    """Return where a part ends: each is an equal share, rounded down, of what the parts before it have left."""
    end = 0
    for left in range(processes, processes - number - 1, -1):
        end += (items - end) // left
    return end
