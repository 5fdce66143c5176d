"""
In which order the tests run, so that no process is left with a long one at the end.

xdist's `worksteal` gives each process one contiguous part of the list, and an idle process takes from the tail of
another's part. So each part begins with long tests of its own, and ends with short ones that cost nothing to move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

LONG_S = 600.0
"""A test that may take this long is dealt by itself; shorter ones stay with their module, whose servers they share."""

_T = TypeVar("_T")


def dealt(
    items: Sequence[_T], cost_s: Callable[[_T], float], module: Callable[[_T], object], processes: int
) -> list[_T]:
    """
    Return the items as one list of as many parts as there are processes, each from long to short.

    Modules without a cost fill up the shortest part, so that parts are about as long as those that xdist cuts.

    Args:
        items: Modules stay whole and in this order, but for tests that are long.
        cost_s: How long a test may take; 0 where that is not worth knowing.
        module: What a test shares servers with.
        processes: At least 1.
    """
    groups: dict[tuple[str, object], list[_T]] = {}
    for item in items:
        key = ("long", id(item)) if cost_s(item) >= LONG_S else ("module", module(item))
        groups.setdefault(key, []).append(item)
    costs = {key: max(map(cost_s, group)) for key, group in groups.items()}
    parts: list[list[_T]] = [[] for _ in range(processes)]
    for number, key in enumerate(sorted(groups, key=costs.__getitem__, reverse=True)):
        part = parts[number % processes] if costs[key] else min(parts, key=len)
        part.extend(groups[key])
    return [item for part in parts for item in part]
