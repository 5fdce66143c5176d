"""
State as a user's function sees it: the current key's variables, with this batch's writes.

Writes stay in an overlay over the table, the last value per key (I1: the table itself is not changed); the log writer
seals the overlay. Reads check the overlay first. One task, one thread.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NoReturn

from backend_client.state.codec import ValueCodec
from storage.errors import InvalidInputError
from storage.key_groups import KeyGroupRange

_HEAD = struct.Struct(">HH")
_MISSING = object()
_NO_KEY = -1


def table_key(key_group: int, state_id: int, key: bytes) -> bytes:
    """Return the table key of a value: key group, state id (2 bytes each, big-endian), key."""
    return _HEAD.pack(key_group, state_id) + key


class Heads(dict[int, bytes]):
    """The first bytes of a variable's table keys, by key group."""

    def __init__(self, key_groups: KeyGroupRange, state_id: int) -> None:
        groups = range(key_groups.first, key_groups.last + 1)
        super().__init__((group, table_key(group, state_id, b"")) for group in groups)

    def __missing__(self, _: int) -> NoReturn:
        raise InvalidInputError(
            "a state variable or timer was used without a key: use it in handleInputRows, handleExpiredTimer or "
            "handleInitialState, not in init or close"
        )


class CountedReads:
    """A table's read function with a counter."""

    __slots__ = ("_get", "count")

    def __init__(self, get: Callable[[bytes], bytes | None]) -> None:
        self._get = get
        self.count = 0

    def __call__(self, key: bytes) -> bytes | None:
        """Return a table entry's value."""
        self.count += 1
        return self._get(key)


class KeyedState:
    """
    The current key and the changes made so far.

    Args:
        read: Returns a table entry's value.
        key_groups: The partition's key groups.
        scan: Yields the table entries whose keys have a prefix, in ascending order of keys.
        checkpoint_id: The running batch.
        timestamp_ms: Its processing time, which TTLs use.
        parts_from: The first number of this batch's list parts; greater in its second pass.

    `changes` and `changed_bytes` are the writes since the last `take_changes`, `ends_written` counts writes with a TTL,
    and `before_taking` is called before changes are taken, to write what is buffered. The attributes are public because
    the hot path below uses them in every state call.
    """

    __slots__ = (
        "before_taking",
        "changed_bytes",
        "changes",
        "checkpoint_id",
        "ends_written",
        "key",
        "key_group",
        "key_groups",
        "parts_from",
        "read",
        "scan",
        "timestamp_ms",
    )

    def __init__(
        self,
        read: Callable[[bytes], bytes | None],
        key_groups: KeyGroupRange,
        scan: Callable[[bytes], Iterator[tuple[bytes, bytes]]],
        checkpoint_id: int,
        timestamp_ms: int = 0,
        parts_from: int = 0,
    ) -> None:
        self.parts_from = parts_from
        self.read = read
        self.scan = scan
        self.checkpoint_id = checkpoint_id
        self.timestamp_ms = timestamp_ms
        self.key_groups = key_groups
        self.key_group = key_groups.first
        self.key = b""
        self.changes: dict[bytes, bytes | None] = {}
        self.changed_bytes = 0
        self.ends_written = 0
        self.before_taking: list[Callable[[], None]] = []

    def leave_key(self) -> None:
        """Have no current key: until there is one, its variables refuse to be used."""
        self.key_group, self.key = _NO_KEY, b""

    def take_changes(self) -> dict[bytes, bytes | None]:
        """
        Return the changes and start an empty set.

        Only call it between keys: a batch visits each key once, so it does not read the taken changes again.
        """
        for write in self.before_taking:
            write()
        changes, self.changes, self.changed_bytes = self.changes, {}, 0
        return changes


class ValueVariable:
    """A single value per key: the methods of PySpark's ``ValueState``."""

    __slots__ = ("_codec", "_heads", "_state")

    def __init__(self, state: KeyedState, state_id: int, codec: ValueCodec) -> None:
        self._state = state
        self._codec = codec
        self._heads = Heads(state.key_groups, state_id)

    def exists(self) -> bool:
        """Return whether the current key has a value."""
        return self._read() is not None

    def get(self) -> tuple[object, ...] | None:
        """Return the current key's value, or None."""
        data = self._read()
        return None if data is None else self._codec.decode(data)

    def update(self, newValue: tuple[object, ...]) -> None:
        """
        Set the current key's value.

        Raises:
            InvalidInputError: The value does not fit the schema; names the field. The state is as before.
        """
        state = self._state
        data = self._codec.encode(newValue)
        state.changes[self._heads[state.key_group] + state.key] = data
        state.changed_bytes += len(data) + len(state.key) + 4

    def clear(self) -> None:
        """Remove the current key's value."""
        state = self._state
        state.changes[self._heads[state.key_group] + state.key] = None
        state.changed_bytes += len(state.key) + 4

    def _read(self) -> bytes | None:
        state = self._state
        key = self._heads[state.key_group] + state.key
        data = state.changes.get(key, _MISSING)
        return state.read(key) if data is _MISSING else data  # type: ignore[return-value]
