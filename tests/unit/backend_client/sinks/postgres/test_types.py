"""Which Arrow type goes into which type of PostgreSQL, and how values are written."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from backend_client.sinks.postgres.types import ColumnType, fits, has_nul, rows, wanted_type
from storage.errors import UnavailableError

CATEGORIES = {
    "N": ("int2", "int4", "int8", "float4", "float8", "numeric"),
    "S": ("text", "varchar", "bpchar"),
    "U": ("bytea", "json", "jsonb", "uuid"),
    "D": ("date", "time", "timestamp", "timestamptz"),
    "T": ("interval",),
    "B": ("bool",),
    "E": ("mood",),
    "I": ("inet",),
}
COLUMNS = [ColumnType(name, category) for category, names in CATEGORIES.items() for name in names]
STRUCT = pa.struct({"x": pa.int64()})


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (pa.bool_(), "bool"),
        (pa.int8(), "int2 int4 int8 numeric"),
        (pa.uint64(), "int2 int4 int8 numeric"),
        (pa.float32(), "float4 float8 numeric"),
        (pa.decimal128(38, 18), "numeric"),
        (pa.string(), "text varchar bpchar json jsonb uuid mood inet"),
        (pa.binary(), "bytea"),
        (pa.date32(), "date"),
        (pa.timestamp("us"), "timestamp"),
        (pa.timestamp("us", "Europe/Berlin"), "timestamptz"),
        (pa.duration("us"), "interval"),
        (STRUCT, "json jsonb"),
        (pa.map_(pa.string(), pa.int64()), "json jsonb"),
        (pa.list_(STRUCT), "json jsonb"),
        (pa.list_(pa.list_(pa.int64())), "json jsonb"),
        (pa.list_(pa.int64()), ""),
        (pa.month_day_nano_interval(), ""),
    ],
)
def test_types_fit_that_keep_the_meaning(given: pa.DataType, names: str) -> None:
    """A zone is neither dropped nor guessed, numbers are not rounded, and text is not read as a number."""
    assert " ".join(column.name for column in COLUMNS if fits(given, column)) == " ".join(
        column.name for column in COLUMNS if column.name in names.split()
    )


def test_decimals_are_not_rounded() -> None:
    """A column that says how many digits it has after the point must have enough; it would round in silence."""
    money = ColumnType("numeric", "N", scale=2)
    assert fits(pa.decimal128(38, 2), money)
    assert not fits(pa.decimal128(10, 3), money)
    assert not fits(pa.list_(pa.decimal128(10, 3)), ColumnType("_numeric", "A", money))
    assert str(money) == "numeric with 2 digits after the point"


def test_times_are_not_rounded() -> None:
    """A time of fewer digits would be rounded in silence, and two rows with keys that differ become one."""
    for given, kind in (
        (pa.timestamp("us", "UTC"), "timestamptz"),
        (pa.timestamp("us"), "timestamp"),
        (pa.duration("us"), "interval"),
        (pa.time64("us"), "time"),
    ):
        assert fits(given, ColumnType(kind, "D"))
        assert fits(given, ColumnType(kind, "D", scale=6))
        assert not fits(given, ColumnType(kind, "D", scale=3))
    assert fits(pa.timestamp("ms"), ColumnType("timestamp", "D", scale=3))
    assert not fits(pa.int64(), ColumnType("numeric", "N", scale=-2))
    assert fits(pa.float64(), ColumnType("numeric", "N", scale=0))


def test_text_is_not_cut_off() -> None:
    """Two types of PostgreSQL's own tables take longer text, and keep its beginning."""
    assert not any(fits(pa.string(), ColumnType(name, "S")) for name in ("name", "char"))


def test_lists_fit_arrays_of_their_elements() -> None:
    """Only of the right elements; the message names the type to create."""
    array = ColumnType("_int8", "A", ColumnType("int8", "N"))
    assert fits(pa.list_(pa.int64()), array)
    assert not fits(pa.list_(pa.string()), array)
    assert not fits(pa.int64(), array)
    assert str(array) == "int8[]"
    names = [
        wanted_type(given)
        for given in (pa.string(), pa.list_(pa.string()), STRUCT, pa.int64(), pa.timestamp("us"), pa.bool_())
    ]
    assert names == ["text", "text[]", "jsonb", "int8", "timestamp", "bool"]


@pytest.mark.parametrize(
    ("value", "given", "expected"),
    [
        ({"x": None}, STRUCT, {"x": None}),
        (
            {"d": date(2026, 1, 2), "t": datetime(2026, 1, 2, 3, tzinfo=UTC), "n": Decimal("1.10"), "b": b"\0"},
            pa.struct({"d": pa.date32(), "t": pa.timestamp("us", "UTC"), "n": pa.decimal128(9, 2), "b": pa.binary()}),
            {"d": "2026-01-02", "t": "2026-01-02T03:00:00+00:00", "n": "1.10", "b": "AA=="},
        ),
        (
            {"f": [float("nan"), float("inf"), float("-inf"), 0.1, None]},
            pa.struct({"f": pa.list_(pa.float64())}),
            {"f": ["NaN", "Infinity", "-Infinity", 0.1, None]},
        ),
        ([(1, {"x": 2})], pa.map_(pa.int64(), STRUCT), {"1": {"x": 2}}),
        ([(True, 1)], pa.map_(pa.bool_(), pa.int64()), {"true": 1}),
        ([[1], None, []], pa.list_(pa.list_(pa.int64())), [[1], None, []]),
    ],
)
def test_nested_values_are_json(value: Any, given: pa.DataType, expected: Any) -> None:
    """All that JSON has no form for is text; a missing value stays one."""
    found = list(rows(pa.record_batch({"v": pa.array([value, None], given)})))
    assert [json.loads(found[0][0]), found[1][0]] == [expected, None]


def test_moments_of_zones_that_python_does_not_know() -> None:
    """Spark's session may have the zone GMT+8; the server is told the moment."""
    moment = datetime(2026, 1, 2, 3, tzinfo=UTC)
    there = pa.array([moment], pa.timestamp("us", "GMT+8"))
    values = {"t": there, "l": pa.ListArray.from_arrays([0, 1], there)}
    assert list(rows(pa.record_batch(values))) == [(moment, [moment])]
    nested = pa.StructArray.from_arrays([there, values["l"]], ["t", "l"])
    (found,) = list(rows(pa.record_batch({"s": nested})))
    assert json.loads(found[0]) == {"t": "2026-01-02T03:00:00+00:00", "l": ["2026-01-02T03:00:00+00:00"]}


def test_values_without_a_form_name_their_column() -> None:
    """A date that Python does not know, and text that is no text."""
    far = pa.record_batch({"k": [1], "far": pa.array([10**18], pa.timestamp("s"))})
    with pytest.raises(UnavailableError, match="a value of column 'far'"):
        list(rows(far))
    broken = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers())
    with pytest.raises(UnavailableError, match="a value of column 'text'"):
        list(rows(pa.record_batch({"text": broken})))


def test_nul_is_found_in_lists() -> None:
    """Also in the elements; other values have none."""
    assert [has_nul(value) for value in ("a\0", ["a", "\0"], "a", b"\0", [None, 1])] == [
        True,
        True,
        False,
        False,
        False,
    ]
