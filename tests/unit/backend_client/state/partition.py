"""One partition over batches, as the tests of states and timers drive it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from backend_client.state.keyed_state import KeyedState
from backend_client.table.state_table import StateTable
from storage.key_groups import KeyGroupRange

ANN, BOB = b"\x91\xa3ann", b"\x91\xa3bob"


class Partition:
    """The tasks of consecutive batches of a partition; its table is brought to the base before each."""

    def __init__(self, table: StateTable) -> None:
        self.table = table
        self.state: KeyedState
        self.batch = -1

    def next_state(self, timestamp_ms: int = 0) -> KeyedState:
        """Commit the batch's changes and return the state of the next batch, with a key selected."""
        if self.batch >= 0:
            self.table.advance(self.state.take_changes().items(), f"{self.batch}.0.u")
        self.batch += 1
        self.state = KeyedState(self.table.get, KeyGroupRange(0, 9), self.table.scan, self.batch, timestamp_ms)
        self.at(ANN)
        return self.state

    def at(self, key: bytes, key_group: int = 3) -> None:
        """Select a key."""
        self.state.key_group, self.state.key = key_group, bytes(bytearray(key))


_P = TypeVar("_P", bound=Partition)


@contextmanager
def empty_partition(kind: type[_P], folder: Path) -> Iterator[_P]:
    """Yield a partition with an empty table."""
    table = StateTable.open(folder)
    yield kind(table)
    table.close()
