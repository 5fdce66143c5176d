"""
The keys that a partition visits in a batch: those with rows, and those with due timers.

A key is visited once, because changes sent pre-emptively are not read again. So the due timers of a key group are read
before its first key; they join the rows of their keys, and timers of keys without rows follow. Memory holds the due
timers of one key group, about 200 bytes each. Entries whose TTL is over are removed on the same pass, before any key of
their group is visited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from backend_client.spark.task.rows import KeyRows
from backend_client.state.expiry import remove_expired
from backend_client.state.keyed_state import KeyedState
from backend_client.state.timers import Upcoming, due_timers
from storage.validation import KEY_GROUP_MAX

_REMOVED_MIN = 20_000
_END = KeyRows(KEY_GROUP_MAX + 1, (), iter(()))  # after all key groups


class Visit(NamedTuple):
    """A key, encoded and, if it has rows, decoded; its stored due timers; its rows, or None."""

    key_group: int
    encoded: bytes
    key: tuple[Any, ...]
    due: Sequence[int]
    rows: Iterator[Any] | None


def key_visits(
    grouped: Iterable[KeyRows],
    state: KeyedState,
    encode: Callable[[tuple[Any, ...]], bytes],
    due_until_ms: int,
    *,
    expiring: bool,
    upcoming: Upcoming | None = None,
) -> Iterator[Visit]:
    """
    Yield one visit for each key with rows or due timers, in ascending order of key groups.

    Args:
        grouped: The keys with rows.
        state: The partition's state.
        encode: Returns a key's bytes.
        due_until_ms: Timers up to this moment, inclusive, are due.
        expiring: Whether there may be entries with a TTL.
        upcoming: Records stored timers that are due later.
    """
    groups, removed = state.key_groups, 0

    def due_in(key_group: int) -> dict[bytes, list[int]]:
        nonlocal removed
        # As many as this batch has written with a TTL, plus a constant: bounded, yet removal never falls behind.
        limit = _REMOVED_MIN + state.ends_written - removed
        if expiring and limit > 0:
            removed += remove_expired(state, key_group, limit)
        return due_timers(state, key_group, due_until_ms, upcoming)

    current = groups.first
    due = due_in(current)
    for key_group, key, rows in chain(grouped, [_END]):
        while current < min(key_group, groups.last + 1):
            for encoded, timers in due.items():
                yield Visit(current, encoded, (), timers, None)
            current += 1
            if current <= groups.last:
                due = due_in(current)
        if key_group > groups.last:
            return
        encoded = encode(key)
        yield Visit(key_group, encoded, key, due.pop(encoded, ()), rows)
