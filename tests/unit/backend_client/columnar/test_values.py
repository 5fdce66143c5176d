"""State columns, encoded to bytes."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_client.columnar.values import StateColumns
from storage.errors import CorruptDataError, InvalidInputError

CASES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-128, 127),
    pa.int16(): st.integers(-(1 << 15), (1 << 15) - 1),
    pa.int32(): st.integers(-(1 << 31), (1 << 31) - 1),
    pa.int64(): st.integers(-(1 << 63), (1 << 63) - 1),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    pa.string(): st.text(max_size=20),
    pa.binary(): st.binary(max_size=20),
    pa.date32(): st.dates(date(1, 1, 1)),
    pa.timestamp("us", "UTC"): st.datetimes(datetime(1, 1, 1), datetime(9999, 1, 1), timezones=st.just(UTC)),
    pa.decimal128(38, 3): st.decimals(-(10**34), 10**34, places=3),
    pa.duration("us"): st.timedeltas(timedelta(-(10**6)), timedelta(10**6)),
}


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    """Draw columns of several types, with nulls, and sometimes a slice of a longer array."""
    kinds = draw(st.lists(st.sampled_from(list(CASES)), min_size=1, max_size=10))
    rows = draw(st.integers(0, 8))
    skipped = draw(st.integers(0, min(rows, 2)))
    arrays = [
        pa.array(draw(st.lists(st.none() | CASES[kind], min_size=rows, max_size=rows)), kind).slice(skipped)
        for kind in kinds
    ]
    return pa.RecordBatch.from_arrays(arrays, [f"c{at}" for at in range(len(kinds))])


@given(batches(), st.data())
def test_state_is_read_back_unchanged(batch: pa.RecordBatch, data: st.DataObject) -> None:
    """I15: values of all types, including nulls, are read as they were written; a key without a value has nulls."""
    codec = StateColumns(batch.schema)
    stored = codec.encode(batch).to_pylist()
    absent = data.draw(st.lists(st.booleans(), min_size=len(stored), max_size=len(stored)))
    columns, present = codec.decode(
        pa.array([None if gone else value for value, gone in zip(stored, absent, strict=True)], pa.binary())
    )

    columns.validate(full=True)
    assert present.tolist() == [not gone for gone in absent]
    expected = [dict.fromkeys(row) if gone else row for row, gone in zip(batch.to_pylist(), absent, strict=True)]
    assert repr(columns.to_pylist()) == repr(expected)  # repr: NaN does not equal itself


def test_text_of_any_bytes_comes_back() -> None:
    """Text that is invalid UTF-8, as Spark makes of bytes, is read back byte by byte."""
    raw = [b"M\xfcller", b"", None]
    codec = StateColumns(pa.schema([("s", pa.string())]))
    stored = codec.encode(pa.record_batch([pa.array(raw, pa.binary()).view(pa.string())], ["s"]))

    columns, _ = codec.decode(stored)

    assert columns.column(0).view(pa.binary()).to_pylist() == raw


def test_layout_stays() -> None:
    """The bytes of version 1 are those of docs/columnar.md: stored data must stay readable."""
    batch = pa.RecordBatch.from_pydict(
        {"n": pa.array([1, None]), "t": pa.array(["é", None]), "b": pa.array([True, False])}
    )
    assert StateColumns(batch.schema).encode(batch).to_pylist() == [
        bytes.fromhex("01 00 0100000000000000 02000000 01 c3a9"),
        bytes.fromhex("01 03 0000000000000000 00000000 00"),
    ]


@pytest.mark.parametrize(
    "damaged",
    [b"", b"\x01", bytes.fromhex("02 00 0100000000000000"), bytes.fromhex("01 00 0100000000000000 00")],
    ids=["empty", "short", "unknown version", "long"],
)
def test_damaged_value_is_an_error(damaged: bytes) -> None:
    """I10: bytes that are not a value of the schema are refused."""
    codec = StateColumns(pa.schema([("n", pa.int64())]))
    with pytest.raises(CorruptDataError, match="columnar state"):
        codec.decode(pa.array([bytes.fromhex("01 00 0100000000000000"), damaged], pa.binary()))


def test_text_longer_than_its_value_is_an_error() -> None:
    """I10: a length that exceeds the value is refused."""
    codec = StateColumns(pa.schema([("t", pa.string())]))
    with pytest.raises(CorruptDataError, match="length"):
        codec.decode(pa.array([bytes.fromhex("01 00 ffffffff 61")], pa.binary()))


def test_impossible_type_is_refused() -> None:
    """A type that state cannot hold is refused before the query starts."""
    with pytest.raises(InvalidInputError, match="list"):
        StateColumns(pa.schema([("l", pa.list_(pa.int64()))]))


@pytest.mark.parametrize("kind", [pa.int64(), pa.int32()])
def test_other_columns_are_refused(kind: pa.DataType) -> None:
    """A processor that returns other names or types than it declared gets an error that says so."""
    codec = StateColumns(pa.schema([("n", pa.int64())]))
    name = "m" if kind == pa.int64() else "n"
    with pytest.raises(InvalidInputError, match="state_schema"):
        codec.encode(pa.RecordBatch.from_pydict({name: pa.array([1], kind)}))
