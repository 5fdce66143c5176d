"""Which keys a partition visits in a batch."""

from __future__ import annotations

from collections.abc import Iterator

from backend_client.spark.task.key_visits import key_visits
from backend_client.spark.task.rows import KeyRows
from backend_client.state.keyed_state import KeyedState
from backend_client.state.timers import Timers
from storage.key_groups import KeyGroupRange

GROUPS = KeyGroupRange(0, 7)


def visits(stored: dict[bytes, bytes], rows: list[KeyRows]) -> Iterator[tuple[bytes, tuple[int, ...], list[int]]]:
    """Yield each visited key, its due timers and its rows."""

    def scan(prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        return iter(sorted(item for item in stored.items() if item[0].startswith(prefix)))

    state = KeyedState(stored.get, GROUPS, scan, checkpoint_id=1)
    for visit in key_visits(iter(rows), state, lambda key: key[0].encode(), due_until_ms=100, expiring=False):
        yield visit.encoded, tuple(visit.due), [*(visit.rows or ())]


def test_timers_after_the_last_rows_are_visited() -> None:
    """Keys with due timers and no rows are visited, also after the last key with rows."""
    writing = KeyedState(dict[bytes, bytes]().get, GROUPS, lambda _: iter(()), checkpoint_id=0)
    timers = Timers(writing, 0)
    writing.key_group, writing.key = 5, b"b"
    timers.register(50)
    stored = {key: value for key, value in writing.changes.items() if value is not None}
    rows = [KeyRows(2, ("a",), iter([1, 2]))]

    assert [*visits(stored, rows)] == [(b"a", (), [1, 2]), (b"b", (50,), [])]
