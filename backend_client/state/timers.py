"""
Timers: any number of moments per key at which the processor is to be called.

A timer is two table entries, both logged like all state: one under its key, for `Timers.timestamps`, and one under its
moment, so that due timers come first in their key group. One task, one thread.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from operator import index
from typing import SupportsIndex

from backend_client.state.keyed_collections import Entries
from backend_client.state.keyed_state import Heads, KeyedState, table_key
from storage.errors import InvalidInputError

# Variable numbers above those of all processors' variables.
BY_KEY = 0xFFFE
BY_TIME = 0xFFFF

_MOMENT = struct.Struct(">Q")
_BIAS = 1 << 63  # moments before 1970 sort before those after it
_HEAD_BYTES = 4


class Upcoming:
    """
    A lower bound, in ms, on when the first remaining timer is due; deleted timers count, too.

    `ms` is None without any.
    """

    __slots__ = ("ms",)

    def __init__(self) -> None:
        self.ms: int | None = None

    def note(self, timestamp_ms: int) -> None:
        """Record a remaining timer."""
        if self.ms is None or timestamp_ms < self.ms:
            self.ms = timestamp_ms


def due_timers(
    state: KeyedState, key_group: int, until_ms: int, upcoming: Upcoming | None = None
) -> dict[bytes, list[int]]:
    """
    Return a key group's stored timers up to a moment, inclusive: by key, each key's in ascending order.

    The first later timer is recorded in `upcoming`.
    """
    due: dict[bytes, list[int]] = {}
    begin = _HEAD_BYTES + _MOMENT.size
    end = _pack(until_ms)
    for entry, _ in state.scan(table_key(key_group, BY_TIME, b"")):
        moment = entry[_HEAD_BYTES:begin]
        if moment > end:
            if upcoming is not None:
                upcoming.note(_unpack(moment))
            break
        due.setdefault(entry[begin:], []).append(_unpack(moment))
    return due


class Timers(Entries):
    """
    The timers of the current key.

    Args:
        state: The current key.
        until_ms: Timers up to this moment are due in this batch.
        upcoming: Records timers that are due later.
    """

    __slots__ = ("_by_time", "_due", "_until_ms", "_upcoming")

    def __init__(self, state: KeyedState, until_ms: int, upcoming: Upcoming | None = None) -> None:
        super().__init__(state, BY_KEY)
        self._until_ms = until_ms
        self._upcoming = upcoming or Upcoming()
        self._by_time = Heads(state.key_groups, BY_TIME)
        self._due: set[int] = set()

    def register(self, timestamp_ms: SupportsIndex) -> None:
        """Set a timer, at a whole number such as NumPy's; setting the same moment again has no effect."""
        moment_ms = self._set(timestamp_ms, b"")
        if moment_ms <= self._until_ms:
            self._due.add(moment_ms)
        else:
            self._upcoming.note(moment_ms)

    def delete(self, timestamp_ms: SupportsIndex) -> None:
        """Remove a timer; no error if it does not exist."""
        self._due.discard(self._set(timestamp_ms, None))

    def timestamps(self) -> Iterator[int]:
        """Yield the timers in ms, in ascending order: those that are set when the first one is read, as in Spark."""
        prefix_bytes = len(self._enter())
        yield from sorted(_unpack(entry[prefix_bytes:]) for entry, _ in self._items())

    def add_due(self, timestamps: Iterable[int]) -> None:
        """Add stored due timers to those set in this batch."""
        self._due.update(timestamps)

    def take_due(self) -> list[int]:
        """Return the due timers that were not deleted, in ascending order, and forget them."""
        due = sorted(self._due)
        self._due.clear()
        return due

    def leave_due(self) -> None:
        """Leave the timers that are due now to the next batch."""
        for timestamp_ms in self.take_due():
            self._upcoming.note(timestamp_ms)

    def _set(self, timestamp_ms: SupportsIndex, value: bytes | None) -> int:
        state = self._state
        moment = _pack(timestamp_ms)
        self._write(self._enter() + moment, value)
        state.changes[self._by_time[state.key_group] + moment + state.key] = value
        state.changed_bytes += _HEAD_BYTES + _MOMENT.size + len(state.key)
        return _unpack(moment)


def _pack(timestamp_ms: SupportsIndex) -> bytes:
    try:
        return _MOMENT.pack(index(timestamp_ms) + _BIAS)
    except (TypeError, struct.error) as error:
        raise InvalidInputError(
            f"a timer must be a whole number of milliseconds since 1970 within 64 bits, not {timestamp_ms!r}"
        ) from error


def _unpack(moment: bytes) -> int:
    value: int = _MOMENT.unpack(moment)[0]
    return value - _BIAS
