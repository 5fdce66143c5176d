"""Built-in aggregations compared with plain Python, over several batches."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_client.columnar import Aggregate, Aggregation, ApproxDistinct, Count, Last, Max, Mean, Min, Sum, TopK
from backend_client.columnar.reductions import Groups
from storage.errors import CorruptDataError, InvalidInputError
from tests.unit.backend_client.columnar.columnar_task import Task

KINDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "long": (pa.int64(), st.integers(-(1 << 55), 1 << 55)),
    "byte": (pa.int8(), st.integers(-128, 127)),
    "double": (pa.float64(), st.sampled_from([0.0, -2.5, 1e9, math.nan, math.inf, -math.inf])),
    "float": (pa.float32(), st.sampled_from([0.0, -2.5, 8.0, math.nan])),
    "decimal": (pa.decimal128(9, 2), st.decimals(-999, 999, places=2)),
    "string": (pa.string(), st.text("aé", max_size=2)),
    "binary": (pa.binary(), st.binary(max_size=1)),
    "boolean": (pa.bool_(), st.booleans()),
    "date": (pa.date32(), st.dates(date(1900, 1, 1), date(2100, 1, 1))),
    "timestamp": (
        pa.timestamp("us", "UTC"),
        st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)),
    ),
}
NUMBERS = ("long", "byte", "double", "float", "decimal")


@st.composite
def batches(draw: st.DrawFn, kind: str) -> list[list[dict[str, Any]]]:
    """Draw batches of rows with few keys, one of them null, and with null values."""
    rows = st.fixed_dictionaries(
        {"k": st.none() | st.integers(-1, 3), "v": st.none() | KINDS[kind][1], "t": st.none() | st.integers(0, 5)}
    )
    return draw(st.lists(st.lists(rows, max_size=12), min_size=1, max_size=3))


def rows_schema(kind: str) -> pa.Schema:
    return pa.schema([("k", pa.int32()), ("v", KINDS[kind][0]), ("t", pa.int64())])


def order(value: Any) -> Any:
    """Order values as Spark does: NaN is the greatest."""
    return (isinstance(value, float) and math.isnan(value), value)


def check(aggregation: Aggregation, kind: str, given_batches: Any, model: Callable[[list[Any]], Any]) -> None:
    """Compare each batch's output with that of the model, which gets all rows of a key so far."""
    task = Task(Aggregate(aggregation.alias("r")), rows_schema(kind))
    seen: dict[int | None, list[dict[str, Any]]] = {}
    for rows in given_batches:
        for row in rows:
            seen.setdefault(row["k"], []).append(row)
        output = task.run(rows)
        got = {row["k"]: row["r"] for row in output}
        expected = {key: model(seen[key]) for key in {row["k"] for row in rows}}
        assert len(got) == len(output)
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            assert same(got[key], value, rounding(seen[key])), (key, got[key], value)


def rounding(rows: list[dict[str, Any]]) -> float:
    """Return how much doubles may lose where these values are added: values that cancel each other leave it."""
    numbers = [abs(row["v"]) for row in rows if isinstance(row["v"], int | float) and math.isfinite(row["v"])]
    return 1e-14 * max(numbers, default=0)


def same(a: Any, b: Any, rounded: float = 0.0) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or a == b or math.isclose(a, b, rel_tol=1e-6, abs_tol=rounded)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def values(rows: list[Any]) -> list[Any]:
    return [row["v"] for row in rows if row["v"] is not None]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(st.data())
def test_order_aggregations_equal_model(kind: str, data: st.DataObject) -> None:
    """Minimum, maximum, top and count of values of every type equal those of plain Python, without nulls."""
    drawn = data.draw(batches(kind))
    check(Count("v"), kind, drawn, lambda rows: len(values(rows)))
    check(Min("v"), kind, drawn, lambda rows: min(values(rows), key=order, default=None))
    check(Max("v"), kind, drawn, lambda rows: max(values(rows), key=order, default=None))
    check(TopK("v", limit=3), kind, drawn, lambda rows: sorted(values(rows), key=order, reverse=True)[:3])


@pytest.mark.parametrize("kind", NUMBERS)
@settings(max_examples=25)
@given(st.data())
def test_sums_and_means_equal_model(kind: str, data: st.DataObject) -> None:
    """Sums and means of all numeric types equal those of plain Python; without values they are null."""
    drawn = data.draw(batches(kind))
    check(Count(), kind, drawn, len)
    check(Sum("v"), kind, drawn, lambda rows: sum(values(rows)) if values(rows) else None)
    check(
        Mean("v"),
        kind,
        drawn,
        lambda rows: float(sum(map(float, values(rows))) / len(values(rows))) if values(rows) else None,
    )


@pytest.mark.parametrize("kind", ["long", "string", "double"])
@settings(max_examples=25)
@given(st.data())
def test_last_value_equals_model(kind: str, data: st.DataObject) -> None:
    """The last value is that of the newest row, and the greatest among equally new rows; it may be null."""

    def model(rows: list[Any]) -> Any:
        timed = [row for row in rows if row["t"] is not None]
        if not timed:
            return None
        newest = max(row["t"] for row in timed)
        return max((row["v"] for row in timed if row["t"] == newest and row["v"] is not None), key=order, default=None)

    check(Last("v", by="t"), kind, data.draw(batches(kind)), model)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(st.data())
def test_few_distinct_values_are_exact(kind: str, data: st.DataObject) -> None:
    """For few values, the distinct count is exact; all NaNs count as one, nulls do not count."""
    drawn = data.draw(batches(kind))
    check(ApproxDistinct("v"), kind, drawn, lambda rows: len({repr(value) for value in values(rows)}))


def test_distinct_values_are_about_right() -> None:
    """For many values over several batches, the estimate is within four times its relative error."""
    task = Task(Aggregate(ApproxDistinct("v", "r", log2_size=11)), rows_schema("long"))
    results: list[dict[str, Any]] = []
    for batch in range(3):
        rows = [{"k": 1, "v": value, "t": 0} for value in range(batch * 4000, batch * 4000 + 8000)]
        results += task.run(rows, batch_rows=1000)
    assert len(results) == 3
    assert results[-1]["r"] == pytest.approx(16_000, rel=4 * 0.83 / math.sqrt(1 << 11))


def test_text_of_any_bytes_is_distinct() -> None:
    """Text that is invalid UTF-8 is counted like other text, as on Spark."""
    text = pa.array([b"M\xfcller", b"M\xfcller", b"Muller", None], pa.binary()).view(pa.string())
    rows = pa.record_batch([text], ["v"])
    count = ApproxDistinct("v")

    state = count.update(rows, Groups(np.array([0]), 4), [pa.nulls(1, pa.binary())], np.array([False]))

    assert count.result(state).to_pylist() == [2]


def test_sums_beyond_floats_are_exact() -> None:
    """A sum of integers is exact to the last digit, however large it is."""
    task = Task(Aggregate(Sum("v", "r")), rows_schema("long"))
    row = {"k": 1, "t": 0}
    task.run([{**row, "v": (1 << 62) - 1}, {**row, "v": (1 << 62) - 1}])
    assert [out["r"] for out in task.run([{**row, "v": 1}])] == [(1 << 63) - 1]


def test_minus_zeros_have_the_sum_zero() -> None:
    """Spark adds to 0.0, and so the result does not depend on who combines the rows."""
    task = Task(Aggregate(Sum("v", name="r")), rows_schema("double"))
    assert [repr(row["r"]) for row in task.run([{"k": 1, "v": -0.0, "t": 0}])] == ["0.0"]


@pytest.mark.parametrize("digits", [(5, 2), (9, 9), (15, 15), (16, 2), (18, 18), (38, 0), (38, 38), (5, -2)])
def test_mean_of_one_decimal_is_its_nearest_double(digits: tuple[int, int]) -> None:
    """I14: as Spark casts decimals, so that a result does not depend on whether Spark has combined the rows."""
    precision, scale = digits
    random = Random(precision + scale)
    numbers = [random.randrange(-(10**precision) + 1, 10**precision) for _ in range(500)]
    exact = [Decimal(number).scaleb(-scale, Context(prec=76)) for number in (0, *numbers)]
    values = [None, *exact]
    column = pa.array([Decimal(1).scaleb(-scale), *values], pa.decimal128(*digits)).slice(1)  # with an offset
    rows = pa.record_batch([column], ["d"])
    groups = Groups(np.arange(len(values)), len(values))
    nothing = np.zeros(len(values), np.bool_)

    mean = Mean("d")
    old = [pa.nulls(len(values), kind) for kind in mean.state_types(rows.schema)]

    found = mean.result(mean.update(rows, groups, old, nothing)).to_pylist()
    assert found == [None, *map(float, exact)]


def test_overflow_is_an_error() -> None:
    """A sum that does not fit a long is refused, as Spark does by default; it does not wrap around."""
    task = Task(Aggregate(Sum("v")), rows_schema("long"))
    with pytest.raises(InvalidInputError, match="exceeds its type"):
        task.run([{"k": 1, "v": (1 << 62), "t": 0}, {"k": 1, "v": 1 << 62, "t": 0}])


def test_several_aggregations_share_a_key() -> None:
    """Several aggregations of one key keep separate columns."""
    task = Task(Aggregate(Count(), Mean("v"), TopK("v", "top", limit=2), Max("t", "newest")), rows_schema("double"))
    rows = [{"k": 1, "v": float(value), "t": value} for value in (3, 1, 2)]
    expected = {"k": 1, "count(1)": 3, "avg(v)": 2.0, "top": [3.0, 2.0], "newest": 3}
    assert task.run(rows) == [expected]
    assert task.run(rows) == [{**expected, "count(1)": 6, "top": [3.0, 3.0]}]


@pytest.mark.parametrize(
    ("aggregation", "words"),
    [
        (Sum("nothing"), "no column 'nothing'"),
        (Sum("s"), "cannot be summed"),
        (TopK("v", limit=0), "limit"),
        (Last("v"), "by="),
        (ApproxDistinct("v", log2_size=3), "log2_size"),
    ],
)
def test_impossible_aggregation_is_refused(aggregation: Aggregation, words: str) -> None:
    """An impossible aggregation is refused when the query is created, with the reason."""
    rows = pa.schema([("k", pa.int32()), ("v", pa.int64()), ("s", pa.string())])
    with pytest.raises(InvalidInputError, match=words):
        Task(Aggregate(aggregation), rows).plan.states()


def test_column_that_occurs_twice_is_named() -> None:
    """Spark allows two columns of one name; neither is guessed."""
    rows = pa.schema([("k", pa.int32()), ("v", pa.int64()), ("v", pa.int64())])
    with pytest.raises(InvalidInputError, match=r"sum\(v\): the input has 2 columns 'v'"):
        Sum("v").state_types(rows)


def test_append_needs_windows() -> None:
    """Without windows no result is final, so append mode is refused, as in Spark."""
    with pytest.raises(InvalidInputError, match="windows"):
        Task(Aggregate(Count()), rows_schema("long"), "Append")


def test_damaged_sketch_is_an_error() -> None:
    """I10, I15: an invalid stored sketch is refused by the library that reads it."""
    task = Task(Aggregate(ApproxDistinct("v")), rows_schema("long"))
    task.run([{"k": 1, "v": 1, "t": 0}])
    [(key, value)] = task.table.entries.items()
    task.table.entries[key] = value[:6] + b"\xff" * (len(value) - 6)
    with pytest.raises(CorruptDataError, match="sketch"):
        task.run([{"k": 1, "v": 1, "t": 0}])


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the sketch library, the error names its package."""
    monkeypatch.setitem(sys.modules, "datasketches", None)
    with pytest.raises(InvalidInputError, match="needs the package datasketches"):
        Task(Aggregate(ApproxDistinct("v")), rows_schema("long")).run([{"k": 1, "v": 1, "t": 0}])


def test_unused_types_are_named() -> None:
    """Times and decimals are aggregated with the types that Spark uses for them."""
    rows = pa.schema([("k", pa.int32()), ("v", pa.decimal128(9, 2)), ("t", pa.timestamp("us", "UTC"))])
    task = Task(Aggregate(Sum("v", "s"), Last("v", "l", by="t")), rows)
    at = datetime(2024, 1, 1, tzinfo=UTC)
    out = task.run([{"k": 1, "v": Decimal("1.25"), "t": at}, {"k": 1, "v": Decimal(2), "t": at - timedelta(1)}])
    assert out == [{"k": 1, "s": Decimal("3.25"), "l": Decimal("1.25")}]
    assert [field.dataType.simpleString() for field in task.plan.output_schema()] == [
        "int",
        "decimal(19,2)",
        "decimal(9,2)",
    ]
