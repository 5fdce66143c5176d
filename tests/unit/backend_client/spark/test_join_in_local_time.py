"""Timestamps of joined rows that waited in the state, in workers whose local time is not UTC."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import ArrayType, LongType, MapType, StructType, TimestampNTZType, TimestampType

from backend_client.batch_time import BatchTime, TimeMode
from backend_client.spark.api.stream_join import JoinInput, StreamJoin
from backend_client.spark.private.frames import arrow_schema
from backend_client.spark.task.row_calls import RowCalls, Timing
from backend_client.spark.task.rows import KeyRows, RowsToArrow, row_factory, to_python
from backend_client.spark.task.state_handle import declare_states
from backend_client.state.declared_states import merge_states
from backend_client.state.keyed_state import KeyedState
from backend_client.table.state_table import StateTable
from storage.key_groups import KeyGroupRange

WAIT = timedelta(minutes=10)
INSIDE = StructType().add("at", TimestampType()).add("wall", TimestampNTZType())
PART = (
    StructType()
    .add("t", TimestampType())
    .add("wall", TimestampNTZType())
    .add("inside", INSIDE)
    .add("list", ArrayType(TimestampType()))
    .add("map", MapType(TimestampType(), INSIDE))
    .add("id", LongType())
)
KEY = StructType().add("k", TimestampType()).add("s", StructType().add("at", TimestampType()))
OUTPUT = StructType([*KEY.fields]).add("time", TimestampType()).add("l", PART).add("r", PART)
GROUPS = KeyGroupRange(0, 0)

# The last two are the same local time, at the end of summer time.
MOMENTS = [
    datetime(2024, 7, 1, 12, tzinfo=UTC),
    datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    datetime(2024, 11, 3, 5, 30, tzinfo=UTC),
    datetime(2024, 11, 3, 6, 30, tzinfo=UTC),
]


@pytest.fixture(params=["America/New_York", "Asia/Kolkata", "UTC"])
def local_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run a test in another time zone."""
    with monkeypatch.context() as patched:
        patched.setenv("TZ", request.param)
        time.tzset()
        yield
    time.tzset()


@pytest.fixture
def table(tmp_path: Path) -> Iterator[StateTable]:
    table = StateTable.open(tmp_path / "table")
    yield table
    table.close()


def given(kind: StructType, values: dict[str, Any]) -> Any:
    """Return a row as tasks give it to processors: decoded from Arrow."""
    schema = arrow_schema(kind)
    columns = [to_python(pa.array([values[field.name]], field.type)) for field in schema]
    return row_factory(kind.names)([column[0] for column in columns])


def part(moment: datetime, number: int) -> dict[str, Any]:
    wall = moment.replace(tzinfo=None)
    inside = {"at": moment, "wall": wall}
    return {
        "t": moment,
        "wall": wall,
        "inside": inside,
        "list": [moment, None],
        "map": [(moment, inside)],
        "id": number,
    }


def no_text(text: str) -> StructType:
    """Refuse a schema as text; the join has none."""
    raise AssertionError(text)


class Join:
    """A join of two streams on the real table, one call per batch."""

    def __init__(self, table: StateTable, how: str) -> None:
        self._table, self._how, self._batch = table, how, 0

    def run(self, key: dict[str, Any], left: Any, right: Any, watermark: datetime | None = None) -> list[Any]:
        """Return the output as Spark gets it."""
        inputs = [JoinInput(name, PART, WAIT // timedelta(microseconds=1)) for name in "lr"]
        processor = StreamJoin(inputs, self._how, KEY, OUTPUT.names)
        states = merge_states("join", {}, declare_states("join", processor, no_text, TimeMode.EVENT)[0])
        watermark_ms = int(watermark.timestamp() * 1000) if watermark else -(10**12)
        to_arrow = RowsToArrow(OUTPUT)
        timing = Timing(TimeMode.EVENT, BatchTime(1, watermark_ms, watermark_ms))
        calls = RowCalls("join", processor, states, KEY.json(), 1 << 20, timing, take=to_arrow.taken)
        state = KeyedState(self._table.get, GROUPS, self._table.scan, self._batch)
        rows = []
        if left or right:
            given_key = given(KEY, key)
            given_parts = [given(PART, values) if values else None for values in (left, right)]
            moment = (left or right)["t"]
            micros = (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
            rows = [KeyRows(0, tuple(given_key), iter([(*given_key, moment, micros, *given_parts)]))]
        names = to_arrow.names
        outputs = list(map(to_arrow.columns, calls.run(rows, state, None)))  # type: ignore[arg-type]  # sends nothing
        self._table.advance(sorted(state.take_changes().items()), f"{self._batch}")
        self._batch += 1
        return [row for columns in outputs for row in pa.RecordBatch.from_arrays(columns, names).to_pylist()]


@pytest.mark.usefixtures("local_time")
@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_row_that_waited_keeps_its_times(table: StateTable, moment: datetime) -> None:
    """I14: timestamps of a row that waited for its partner are those of the input, at any depth."""
    join, key = Join(table, "inner"), {"k": moment, "s": {"at": moment}}

    assert join.run(key, part(moment, 1), None) == []
    assert join.run(key, None, part(moment, 2)) == [{**key, "time": moment, "l": part(moment, 1), "r": part(moment, 2)}]


@pytest.mark.usefixtures("local_time")
@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_row_without_partner_keeps_its_times(table: StateTable, moment: datetime) -> None:
    """I14: so are those of a row, and of its key, that are emitted when the wait is over."""
    join, key = Join(table, "left"), {"k": moment, "s": {"at": moment}}

    assert join.run(key, part(moment, 1), None) == []
    assert join.run(key, None, None, watermark=moment + WAIT + timedelta(seconds=1)) == [
        {**key, "time": moment + WAIT, "l": part(moment, 1), "r": None}
    ]


@pytest.mark.usefixtures("local_time")
def test_nulls_stay(table: StateTable) -> None:
    """Nulls at any depth, and in a part of a key, stay nulls."""
    moment = MOMENTS[0]
    join, key = Join(table, "left"), {"k": moment, "s": {"at": None}}
    empty = {**dict.fromkeys(PART.names), "t": moment, "map": [(moment, None)]}

    assert join.run(key, empty, None) == []
    assert join.run(key, None, None, watermark=moment + WAIT + timedelta(seconds=1)) == [
        {**key, "time": moment + WAIT, "l": empty, "r": None}
    ]
