"""
Time to live (TTL): stored entries that carry the moment at which they end.

An expired entry is invisible from the first batch at or after its end. It is removed later, a bounded number per batch,
by an index of ends that is logged like all state. The end belongs to the stored entry, not to its variable: a changed
TTL applies to later writes only, and entries written without one never expire. Moments are batch times, so everything
repeats exactly when a batch is executed again (I14).
"""

from __future__ import annotations

import operator
import struct
from typing import SupportsIndex

from backend_client.state.codec import ValueCodec
from backend_client.state.keyed_state import KeyedState, ValueVariable, table_key
from storage.errors import InvalidInputError

EXPIRY = 0xFFFD
"""Number of the index in table keys; above those of all variables."""

_TTL_MS_MAX = (1 << 53) - 1  # whole numbers of JSON
_MARK = b"\xc1"  # the only byte that starts no MessagePack value
_MOMENT = struct.Struct(">Q")
_INDEX = EXPIRY.to_bytes(2, "big")
_INDEX_BEGIN = 2 + 2 + _MOMENT.size
_VALUE_BEGIN = 1 + _MOMENT.size
# Index entries are rounded up to this fraction of a TTL, so a value written in every batch has few of them.
_SLOTS = 16


def check_ttl(name: str, ttl_ms: SupportsIndex) -> int:
    """
    Return a TTL, which may be one of NumPy's integers, as Python's.

    Raises:
        InvalidInputError: It is not a positive integer.
    """
    whole = operator.index(ttl_ms) if hasattr(ttl_ms, "__index__") and not isinstance(ttl_ms, bool) else 0
    if not 0 < whole <= _TTL_MS_MAX:
        raise InvalidInputError(
            f"ttlDurationMs of state {name!r} must be a positive whole number up to {_TTL_MS_MAX}, not {ttl_ms!r}"
        )
    return whole


class Expiry:
    """
    Adds ends to written values, and checks them on reads.

    Args:
        state: The partition's state.
        ttl_ms: The TTL of values written now; 0 for none, where older entries may still have an end.
    """

    __slots__ = ("_slot_ms", "_state", "_ttl_ms")

    def __init__(self, state: KeyedState, ttl_ms: int) -> None:
        self._state = state
        self._ttl_ms = ttl_ms
        self._slot_ms = max(1, ttl_ms // _SLOTS)

    def put(self, entry: bytes, value: bytes) -> bytes:
        """Return `value` with its end, and add the end to the index."""
        if not self._ttl_ms:
            return value
        state = self._state
        end = state.timestamp_ms + self._ttl_ms
        slot = -(-end // self._slot_ms) * self._slot_ms
        index = entry[:2] + _INDEX + _MOMENT.pack(slot) + entry[2:]
        state.changes[index] = b""
        state.changed_bytes += len(index)
        state.ends_written += 1
        return _MARK + _MOMENT.pack(end) + value

    def alive(self, data: bytes) -> bytes | None:
        """Return the value of a stored entry, or None if it has expired."""
        end = _end(data)
        if end is None:
            return data
        return None if end <= self._state.timestamp_ms else data[_VALUE_BEGIN:]


class ExpiringValue(ValueVariable):
    """A value state with a TTL."""

    __slots__ = ("_expiry",)

    def __init__(self, state: KeyedState, state_id: int, codec: ValueCodec, expiry: Expiry) -> None:
        super().__init__(state, state_id, codec)
        self._expiry = expiry

    def update(self, newValue: tuple[object, ...]) -> None:
        """Set the current key's value with a new TTL. Raises as `ValueVariable.update` does."""
        state = self._state
        key = self._heads[state.key_group] + state.key
        data = state.changes[key] = self._expiry.put(key, self._codec.encode(newValue))
        state.changed_bytes += len(data) + len(key)

    def _read(self) -> bytes | None:
        data = super()._read()
        return None if data is None else self._expiry.alive(data)


def remove_expired(state: KeyedState, key_group: int, limit: int) -> int:
    """
    Remove expired entries of a key group before any of its keys is visited.

    The oldest come first. Reads at most `limit` index entries, and returns how many it read.
    """
    seen = 0
    head = table_key(key_group, EXPIRY, b"")
    now = _MOMENT.pack(state.timestamp_ms)
    for index, _ in state.scan(head):
        if seen == limit or index[len(head) : _INDEX_BEGIN] > now:
            break
        seen += 1
        entry = head[:2] + index[_INDEX_BEGIN:]
        data = state.read(entry)
        end = None if data is None else _end(data)
        # An entry that was written again has a later end, with its own index entry.
        if end is not None and end <= state.timestamp_ms:
            state.changes[entry] = None
            state.changed_bytes += len(entry)
        state.changes[index] = None
        state.changed_bytes += len(index)
    return seen


def _end(data: bytes) -> int | None:
    """Return the moment at which a stored entry ends, or None if it has no end."""
    if data[:1] != _MARK:
        return None
    end: int = _MOMENT.unpack_from(data, 1)[0]
    return end
