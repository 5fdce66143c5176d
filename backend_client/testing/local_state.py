"""
State in one process, without Spark or a service: real tables, real change sets, the log in memory.

A batch's changes are encoded as in the log and applied to their partition's table at once. A restore drops everything
since the last checkpoint and rebuilds all tables from the log. Serves `StateTester`.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

from backend_client.state.keyed_state import KeyedState
from backend_client.state.state_deletion import deletions
from backend_client.table.state_table import StateTable
from storage.change_set import decode_change_set, encode_change_set
from storage.checksum import checksum64
from storage.errors import InvalidInputError
from storage.key_groups import KeyGroupRange, check_parallelism, key_group_range
from storage.validation import KEY_GROUP_MAX

_BLOCK_CACHE_BYTES = 1 << 20
_CHANGE_SET_BYTES = 5 << 20


class LocalState:
    """
    The tables and the log of one operator. Not thread-safe; close it, or it closes with the object.

    Args:
        parallelism: Number of partitions, each with a table.
        max_parallelism: Number of key groups.

    Raises:
        InvalidInputError: A partition would have no key groups.
    """

    def __init__(self, parallelism: int, max_parallelism: int) -> None:
        if type(max_parallelism) is not int or not 1 <= max_parallelism <= KEY_GROUP_MAX + 1:
            raise InvalidInputError(
                f"maxParallelism must be a whole number, 1 to {KEY_GROUP_MAX + 1}, not {max_parallelism!r}"
            )
        self._max_parallelism = max_parallelism
        self._ranges = _ranges(parallelism, max_parallelism)
        self.timestamp_ms = 0
        """Processing time of later batches in ms; TTLs use it."""
        self._log: list[bytes] = []
        self._checkpointed = 0
        self._tables: list[StateTable] = []
        self._folder = Path(tempfile.mkdtemp(prefix="dstl-state-tester-"))
        self.close = weakref.finalize(self, _close, self._tables, self._folder)
        self._open()

    def at(self, key: bytes) -> KeyedState:
        """Return the state of the partition that owns a key, at that key."""
        key_group = checksum64(key) % self._max_parallelism
        state = self._state(key_group * len(self._ranges) // self._max_parallelism)
        state.key_group, state.key = key_group, key
        return state

    def partitions(self) -> Iterator[KeyedState]:
        """Yield the state of each partition."""
        return map(self._state, range(len(self._ranges)))

    def commit(self, state: KeyedState) -> None:
        """End a batch: write its changes to the log and the table."""
        changes = state.take_changes()
        if changes:
            self._log.append(encode_change_set(changes))
            self._advance(len(self._log) - 1)

    def delete(self, state_ids: Iterable[int]) -> None:
        """Delete all entries of these variables."""
        for state in self.partitions():
            for changes in deletions(state.scan, state.key_groups, state_ids, _CHANGE_SET_BYTES):
                state.changes = changes
                self.commit(state)

    def checkpoint(self) -> None:
        """Make everything so far survive a restore."""
        self._checkpointed = len(self._log)

    def restore(self, parallelism: int | None = None) -> None:
        """
        Return to the last checkpoint, with tables rebuilt from the log.

        Raises:
            InvalidInputError: A partition would have no key groups.
        """
        self._ranges = _ranges(len(self._ranges) if parallelism is None else parallelism, self._max_parallelism)
        del self._log[self._checkpointed :]
        _close(self._tables, self._folder)
        self._open()

    def _open(self) -> None:
        for key_groups in self._ranges:
            self._tables.append(StateTable.open(self._folder / key_groups.to_text(), _BLOCK_CACHE_BYTES))
        for number in range(len(self._log)):
            self._advance(number)

    def _state(self, partition: int) -> KeyedState:
        table = self._tables[partition]
        return KeyedState(table.get, self._ranges[partition], table.scan, len(self._log), self.timestamp_ms)

    def _advance(self, number: int) -> None:
        changes = list(decode_change_set(self._log[number], f"change set {number}"))
        for table, key_groups in zip(self._tables, self._ranges, strict=True):
            owned = [change for change in changes if key_groups.contains(int.from_bytes(change[0][:2], "big"))]
            if owned:
                table.advance(owned, str(number))


def _close(tables: list[StateTable], folder: Path) -> None:
    while tables:
        tables.pop().close()
    shutil.rmtree(folder, ignore_errors=True)


def _ranges(parallelism: int, max_parallelism: int) -> list[KeyGroupRange]:
    check_parallelism(parallelism, max_parallelism)
    return [key_group_range(at, parallelism, max_parallelism) for at in range(parallelism)]
