"""
List and map state: several table entries per key, under one prefix.

A map's entry is one table entry. Appends of a batch to a list that it does not read make one entry per `PART_BYTES`.
Neither is ever read and rewritten as a whole. Reading all of them is one scan of the table, overlaid with this batch's
writes. As for values, the table itself is not changed (I1). One task, one thread.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgpack

from backend_client.state.codec import ValueCodec
from backend_client.state.expiry import Expiry
from backend_client.state.keyed_state import Heads, KeyedState
from storage.errors import CorruptDataError, InvalidInputError

PART_BYTES = 1 << 16
"""A part of a list is written once its elements reach this size, which bounds the memory of a read."""

_POSITION = struct.Struct(">QI")


class Entries:
    """The entries of one variable under the current key."""

    __slots__ = ("_expiry", "_heads", "_key", "_prefix", "_state", "_written")

    def __init__(self, state: KeyedState, state_id: int, expiry: Expiry | None = None) -> None:
        self._state = state
        self._expiry = expiry
        self._heads = Heads(state.key_groups, state_id)
        self._key: bytes | None = None
        self._prefix = b""
        self._written: dict[bytes, bytes | None] = {}

    def _enter(self) -> bytes:
        """Return the current key's prefix; at a new key, forget the writes of the last one."""
        state = self._state
        if state.key is not self._key:
            self._prefix = self._heads[state.key_group] + state.key
            self._key = state.key
            self._written = {}
        return self._prefix

    def _write(self, entry: bytes, value: bytes | None) -> None:
        state = self._state
        if self._expiry is not None and value is not None:
            value = self._expiry.put(entry, value)
        state.changes[entry] = self._written[entry] = value
        state.changed_bytes += len(entry) + (0 if value is None else len(value))

    def _items(self) -> Iterator[tuple[bytes, bytes]]:
        """
        Yield all entries: those of the table that this batch has not written, then those that it has.

        They are a snapshot taken at the first read, as in Spark: a function may change the state while it iterates.
        """
        prefix = self._enter()
        written = dict(self._written)
        yield from self._stored(prefix, written)
        yield from self._alive(written.items())

    def _stored(self, prefix: bytes, written: dict[bytes, bytes | None]) -> Iterator[tuple[bytes, bytes]]:
        return self._alive((entry, data) for entry, data in self._state.scan(prefix) if entry not in written)

    def _alive(self, entries: Iterable[tuple[bytes, bytes | None]]) -> Iterator[tuple[bytes, bytes]]:
        alive = self._expiry.alive if self._expiry is not None else _as_it_is
        return ((entry, value) for entry, data in entries if data is not None and (value := alive(data)) is not None)

    def exists(self) -> bool:
        """Return whether the current key has any entry."""
        prefix = self._enter()
        if next(self._alive(self._written.items()), None) is not None:
            return True
        return next(self._stored(prefix, self._written), None) is not None

    def clear(self) -> None:
        """Remove all entries of the current key, expired ones too: a clock that is set back would show them again."""
        prefix = self._enter()
        stored = [entry for entry, _ in self._state.scan(prefix) if entry not in self._written]
        for entry in [*stored, *(entry for entry, data in self._written.items() if data is not None)]:
            self._write(entry, None)


class ListVariable(Entries):
    """A list per key: the methods of PySpark's ``ListState``."""

    __slots__ = ("_appended", "_codec", "_elements", "_pack", "_parts")

    def __init__(self, state: KeyedState, state_id: int, codec: ValueCodec, expiry: Expiry | None = None) -> None:
        super().__init__(state, state_id, expiry)
        self._codec = codec
        self._pack = msgpack.Packer(use_bin_type=True).pack
        self._parts = state.parts_from
        self._elements: list[bytes] = []
        self._appended = 0
        state.before_taking.append(self._write_part)

    def exists(self) -> bool:
        """Return whether the current key has a list."""
        self._enter()
        return bool(self._elements) or super().exists()

    def get(self) -> Iterator[tuple[Any, ...]]:
        """Yield the current key's elements, in the order in which they were appended."""
        for _, data in self._items():
            yield from map(self._codec.decode, _unpack(data))

    def put(self, newState: Iterable[tuple[Any, ...]]) -> None:
        """
        Set the current key's elements; without elements the key has no list.

        Raises:
            InvalidInputError: An element does not fit the schema; names the field. The state is as before.
        """
        elements = self._encoded(newState)
        self.clear()
        self._append(elements)

    def appendValue(self, newState: tuple[Any, ...]) -> None:
        """Append an element. Raises as `put` does."""
        self._append((self._codec.encode(newState),))

    def appendList(self, newState: Iterable[tuple[Any, ...]]) -> None:
        """Append elements. Raises as `put` does."""
        self._append(self._encoded(newState))

    def clear(self) -> None:
        """Remove all elements of the current key."""
        self._enter()
        self._elements, self._appended = [], 0
        super().clear()

    def _append(self, elements: Sequence[bytes]) -> None:
        self._enter()
        for element in elements:
            self._elements.append(element)
            self._appended += len(element)
            if self._appended >= PART_BYTES:
                self._write_part()

    def _write_part(self) -> None:
        """Write the appended elements under the key to which they belong."""
        if not self._elements:
            return
        # Batch and number sort after all stored parts, so none has to be read.
        position = _POSITION.pack(self._state.checkpoint_id, self._parts)
        self._parts += 1
        elements, self._elements, self._appended = self._elements, [], 0
        self._write(self._prefix + position, self._pack(elements))

    def _enter(self) -> bytes:
        if self._state.key is not self._key:
            self._write_part()
        return super()._enter()

    def _items(self) -> Iterator[tuple[bytes, bytes]]:
        self._enter()
        self._write_part()
        yield from super()._items()

    def _encoded(self, elements: Iterable[tuple[Any, ...]]) -> list[bytes]:
        if elements is None:
            raise InvalidInputError("a list state takes a list of tuples, not None")
        return [self._codec.encode(element) for element in elements]


class MapVariable(Entries):
    """
    A map per key: the methods of PySpark's ``MapState``.

    Args:
        state: The current key.
        state_id: Number of the variable.
        key_codec: Codec of the map's keys.
        value_codec: Codec of its values.
        make_row: Builds the result of `getValue`: in Spark a row, while iterators yield plain tuples.
        expiry: Set for a variable with a TTL.
    """

    __slots__ = ("_key_codec", "_make_row", "_value_codec")

    def __init__(
        self,
        state: KeyedState,
        state_id: int,
        key_codec: ValueCodec,
        value_codec: ValueCodec,
        make_row: Callable[[tuple[Any, ...]], tuple[Any, ...]] = tuple,
        expiry: Expiry | None = None,
    ) -> None:
        super().__init__(state, state_id, expiry)
        self._make_row = make_row
        self._key_codec = key_codec
        self._value_codec = value_codec

    def getValue(self, key: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the value of a map key, or None."""
        data = self._read(key)
        return None if data is None else self._make_row(self._value_codec.decode(data))

    def containsKey(self, key: tuple[Any, ...]) -> bool:
        """Return whether the map has a key."""
        return self._read(key) is not None

    def updateValue(self, key: tuple[Any, ...], value: tuple[Any, ...]) -> None:
        """
        Set the value of a map key.

        Raises:
            InvalidInputError: Key or value does not fit its schema; names the field. The state is as before.
        """
        data = self._value_codec.encode(value)
        self._write(self._enter() + self._key_codec.encode(key), data)

    def removeKey(self, key: tuple[Any, ...]) -> None:
        """Remove a map key; no error if it does not exist."""
        self._write(self._enter() + self._key_codec.encode(key), None)

    def iterator(self) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """Yield keys and values, in no particular order."""
        prefix_bytes = len(self._enter())
        for entry, data in self._items():
            yield self._key_codec.decode(entry[prefix_bytes:]), self._value_codec.decode(data)

    def keys(self) -> Iterator[tuple[Any, ...]]:
        """Yield the keys of the map, in no particular order."""
        return (key for key, _ in self.iterator())

    def values(self) -> Iterator[tuple[Any, ...]]:
        """Yield the values of the map, in no particular order."""
        return (value for _, value in self.iterator())

    def _read(self, key: tuple[Any, ...]) -> bytes | None:
        entry = self._enter() + self._key_codec.encode(key)
        data = self._written[entry] if entry in self._written else self._state.read(entry)
        return data if data is None or self._expiry is None else self._expiry.alive(data)


def _as_it_is(data: bytes) -> bytes | None:
    return data


def _unpack(data: bytes) -> list[bytes]:
    try:
        elements: list[bytes] = msgpack.unpackb(data)
        if not isinstance(elements, list):
            raise ValueError("it is not a list")  # noqa: TRY004 - damaged data, not a wrong argument
    except (ValueError, msgpack.UnpackException) as error:
        raise CorruptDataError(f"a stored part of a list cannot be read: {error}") from error
    return elements
