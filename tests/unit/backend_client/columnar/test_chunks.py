"""Chunks of a partition that hold only whole keys, and user-defined processors."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import from_arrow_schema

from backend_client.columnar import (
    Aggregate,
    Aggregation,
    ColumnarProcessor,
    Count,
    KeyBatch,
    KeyResults,
    Max,
    Min,
    Sum,
    TopK,
    Windows,
    chunks,
    sliding,
    tumbling,
)
from backend_client.columnar.keys import KeyColumns
from backend_client.key_runs import key_changes
from backend_client.spark.task.columnar_calls import with_types
from dstl_service.wire import StateInfo
from storage.errors import InvalidInputError
from tests.unit.backend_client.columnar.columnar_task import Task

ROWS = pa.schema([("k", pa.int32()), ("v", pa.int64())])


@given(st.lists(st.none() | st.integers(0, 9), max_size=60), st.integers(1, 7), st.integers(1, 12))
def test_keys_are_whole(keys: list[int | None], batch_rows: int, chunk_rows: int) -> None:
    """However rows are cut into batches and chunks, each key is processed once, with all its rows."""
    task = Task(Aggregate(Count(), Sum("v")), ROWS)
    task.preemptive_bytes = 50
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "ROWS", chunk_rows)
        for times in (1, 2):
            got = task.run([{"k": key, "v": at} for at, key in enumerate(keys)], batch_rows=batch_rows)
            sums: Counter[int | None] = Counter()
            for at, key in enumerate(keys):
                sums[key] += at
            counts = Counter(keys)
            assert sorted(got, key=repr) == sorted(
                ({"k": key, "count(1)": n * times, "sum(v)": sums[key] * times} for key, n in counts.items()), key=repr
            )


def test_keys_have_no_minus_zero_inside() -> None:
    """I14: a key's numbers look as in Spark's own groupBy, whichever of its rows comes first."""
    kind = pa.struct([("x", pa.list_(pa.float64())), ("s", pa.string())])
    found = pa.array([{"x": [-0.0, None], "s": "a"}, {"x": [0.0, None], "s": "a"}, None], kind)
    fields = pa.schema([("k", kind)])
    keys = KeyColumns(from_arrow_schema(fields).json(), fields)
    batch = pa.record_batch([pa.array([1, 1, 2], pa.int32()), found, found], ["group", "k", "k"])

    (chunk,) = chunks.KeyChunks([batch], keys, fields)

    assert repr(chunk.keys[0].to_pylist()) == "[{'x': [0.0, None], 's': 'a'}, None]"
    assert repr(chunk.rows.column(0).to_pylist()[0]) == "{'x': [-0.0, None], 's': 'a'}"


def test_rows_of_a_large_key_are_joined_twice_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many batches one key spans, each row is copied and each key compared only a few times."""
    joined: Counter[str] = Counter()
    join, find = chunks._joined, key_changes

    def counted_join(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
        result = join(batches)
        joined["cells"] += result.num_rows * result.num_columns if len(batches) > 1 else 0
        return result

    def counted_find(columns: list[pa.Array]) -> Any:
        joined["looked at"] += len(columns[0])
        return find(columns)

    monkeypatch.setattr(chunks, "_joined", counted_join)
    monkeypatch.setattr(chunks, "key_changes", counted_find)
    monkeypatch.setattr(chunks, "ROWS", 100)
    fields = pa.schema([("k", pa.int32())])
    values = [*range(95), *[1000] * 3000, *range(2000, 2150)]
    columns = [pa.array(column, pa.int32()) for column in ([0] * len(values), values, values)]
    whole = pa.RecordBatch.from_arrays(columns, ["g", "k0", "k"])
    batches = [whole.slice(at, 10) for at in range(0, len(values), 10)]
    parts = list(chunks.KeyChunks(batches, KeyColumns(from_arrow_schema(fields).json(), fields), fields))

    assert [value for part in parts for value in part.rows.column(0).to_pylist()] == values
    assert [key for part in parts for key in part.keys[0].to_pylist()] == [*range(95), 1000, *range(2000, 2150)]
    assert max(part.rows.num_rows for part in parts) < 3020
    assert joined["cells"] <= 3 * whole.num_columns * len(values)
    assert joined["looked at"] <= 3 * len(values)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1.5, 1.5, float("nan"), float("nan"), None, None], pa.float64()),
        (["a", "a", "b", "b", None, None], pa.string()),
        ([{"x": [1]}, {"x": [1]}, {"x": [2]}, {"x": [2]}, None, None], pa.struct([("x", pa.list_(pa.int64()))])),
        ([None] * 6, pa.null()),
    ],
)
def test_equal_keys_are_one(values: list[Any], kind: pa.DataType) -> None:
    """Keys of every type are distinguished as in Spark: nulls are one key, and so are all NaNs."""
    fields = pa.schema([("k", kind)])
    column = pa.array(values, kind)
    batch = pa.RecordBatch.from_arrays([pa.array([0] * 6, pa.int32()), column, column], ["g", "k0", "k"])
    keys = KeyColumns(from_arrow_schema(fields).json(), fields)
    [chunk] = chunks.KeyChunks([batch], keys, fields)
    assert chunk.starts.tolist() == ([0] if kind == pa.null() else [0, 2, 4])
    assert len(chunk.encoded) == len(set(chunk.encoded.to_pylist())) == len(chunk.starts)


class Longest(ColumnarProcessor):
    """A user's processor: keeps the greatest value, and removes a key on a negative one."""

    def state_schema(self, rows: pa.Schema) -> pa.Schema:
        return pa.schema([("most", pa.int64())])

    def process(self, batch: KeyBatch) -> KeyResults:
        values = batch.rows.column("v").to_numpy()
        new = np.maximum.reduceat(values, batch.starts)
        old = batch.state.column(0).fill_null(-1).to_numpy()
        forget = np.minimum.reduceat(values, batch.starts) < 0
        assert len(batch.key_of_row) == batch.rows.num_rows
        most = pa.array(np.maximum(new, old))
        output = pa.RecordBatch.from_arrays([batch.keys.column(0), most], ["k", "most"])
        return KeyResults(pa.RecordBatch.from_arrays([most], ["most"]), output, keep=~forget)


def test_state_can_be_removed() -> None:
    """A processor keeps state of the keys it names; others are removed, and a change without effect is not logged."""
    task = Task(Longest(), ROWS)
    task.run([{"k": 1, "v": 5}, {"k": 2, "v": -1}])
    assert len(task.table.entries) == 1
    assert task.run([{"k": 1, "v": 3}, {"k": 1, "v": -1}]) == [{"k": 1, "most": 5}]
    assert task.table.entries == {}


class Returned(ColumnarProcessor):
    """A user's processor that returns the given results for any batch."""

    def __init__(self, results: KeyResults, *, expires: bool) -> None:
        self.expires = expires
        self._results = results

    def state_schema(self, rows: pa.Schema) -> pa.Schema:
        return pa.schema([("n", pa.int64())])

    def process(self, batch: KeyBatch) -> KeyResults:
        return self._results


STATE = pa.RecordBatch.from_pydict({"n": [1, 2]})
TWO: list[dict[str, Any]] = [{"k": 1, "v": 1}, {"k": 2, "v": 1}]


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        (None, "no expires_ms; give KeyResults"),
        (np.array([5], np.int64), r"shape \(1,\)"),
        (np.array([[5, 6]], np.int64), r"shape \(1, 2\)"),
        (np.array([5, 6], np.int32), "type int32"),
        (np.array([5, 6], np.float64), "type float64"),
        (np.array([5, 6], "M8[ms]"), "type datetime64"),
        ([5, None], "type object"),
        (5, r"shape \(\)"),
    ],
)
def test_ends_are_checked(ends: Any, words: str) -> None:
    """State with an end needs one int64 end in ms per key; without the ends it could not be read again."""
    task = Task(Returned(KeyResults(STATE, expires_ms=ends), expires=True), ROWS)
    with pytest.raises(InvalidInputError, match=f"processor Returned .*{words}"):
        task.run(TWO)


@pytest.mark.parametrize("ends", [np.array([5, 6]), [5, 6], pa.array([5, 6])])
def test_ends_of_any_array_are_stored(ends: Any) -> None:
    """Anything that NumPy reads as int64 is accepted; state is readable until its end."""
    task = Task(Returned(KeyResults(STATE, expires_ms=ends), expires=True), ROWS)
    task.run(TWO)
    assert len(task.table.entries) == 4
    task.run([], watermark_ms=5)
    assert len(task.table.entries) == 2


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        (np.array([True]), r"shape \(1,\)"),
        (np.array([1, 0]), "type int64"),
        ([True, None], "type object"),
        (np.ones((2, 2), np.bool_), "shape"),
    ],
)
@pytest.mark.parametrize("expires", [True, False])
def test_kept_keys_are_checked(keep: Any, words: str, *, expires: bool) -> None:
    """One boolean per key says which keys keep their state."""
    results = KeyResults(STATE, keep=keep, expires_ms=np.array([5, 6], np.int64))
    with pytest.raises(InvalidInputError, match=f"processor Returned returned keep .*{words}"):
        Task(Returned(results, expires=expires), ROWS).run(TWO)


@pytest.mark.parametrize(("state", "words"), [(STATE.slice(1), "1 rows"), (pa.table(STATE.to_pydict()), "no Record")])
@pytest.mark.parametrize("expires", [True, False])
def test_state_has_a_row_per_key(state: Any, words: str, *, expires: bool) -> None:
    """State with fewer rows than keys is refused, and so is anything other than a record batch."""
    results = KeyResults(state, expires_ms=np.array([5, 6], np.int64))
    with pytest.raises(InvalidInputError, match=f"processor Returned returned {words}.* of 2 keys; give"):
        Task(Returned(results, expires=expires), ROWS).run(TWO)


def test_output_schema_is_required() -> None:
    """If a processor cannot derive its output schema, the user must give it."""
    with pytest.raises(InvalidInputError, match="outputStructType"):
        Task(Longest(), ROWS).plan.output_schema()


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (Aggregate(Count(name="n"), Sum("v", name="t")), r"s\.0 bigint \(sum\) where its processor has t\.0 bigint"),
        (Aggregate(Count(name="n")), "no such column"),
        (Aggregate(Sum("v", name="s"), Count(name="n")), r"n\.0"),
        (Aggregate(Count(name="n"), Sum("v", name="s"), windows=tumbling("at", timedelta(1))), "state that ends"),
    ],
)
def test_other_columns_than_stored_are_refused(processor: Aggregate, words: str) -> None:
    """I15: values are read only with the columns that they were written with; other columns are refused by name."""
    rows = pa.schema([*ROWS, ("at", pa.timestamp("us", "UTC"))])
    stored = Task(Aggregate(Count(name="n"), Sum("v", name="s")), rows).plan
    stored.check_stored("totals", stored.states())
    with pytest.raises(InvalidInputError, match=f"{words}.*another job name and checkpointLocation"):
        Task(processor, rows).plan.check_stored("totals", stored.states())


class Kept(ColumnarProcessor):
    """A user's processor whose state has one field."""

    def __init__(self, kind: pa.DataType, metadata: dict[str, str] | None = None) -> None:
        self._field = pa.field("t", kind, metadata=metadata)

    def state_schema(self, rows: pa.Schema) -> pa.Schema:
        return pa.schema([self._field])

    def process(self, batch: KeyBatch) -> KeyResults:
        return KeyResults(batch.state)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (pa.timestamp("ms"), pa.timestamp("us"), "t timestamp_ntz in ms where its processor has t timestamp_ntz in us"),
        (pa.timestamp("us", "UTC"), pa.timestamp("ns", "UTC"), "t timestamp in us where its processor has .* in ns"),
        (pa.duration("s"), pa.duration("us"), "t interval day to second in s where its processor has .* in us"),
        (pa.int64(), pa.duration("us"), "t bigint where its processor has t interval day to second in us"),
    ],
)
def test_other_unit_than_stored_is_refused(old: pa.DataType, new: pa.DataType, words: str) -> None:
    """I15: a stored time has no meaning without its unit, so the unit never changes."""
    stored = Task(Kept(old), ROWS).plan
    stored.check_stored("times", stored.states())
    with pytest.raises(InvalidInputError, match=words):
        Task(Kept(new), ROWS).plan.check_stored("times", stored.states())


def counted(size_s: float) -> Task:
    """Return counts per window of `size_s` seconds."""
    rows = pa.schema([*ROWS, ("at", pa.timestamp("us", "UTC"))])
    return Task(Aggregate(Count(name="n"), windows=tumbling("at", timedelta(seconds=size_s))), rows, "Append")


def test_other_size_of_windows_than_stored_is_refused() -> None:
    """I15: a stored window has only its start, so another size would give its rows to a window without them."""
    stored = counted(10).plan
    stored.check_stored("counts", stored.states())
    words = r"\(count\) per window of 10 s where its processor has n.0 bigint \(count\) per window of 2.5 s"
    with pytest.raises(InvalidInputError, match=words):
        counted(2.5).plan.check_stored("counts", stored.states())


class Handed(ColumnarProcessor):
    """A user's processor that returns the given objects, whatever they are."""

    def __init__(self, state: Any, results: Any) -> None:
        self._state, self._results = state, results

    def state_schema(self, rows: pa.Schema) -> pa.Schema:
        schema: pa.Schema = self._state
        return schema

    def process(self, batch: KeyBatch) -> KeyResults:
        results: KeyResults = self._results
        return results


def test_other_objects_than_results_are_told() -> None:
    """The error names the method and what it must return; it was an AttributeError in a task."""
    schema = pa.schema([("n", pa.int64())])
    with pytest.raises(InvalidInputError, match=r"state_schema of Handed must return a pyarrow.Schema, not \['n'\]"):
        Task(Handed(["n"], None), ROWS).plan.states()
    with pytest.raises(InvalidInputError, match="process of Handed must return KeyResults, not NoneType"):
        Task(Handed(schema, None), ROWS).run([{"k": 1, "v": 1}])


def test_table_is_no_output() -> None:
    """Output goes to Spark as batches."""
    with pytest.raises(InvalidInputError, match=r"must be a pyarrow.RecordBatch, not Table; .*to_batches\(\)"):
        with_types(pa.table({"n": [1]}), ["n"], [pa.int64()])


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (tumbling("at", timedelta(hours=1)), sliding("at", timedelta(hours=1), timedelta(minutes=30)), "every 1800 s"),
        (tumbling("at", timedelta(hours=1)), tumbling("at", timedelta(hours=1), timedelta(minutes=5)), "from 300 s"),
    ],
)
def test_other_places_of_windows_than_stored_are_refused(old: Windows, new: Windows, words: str) -> None:
    """The first of the new windows would be emitted without the rows that came before the start."""
    rows = pa.schema([*ROWS, ("at", pa.timestamp("us", "UTC"))])
    stored, other = (Task(Aggregate(Count(name="n"), windows=windows), rows).plan for windows in (old, new))
    stored.check_stored("counts", stored.states())
    with pytest.raises(InvalidInputError, match=f"per window of 3600 s where .* per window of 3600 s {words};"):
        other.check_stored("counts", stored.states())
    other.check_stored("counts", _of_earlier_version(stored.states()))

    shifted = replace(old, offset_us=old.offset_us - 2 * old.slide_us)
    Task(Aggregate(Count(name="n"), windows=shifted), rows).plan.check_stored("counts", stored.states())


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (Sum("v", name="x"), Max("v", name="x"), r"\(sum\) where its processor has x.0 bigint \(maximum\)"),
        (Count(name="x"), Sum("v", name="x"), r"\(count\) where its processor has x.0 bigint \(sum\)"),
        (Min("v", name="x"), TopK("v", limit=1, name="x"), r"\(minimum\) where its processor has x.0 bigint \(top\)"),
    ],
)
def test_another_aggregation_of_the_same_name_is_refused(old: Aggregation, new: Aggregation, words: str) -> None:
    """A maximum that goes on from a stored sum is neither."""
    rows = pa.schema([("k", pa.int32()), ("v", pa.int64())])
    stored, other = (Task(Aggregate(aggregation), rows).plan for aggregation in (old, new))
    stored.check_stored("totals", stored.states())
    with pytest.raises(InvalidInputError, match=words):
        other.check_stored("totals", stored.states())
    other.check_stored("totals", _of_earlier_version(stored.states()))


def _of_earlier_version(states: dict[str, StateInfo]) -> dict[str, StateInfo]:
    """Return states as a job has stored them that was started before these facts were."""
    columns = json.loads(states["columns"].schema)
    for field in columns["fields"]:
        for fact in ("dstl.meaning", "dstl.places"):
            field["metadata"].pop(fact, None)
    return {**states, "columns": replace(states["columns"], schema=json.dumps(columns))}


def test_metadata_may_change() -> None:
    """A field's metadata, such as the user's own unit, does not affect state."""
    older, newer = ({"SPARK::metadata::json": json.dumps({"unit": unit})} for unit in ("EUR", "USD"))
    stored = Task(Kept(pa.int64(), older), ROWS).plan.states()
    Task(Kept(pa.int64(), newer), ROWS).plan.check_stored("prices", stored)


def test_zone_may_change() -> None:
    """Stored times count from 1970 UTC, whatever time zone they are shown in."""
    stored = Task(Kept(pa.timestamp("us", "UTC")), ROWS).plan.states()
    Task(Kept(pa.timestamp("us", "Europe/Berlin")), ROWS).plan.check_stored("times", stored)
