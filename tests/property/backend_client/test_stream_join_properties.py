"""
The join of three streams on the real table with the real calls, compared with the definition of its result.

The model takes all combinations of rows and keeps those that the definition names; it knows nothing of batches, of the
order of rows or of state. Rows, batches, watermarks and the boundaries of change sets are generated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyspark.sql.types import LongType, StringType, StructType

from backend_client.batch_time import BatchTime, TimeMode
from backend_client.spark.api.stream_join import HOW, JoinInput, StreamJoin
from backend_client.spark.task.row_calls import RowCalls, Timing
from backend_client.spark.task.rows import KeyRows
from backend_client.spark.task.state_handle import declare_states
from backend_client.state.declared_states import merge_states
from backend_client.state.keyed_state import KeyedState
from backend_client.table.state_table import StateTable
from storage.key_groups import KeyGroupRange

GROUPS = KeyGroupRange(2, 5)
KEYS = StructType().add("k", StringType()).add("l", LongType())
KEY_SCHEMA = KEYS.json()
PART = StructType().add("id", LongType())
HALF_MS = 500
END_MS = 1000

Known = tuple[int, int | None, int]
"""A row in the model: input, time in microseconds, id."""

rows = st.tuples(
    st.sampled_from([("a", 1), ("a", 2), ("b", 1), (None, 1)]), st.integers(0, 2), st.none() | st.integers(0, 24)
)
batches = st.lists(st.tuples(st.integers(0, 4), st.lists(rows, max_size=7)), min_size=1, max_size=8)


def joined(how: str, known: Sequence[Known], waits: Sequence[int]) -> Iterator[tuple[int | None, ...]]:
    """Yield the ids of each combination that the definition names, of the rows of one key."""

    def meet(combination: Sequence[Known]) -> bool:
        if any(time is None for _, time, _ in combination):
            return len(combination) == 1
        ends = [time + waits[part] for part, time, _ in combination if time is not None]
        return max(time for _, time, _ in combination if time is not None) <= min(ends)

    choices = [[None, *(row for row in known if row[0] == part)] for part in range(len(waits))]
    for choice in product(*choices):
        taken = [row for row in choice if row is not None]
        if not taken or not meet(taken):
            continue
        left_out = {part for part, row in enumerate(choice) if row is None}
        maximal = not any(meet([*taken, row]) for row in known if row[0] in left_out)
        if {"inner": not left_out, "left": maximal and 0 not in left_out, "full": maximal}[how]:
            yield tuple(None if row is None else row[2] for row in choice)


def no_text(text: str) -> StructType:
    """Refuse a schema as text, which only Spark can parse."""
    raise AssertionError(text)


class Sets:
    """Receives the change sets of a batch, like the log."""

    def __init__(self) -> None:
        self.changes: list[tuple[bytes, bytes | None]] = []

    def append(self, changes: dict[bytes, bytes | None], *, preemptive: bool) -> None:
        self.changes += sorted(changes.items())


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StateTable]:
    """Return a table that is empty after each example."""
    table = StateTable.open(tmp_path_factory.mktemp("table"))
    yield table
    table.close()


@pytest.mark.parametrize("how", HOW)
@given(
    script=batches,
    waits=st.tuples(*[st.integers(0, 9)] * 3),
    preemptive_bytes=st.sampled_from([1, 300, 1 << 20]),
)
@example(  # b overlaps with a and c, which do not overlap: two maximal combinations
    script=[(0, [(("a", 1), 0, 10), (("a", 1), 1, 20), (("a", 1), 2, 30)])], waits=(10, 10, 10), preemptive_bytes=1
)
@settings(deadline=None, max_examples=80)
def test_join_follows_its_definition(
    table: StateTable, how: str, script: list[Any], waits: tuple[int, ...], preemptive_bytes: int
) -> None:
    """In any batches, each combination is emitted once, with its time; after the last wait no state is left."""
    table.advance([(key, None) for key, _ in list(table.items())], "empty")
    inputs = [JoinInput(f"i{part}", PART, wait * HALF_MS) for part, wait in enumerate(waits)]
    known: dict[Any, list[Known]] = {}
    seen: list[Any] = []
    watermark_ms = 0
    for number, (moved, arrived) in enumerate([*script, (END_MS, [])]):
        previous_ms, watermark_ms = watermark_ms, watermark_ms + moved
        by_key: dict[Any, list[Any]] = {}
        for position, (key, part, time) in enumerate(arrived):
            micros = None if time is None else time * HALF_MS
            if micros is None or micros > watermark_ms * 1000:  # a late row reaches no processor
                row_id = 100 * number + position
                known.setdefault(key, []).append((part, micros, row_id))
                parts = [{"id": row_id} if part == at else None for at in range(3)]
                by_key.setdefault(key, []).append((*key, None, micros, *parts))
        processor = StreamJoin(inputs, how, KEYS, ["k", "l", "time", "i0", "i1", "i2"])
        declared, _ = declare_states("join", processor, no_text, TimeMode.EVENT)
        states = merge_states("join", {}, declared)
        timing = Timing(TimeMode.EVENT, BatchTime(1, watermark_ms, previous_ms))
        calls = RowCalls("join", processor, states, KEY_SCHEMA, preemptive_bytes, timing=timing)
        state, sets = KeyedState(table.get, GROUPS, table.scan, number), Sets()
        grouped = [KeyRows(2 + (key[1] % 4), key, iter(by_key[key])) for key in by_key]
        grouped.sort(key=lambda item: item.key_group)
        for part_of_output in calls.run(grouped, state, sets):  # type: ignore[arg-type]  # replaces a log writer
            for *key_parts, moment, first, second, third in part_of_output:
                ids = tuple(None if item is None else item.id for item in (first, second, third))
                assert moment is None or None in key_parts or moment.timestamp() * 1000 > previous_ms
                seen.append((tuple(key_parts), ids))
        sets.append(state.take_changes(), preemptive=False)
        table.advance(sets.changes, f"{number}.0.u")

    expected = []
    for key, rows_of_key in known.items():
        # With a null in its key, a row has no partners.
        groups = [[row] for row in rows_of_key] if None in key else [rows_of_key]
        expected += [
            (key, ids) for group in groups for ids in joined(how, group, [wait.wait_micros for wait in inputs])
        ]
    assert sorted(seen, key=repr) == sorted(expected, key=repr)
    assert not list(table.items())
