"""
The keys that a partition visits in a batch: those with rows, and those with timers that are due.

A key is visited once: what is sent pre-emptively is not read again. So the due timers of a key group are looked up when
its first row comes, go with the rows of their keys, and those of keys without rows come behind. What is held is the due
timers of one key group, about 200 bytes each. Entries whose time to live is over are removed on the same way, before
any key of their group is visited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from backend_client.key_runs import same_key
from backend_client.spark.task.rows import KeyRows
from backend_client.state.expiry import remove_expired
from backend_client.state.keyed_state import KeyedState
from backend_client.state.timers import Upcoming, due_timers
from storage.model import KEY_GROUP_MAX

_REMOVED_MIN = 20_000
_END = KeyRows(KEY_GROUP_MAX + 1, (), iter(()))  # behind all key groups


class Visit(NamedTuple):
    """
    A key, as it is in the table and, if it has rows, itself; its stored timers that are due; and its rows.

    `early` are the rows that come before the timers; `rows` returns the others, once those are consumed. None for no
    rows.
    """

    key_group: int
    encoded: bytes
    key: tuple[Any, ...]
    due: Sequence[int]
    early: Iterator[Any] | None
    rows: Callable[[], Iterator[Any] | None]


@dataclass(frozen=True, slots=True)
class KeyVisits:
    """
    Joins the keys with rows and those with due timers.

    Args:
        state: Of the partition.
        encode: Returns a key's bytes.
        due_until_ms: Timers up to this moment are due.
        has_early: Whether keys end with whether their rows are not early.
        expiring: Whether there may be entries with a time to live.
        upcoming: Told of stored timers that are due later.
    """

    state: KeyedState
    encode: Callable[[tuple[Any, ...]], bytes]
    due_until_ms: int
    has_early: bool
    expiring: bool
    upcoming: Upcoming | None = None

    def of(self, grouped: Iterable[KeyRows]) -> Iterator[Visit]:
        """Yield one visit for each key, by ascending key groups."""
        groups = self.state.key_groups
        current, removed = groups.first, self._remove_expired(groups.first, 0)
        due = due_timers(self.state, current, self.due_until_ms, self.upcoming)
        left = _Left(chain(grouped, [_END]))
        for key_group, key, rows in left:
            while current < min(key_group, groups.last + 1):
                for encoded, timers in due.items():
                    yield Visit(current, encoded, (), timers, None, _no_rows)
                current += 1
                if current <= groups.last:
                    removed = self._remove_expired(current, removed)
                    due = due_timers(self.state, current, self.due_until_ms, self.upcoming)
            if key_group > groups.last:
                return
            if not self.has_early:
                encoded = self.encode(key)
                yield Visit(key_group, encoded, key, due.pop(encoded, ()), None, partial(_given, rows))
                continue
            *parts, not_early = key
            own = tuple(parts)
            encoded = self.encode(own)
            if not_early:
                yield Visit(key_group, encoded, own, due.pop(encoded, ()), None, partial(_given, rows))
            else:
                others = partial(left.rows_of, (*own, True))
                yield Visit(key_group, encoded, own, due.pop(encoded, ()), rows, others)

    def _remove_expired(self, key_group: int, removed: int) -> int:
        # As many as this batch has written with a time to live, and then some: bounded, and never falling behind.
        limit = _REMOVED_MIN + self.state.ends_written - removed
        if not self.expiring or limit <= 0:
            return removed
        return removed + remove_expired(self.state, key_group, limit)


class _Left:
    """The keys that are left; the next one can be taken if it is the one that is asked for."""

    def __init__(self, keys: Iterator[KeyRows]) -> None:
        self._keys = keys
        self._next: KeyRows | None = None

    def __iter__(self) -> Iterator[KeyRows]:
        while True:
            item = self._next or next(self._keys, None)
            self._next = None
            if item is None:
                return
            yield item

    def rows_of(self, key: tuple[Any, ...]) -> Iterator[Any] | None:
        self._next = next(self._keys, None)
        # The end has a key without columns, which is like all others to `same_key`.
        if self._next is None or self._next is _END or not same_key(self._next.key, key):
            return None
        rows, self._next = self._next.rows, None
        return rows


def _given(rows: Iterator[Any]) -> Iterator[Any]:
    return rows


def _no_rows() -> None:
    return None
