"""Conversion between pandas frames and Arrow batches: like Spark's own worker, but for many keys at once."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql.conversion import ArrowBatchTransformer
from pyspark.sql.types import LongType, StructType

from backend_client.spark.private import frames as private_frames
from backend_client.spark.private.frames import arrow_schema, spark_schema
from backend_client.spark.task import frames
from backend_client.spark.task.frames import GroupedFrames, InitialFrames
from backend_client.spark.task.pandas_settings import PandasSettings

ZONE = "America/New_York"
SETTINGS = PandasSettings(timezone=ZONE, by_name=True, safely=False)
SECONDS = [0, 1_700_000_000, None, 1_600_000_000, -1]
COLUMNS: dict[str, pa.Array] = {
    "k": pa.array(["a", "a", "b", "c", "c"]),
    "tiny": pa.array([1, 2, 3, 4, 5], pa.int8()),
    "whole": pa.array([1, None, 3, 4, 5], pa.int64()),
    "small": pa.array([0.5, 1.5, None, 0.25, 2.0], pa.float32()),
    "big": pa.array([0.5, 1.5, None, 0.1, 2.0], pa.float64()),
    "flag": pa.array([True, None, True, False, True]),
    "even": pa.array([True, False, True, False, True]),
    "text with space": pa.array(["x", None, "é", "", "z"]),
    "class": pa.array(["keyword"] * 5),
    "_hidden": pa.array(["underscore"] * 5),
    "ts": pa.array([None if s is None else s * 1_000_000 for s in SECONDS], pa.timestamp("us", ZONE)),
    "wall": pa.array([dt.datetime(2020, 1, 1, 1, 2, 3, n) for n in range(5)], pa.timestamp("us")),
    "day": pa.array([dt.date(2020, 1, 1), None, dt.date(1, 1, 1), dt.date(2020, 1, 2), dt.date(9999, 1, 1)]),
    "money": pa.array([Decimal("1.50"), None, Decimal("2.00"), Decimal("3.00"), Decimal("0.00")], pa.decimal128(10, 2)),
    "raw": pa.array([b"", b"\xff", None, b"a", b"b"]),
    "items": pa.array([[1, 2], None, [], [None], [3]], pa.list_(pa.int32())),
    "pair": pa.array([{"a": 1, "b": ["x"]}, None, {"a": None, "b": []}, {"a": 2, "b": None}, {"a": 3, "b": ["y"]}]),
    "named": pa.array([[("x", 1)], None, [], [("y", None)], [("z", 3)]], pa.map_(pa.string(), pa.int32())),
    "gap": pa.array([dt.timedelta(n) for n in range(5)], pa.duration("us")),
    "nothing": pa.nulls(5),
}


def batch_of(columns: dict[str, pa.Array], start: int = 0, stop: int = 5) -> pa.RecordBatch:
    key = columns["k"]
    groups = pa.array([0] * len(key), pa.int32())
    batch = pa.RecordBatch.from_arrays([groups, key, *columns.values()], ["group", "key", *columns])
    return batch.slice(start, stop - start)


def frames_of(*batches: pa.RecordBatch) -> list[tuple[Any, list[pd.DataFrame]]]:
    names = batches[0].schema.names[2:]
    return [(key, list(rows)) for _, key, rows in GroupedFrames(batches, 1, names, SETTINGS)]


def spark_frames(batch: pa.RecordBatch) -> Iterator[tuple[Any, pd.DataFrame]]:
    """Return the frames that PySpark's worker makes of a batch."""
    data = pd.concat(ArrowBatchTransformer.to_pandas(batch, timezone=ZONE), axis=1)
    rows = list(data.itertuples(index=False))
    for key in dict.fromkeys(row[0] for row in rows):
        yield (key,), pd.DataFrame([row for row in rows if row[0] == key])


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_are_those_of_spark(name: str) -> None:
    """Values, types, names and index of each key's frame equal those from PySpark's worker for the same batch."""
    columns = {"k": COLUMNS["k"], name: COLUMNS[name]}
    ours = frames_of(batch_of(columns))
    theirs = list(spark_frames(pa.RecordBatch.from_arrays(list(columns.values()), list(columns))))

    assert [key for key, _ in ours] == [key for key, _ in theirs]
    for (_, [frame]), (_, expected) in zip(ours, theirs, strict=True):
        pd.testing.assert_frame_equal(frame, expected, check_column_type=False)
        assert isinstance(frame.index, pd.RangeIndex)
        assert [[repr(v) for v in row] for row in frame.itertuples()] == [
            [repr(v) for v in row] for row in expected.itertuples()
        ]


def test_key_over_several_batches_has_several_frames() -> None:
    """A key that spans several batches gets one frame per batch and counts as one key; the next key has its own."""
    batch = batch_of(COLUMNS)

    found = frames_of(batch.slice(0, 1), batch.slice(1, 1), batch.slice(2, 2), batch.slice(4, 1))

    assert [(key, [len(frame) for frame in frames]) for key, frames in found] == [
        (("a",), [1, 1]),
        (("b",), [1]),
        (("c",), [1, 1]),
    ]


@pytest.mark.parametrize(("keeps", "expected"), [(False, ("_0", "float64", "int64")), (True, ("_n", "int32", "int32"))])
def test_types_beside_an_initial_state(monkeypatch: pytest.MonkeyPatch, keeps: bool, expected: Any) -> None:
    """Spark 4.1 leaves types and names of the columns as they are beside an initial state; later versions do not."""
    monkeypatch.setattr(frames, "keeps_column_types", lambda: keeps)
    key = pa.array(["a", "a", "b", "b"])
    columns = {
        "k": key,
        "input": pa.array([1, None, None, None], pa.int32()),
        "is input": pa.array([True, False, True, False]),
        "k of initial": key,
        "initial": pa.array([None, 5, None, 6], pa.int32()),
    }
    batch = batch_of(columns).drop_columns(["k"])
    grouped = GroupedFrames([batch], 1, batch.schema.names[2:], SETTINGS, InitialFrames(1, ("_n",), ("i",)))

    pairs = [pair for _, _, rows in grouped for pair in rows]

    assert [pair.initial["i"].tolist() for pair in pairs] == [[5], [6]]
    first = pairs[0]
    assert (first.input.columns[0], first.input.dtypes.iloc[0], first.initial.dtypes.iloc[0]) == expected


def test_frames_are_the_processors_own() -> None:
    """A frame may be changed in place and extended, without a warning and without an effect on other keys."""
    columns = {"k": COLUMNS["k"], "big": pa.array([1.0, 2.0, 3.0, 4.0, 5.0])}
    grouped = iter(GroupedFrames([batch_of(columns)], 1, list(columns), SETTINGS))

    first = next(next(grouped).rows)
    first["big"] += 100.0
    first.loc[0, "big"] = -1.0
    first["new"] = first["big"] * 2
    second = next(next(grouped).rows)

    assert first["new"].tolist() == [-2.0, 204.0]
    assert second["big"].tolist() == [3.0]
    assert second.columns.tolist() == ["k", "big"]


@pytest.mark.parametrize("lacks", [False, True])
def test_metadata_goes_through_arrow(monkeypatch: pytest.MonkeyPatch, lacks: bool) -> None:
    """A column's watermark is in its metadata, which PySpark 4.1 drops."""
    if lacks:
        bare = pa.schema([pa.field("at", pa.int64()), pa.field("n", pa.int64())])
        back = StructType().add("at", LongType()).add("n", LongType())
        old = SimpleNamespace(
            to_arrow_type=None, to_arrow_schema=lambda _: bare, from_arrow_schema=lambda *_, **__: back
        )
        monkeypatch.setattr(private_frames, "spark_types", old)
        monkeypatch.setattr(private_frames, "_in_utc", dict)
    given = StructType().add("at", LongType(), metadata={"spark.watermarkDelayMs": 5}).add("n", LongType())

    assert [field.metadata for field in spark_schema(arrow_schema(given))] == [{"spark.watermarkDelayMs": 5}, {}]


def test_whole_numbers_stay_if_spark_is_told_so() -> None:
    """preferIntExtensionDtype: whole numbers beside nulls are no floats, and all have their own width, as in Spark."""
    columns = {
        "k": COLUMNS["k"],
        "tiny": COLUMNS["tiny"],
        "big": pa.array([(1 << 53) + 1, None, 3, 4, 5], pa.int64()),
    }
    settings = PandasSettings(timezone=ZONE, by_name=True, safely=False, integers_stay=True)
    batch = batch_of(columns)
    rows = batch.select(["k", "tiny", "big"])

    data = pd.concat(ArrowBatchTransformer.to_pandas(rows, timezone=ZONE, prefer_int_ext_dtype=True), axis=1)
    parts = [pd.DataFrame([*part.itertuples(index=False)]) for _, part in data.groupby("k", sort=False)]
    found = [next(rows) for _, _, rows in GroupedFrames([batch], 1, [*columns], settings)]

    for frame, expected in zip(found, parts, strict=True):
        pd.testing.assert_frame_equal(frame, expected)
    assert found[0]["big"].tolist() == [(1 << 53) + 1, pd.NA]
