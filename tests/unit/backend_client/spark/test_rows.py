"""Conversion between Arrow batches and rows."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from backend_client.spark.task.rows import GroupedRows, RowsToArrow, row_factory, to_python
from storage.errors import InvalidInputError


def batch(keys: list[Any], kind: pa.DataType | None = None, begin: int = 0) -> pa.RecordBatch:
    """Return a batch of one key column whose rows are numbered from `begin` on."""
    numbers = list(range(begin, begin + len(keys)))
    columns = [pa.array([0] * len(keys), pa.int32()), pa.array(keys, kind), pa.array(keys, kind), pa.array(numbers)]
    return pa.RecordBatch.from_arrays(columns, ["kg", "key", "user", "n"])


def grouped(batches: Iterable[pa.RecordBatch], take: int | None = None) -> list[tuple[Any, list[int]]]:
    """Return the keys with the numbers of their rows; at most `take` rows of each key are read."""
    groups = GroupedRows(batches, 1, ["user", "n"])
    result = []
    for _, key, rows in groups:
        numbers = (
            [row.n for _, row in zip(range(take), rows, strict=False)] if take is not None else [row.n for row in rows]
        )
        result.append((key[0], numbers))
    return result


def split(keys: list[Any], cuts: list[int], kind: pa.DataType | None = None) -> list[pa.RecordBatch]:
    """Return the rows of these keys as batches cut at these places."""
    edges = [0, *sorted(cuts), len(keys)]
    return [batch(keys[a:b], kind or pa.string(), a) for a, b in pairwise(edges)]


@pytest.mark.parametrize("cuts", [[], [1], [2], [3], [1, 2, 3, 4, 5], [2, 2, 2], [0, 6], [5]])
def test_keys_are_whole_over_batches(cuts: list[int]) -> None:
    """However the rows are cut into batches, even empty ones, each key is one call with all its rows in order."""
    assert grouped(split(list("aabbbc"), cuts)) == [("a", [0, 1]), ("b", [2, 3, 4]), ("c", [5])]


def test_one_key_may_fill_many_batches() -> None:
    """A key that spans many batches is one call."""
    assert grouped(split(["a"] * 50, list(range(1, 50)))) == [("a", list(range(50)))]


@pytest.mark.parametrize("cuts", [[], [1], [2], [1, 2, 3]])
@pytest.mark.parametrize("is_nested", [False, True])
def test_hours_that_come_twice_are_two_keys(cuts: list[int], *, is_nested: bool) -> None:
    """An hour before and after the clock is set back, which Python takes for equal, are two keys."""
    zone = pa.timestamp("us", "Europe/Berlin")
    before, after = (datetime(2024, 10, 27, hour, 30, tzinfo=UTC) for hour in (0, 1))
    keys: list[Any] = [before, before, after, after]
    kind = zone
    if is_nested:
        keys, kind = [{"at": key} for key in keys], pa.struct([("at", zone)])
    assert [numbers for _, numbers in grouped(split(keys, cuts, kind))] == [[0, 1], [2, 3]]


def test_no_rows_cause_no_calls() -> None:
    """Without rows no key is called, and nothing is counted."""
    groups = GroupedRows(split([], []), 1, ["user", "n"])

    assert (list(groups), groups.rows_seen, groups.keys_seen) == ([], 0, 0)


@pytest.mark.parametrize("take", [0, 1])
@pytest.mark.parametrize("cuts", [[], [1], [3], [1, 2, 3, 4, 5]])
def test_unread_rows_are_passed_over(take: int, cuts: list[int]) -> None:
    """A function that does not read all rows of a key does not affect the next key."""
    expected = [("a", [0, 1][:take]), ("b", [2, 3, 4][:take]), ("c", [5][:take])]

    assert grouped(split(list("aabbbc"), cuts), take) == expected


@given(st.lists(st.integers(1, 5), max_size=8), st.lists(st.integers(0, 40), max_size=6))
def test_any_cut_gives_same_groups(counts: list[int], cuts: list[int]) -> None:
    """I14: groups and counts depend on the rows alone, not on the batches."""
    keys = [f"{number:03d}" for number, count in enumerate(counts) for _ in range(count)]
    groups = GroupedRows(split(keys, [min(cut, len(keys)) for cut in cuts]), 1, ["user", "n"])
    found = [(key[0], len(list(rows))) for _, key, rows in groups]

    assert found == [(f"{number:03d}", count) for number, count in enumerate(counts)]
    assert (groups.rows_seen, groups.keys_seen) == (len(keys), len(counts))


STRUCT = pa.struct([("a", pa.float64()), ("b", pa.string())])


@pytest.mark.parametrize(
    ("kind", "keys", "counts"),
    [
        (pa.string(), [None, None, "", "a"], [2, 1, 1]),
        (pa.int64(), [None, 0, 0, 1], [1, 2, 1]),
        (pa.float64(), [float("nan"), float("nan"), 0.0, -0.0, None], [2, 2, 1]),
        (pa.float32(), [0.5, float("nan"), float("nan")], [1, 2]),
        (STRUCT, [{"a": 1.0, "b": "x"}, {"a": 1.0, "b": "x"}, {"a": 1.0, "b": None}, None], [2, 1, 1]),
        (STRUCT, [{"a": float("nan"), "b": "x"}, {"a": float("nan"), "b": "x"}], [2]),
        (pa.list_(pa.float64()), [[1.0], [1.0], [1.0, 2.0], [float("nan")], [float("nan")]], [2, 1, 2]),
        (pa.binary(), [b"", b"\x00", b"\x00"], [1, 2]),
        (pa.bool_(), [False, True, True], [1, 2]),
        (pa.date32(), [date(2020, 1, 1), date(2020, 1, 1), date(2020, 1, 2)], [2, 1]),
        (pa.decimal128(10, 2), [Decimal("1.00"), Decimal("1.00"), Decimal("1.01")], [2, 1]),
        (pa.timestamp("us", "UTC"), [1, 1, 2], [2, 1]),
        (pa.null(), [None, None], [2]),
    ],
)
@pytest.mark.parametrize("cuts", [[], [1], [1, 2, 3]])
def test_equal_keys_are_one_call(kind: pa.DataType, keys: list[Any], counts: list[int], cuts: list[int]) -> None:
    """Keys are distinguished as in Spark's grouping: null is a key, and so is NaN, also when nested."""
    batches = split(keys, [min(cut, len(keys)) for cut in cuts], kind)

    assert [len(numbers) for _, numbers in grouped(batches)] == counts


def test_keys_of_two_columns_are_distinguished() -> None:
    """A key changes when any of its columns does; the key group follows."""
    columns = [pa.array([1, 1, 2, 2]), pa.array(["a", "a", "b", "c"]), pa.array([1, 2, 2, 2]), pa.array([0, 1, 2, 3])]
    groups = GroupedRows([pa.RecordBatch.from_arrays(columns, ["kg", "x", "y", "n"])], 2, ["n"])

    assert [(group, key, [row.n for row in rows]) for group, key, rows in groups] == [
        (1, ("a", 1), [0]),
        (1, ("a", 2), [1]),
        (2, ("b", 2), [2]),
        (2, ("c", 2), [3]),
    ]


class TestRowFactory:
    """Rows as a user's function receives them."""

    ROW = row_factory(["user", "count", "two words", "class"])(["ann", 5, None, True])
    PLAIN = Row(**{"user": "ann", "count": 5, "two words": None, "class": True})

    def test_row_equals_spark_row(self) -> None:
        """A row equals a Spark row in everything that a function can call."""
        assert isinstance(self.ROW, Row)
        assert self.ROW == self.PLAIN
        assert hash(self.ROW) == hash(self.PLAIN)
        assert repr(self.ROW) == repr(self.PLAIN)
        assert self.ROW.asDict() == self.PLAIN.asDict()
        assert ("user" in self.ROW, "nobody" in self.ROW) == (True, False)
        assert [self.ROW["user"], self.ROW["two words"], self.ROW[1]] == ["ann", None, 5]
        assert (self.ROW.user, getattr(self.ROW, "class")) == ("ann", True)

    @pytest.mark.parametrize(
        "item", [0, -1, 3, True, slice(1, 3), slice(None, None, 2), "class", 4, -5, "nobody", 1.0, None]
    )
    def test_items_are_those_of_spark_row(self, item: Any) -> None:
        """An item is read by name, number or slice, and a missing one raises the same error as in Spark's rows."""

        def got(row: Row) -> Any:
            try:
                return row[item]
            except Exception as error:  # noqa: BLE001 - any error of Spark
                return type(error), error.args

        assert got(self.ROW) == got(self.PLAIN)

    def test_method_names_stay_methods(self) -> None:
        """A column named like a method of rows is read by index, as in Spark's rows."""
        assert callable(self.ROW.count)
        assert self.ROW["count"] == 5

    @pytest.mark.parametrize("again", [lambda row: pickle.loads(pickle.dumps(row)), copy.copy, copy.deepcopy])
    def test_copied_row_is_same(self, again: Any) -> None:
        """A pickled or copied row keeps its names."""
        copied = again(self.ROW)

        assert copied == self.ROW
        assert copied.asDict() == self.ROW.asDict()

    def test_row_is_read_only(self) -> None:
        """A row cannot be changed."""
        with pytest.raises(RuntimeError, match="read-only"):
            self.ROW.user = "bob"

    @pytest.mark.parametrize("name", ["nobody", "__nobody__"])
    def test_unknown_field_is_an_error(self, name: str) -> None:
        """A missing field raises the same error as in Spark's rows."""
        with pytest.raises(AttributeError):
            getattr(self.ROW, name)

    def test_first_of_equal_names_is_read(self) -> None:
        """If two columns have one name, the first is read by name, as in Spark's rows."""
        assert row_factory(["a", "a"])([1, 2]).a == Row("a", "a")(1, 2).a == 1


def columns_of(schema: StructType, *rows: Any) -> list[list[Any]]:
    """Return the columns that these rows become."""
    converter = RowsToArrow(schema)
    return [column.to_pylist() for column in converter.columns([*converter.taken(iter(rows))])]


PAIR = StructType([StructField("user", StringType()), StructField("n", LongType())])


class TestRowsToArrow:
    """Rows that a user's function yields."""

    def test_fields_are_matched_by_name(self) -> None:
        """Rows with fields in any order, missing or superfluous, fill the columns by name."""
        rows = [Row(user="a", n=1), Row(n=2, user="b"), Row(n=3), Row(user="d", n=4, other=True)]

        assert columns_of(PAIR, *rows) == [["a", "b", None, "d"], [1, 2, 3, 4]]

    def test_no_rows_are_empty_columns(self) -> None:
        """Without rows the columns exist and are empty."""
        assert columns_of(PAIR) == [[], []]

    def test_nested_rows_become_structs(self) -> None:
        """Rows inside rows, lists and maps are structs by name."""
        inner = StructType([StructField("a", IntegerType()), StructField("b", StringType())])
        schema = StructType(
            [
                StructField("one", inner),
                StructField("many", ArrayType(inner)),
                StructField("named", MapType(StringType(), inner)),
            ]
        )
        row = Row(one=Row(b="x", a=1), many=[Row(a=2, b=None), None], named={"k": Row(a=3, b="z")})

        assert columns_of(schema, row) == [
            [{"a": 1, "b": "x"}],
            [[{"a": 2, "b": None}, None]],
            [[("k", {"a": 3, "b": "z"})]],
        ]

    def test_structs_of_different_rows_have_any_form(self) -> None:
        """I14: one key's struct may be a tuple and another's a dictionary, a row or pairs, as on Spark."""
        inner = StructType([StructField("a", IntegerType()), StructField("b", StringType())])
        schema = StructType([StructField("one", inner), StructField("many", ArrayType(inner))])
        forms = [(1, "x"), {"a": 1, "b": "x"}, Row(b="x", a=1), [("a", 1), ("b", "x")]]

        one, many = columns_of(schema, Row(one=None, many=None), *(Row(one=form, many=[form]) for form in forms))

        assert one == [None, *[{"a": 1, "b": "x"}] * 4]
        assert many == [None, *[[{"a": 1, "b": "x"}]] * 4]

    @pytest.mark.parametrize(
        ("kind", "value"),
        [
            (LongType(), "x"),
            (LongType(), 1.5),
            (LongType(), np.float64(1.5)),
            (IntegerType(), np.float32(1.5)),
            (LongType(), 2**70),
            (IntegerType(), 2**40),
            (StringType(), 5),
            (StringType(), "\ud800"),
            (DoubleType(), "x"),
            (DateType(), "2020-01-01"),
            (TimestampType(), "now"),
            (DecimalType(5, 2), "1"),
            (DecimalType(5, 2), Decimal("12345.678")),
            (ArrayType(LongType()), 5),
            (ArrayType(LongType()), ["x"]),
            (MapType(StringType(), LongType()), 5),
            (LongType(), Decimal("1.5")),
            (ArrayType(LongType()), [1, 1.5]),
            (ArrayType(LongType()), np.array([1.5])),
            (ArrayType(ArrayType(IntegerType())), [[np.float32(1.5)], None]),
            (MapType(StringType(), LongType()), {"a": 1.5}),
            (MapType(StringType(), LongType()), [("a", 1.5)]),
            (MapType(LongType(), StringType()), {1.5: "a"}),
            (StructType().add("x", LongType()), Row(x=np.float64(1.5))),
            (ArrayType(StructType().add("x", MapType(StringType(), LongType()))), [None, {"x": {"a": None, "b": 1.5}}]),
            (StructType().add("x", LongType()), [("x", 1.5)]),
            (StructType([StructField("a", LongType())]), 5),
            (StructType([StructField("a", LongType())]), Row(a="x")),
            (LongType(), object()),
        ],
    )
    def test_misfit_names_column(self, kind: Any, value: Any) -> None:
        """A value that does not fit its column is refused with the column's name."""
        with pytest.raises(InvalidInputError, match="'wrong'"):
            columns_of(StructType([StructField("wrong", kind)]), Row(wrong=value))

    def test_rows_are_taken_as_they_are_yielded(self) -> None:
        """A list, dictionary or nested row that is changed after its yield is emitted as yielded, as in Spark."""
        kinds = {"list": ArrayType(LongType()), "map": MapType(StringType(), ArrayType(LongType()))}
        pair = StructType([StructField("n", LongType()), StructField("list", ArrayType(LongType()))])
        fields = [*(StructField(name, kind) for name, kind in kinds.items()), StructField("pair", pair)]
        converter = RowsToArrow(StructType(fields))

        def yielded() -> Iterator[Row]:
            numbers: list[int] = []
            by_name: dict[str, list[int]] = {}
            for n in range(2):
                numbers.append(n)
                by_name[str(n)] = numbers
                yield Row(list=numbers, map=by_name, pair=Row(n=n, list=numbers))

        lists, maps, pairs = converter.columns([*converter.taken(yielded())])

        assert lists.to_pylist() == [[0], [0, 1]]
        assert maps.to_pylist() == [[("0", [0])], [("0", [0, 1]), ("1", [0, 1])]]
        assert pairs.to_pylist() == [{"n": 0, "list": [0]}, {"n": 1, "list": [0, 1]}]

    def test_arrays_and_bytes_are_taken_as_they_are_yielded(self) -> None:
        """Values that a processor refills for each key are emitted as yielded: bytes, arrays and lists in tuples."""
        numbers, lists = ArrayType(LongType()), ArrayType(ArrayType(LongType()))
        converter = RowsToArrow(StructType().add("raw", BinaryType()).add("numbers", numbers).add("lists", lists))
        buffer, array, items = bytearray(b"?"), np.zeros(2, np.int64), [0]

        def yielded() -> Iterator[Row]:
            for n in (1, 2):
                buffer[:], array[:], items[0] = str(n).encode(), n, n
                yield Row(raw=buffer, numbers=array, lists=(items, items))

        raws, arrays, tuples = converter.columns([*converter.taken(yielded())])

        assert raws.to_pylist() == [b"1", b"2"]
        assert arrays.to_pylist() == [[1, 1], [2, 2]]
        assert tuples.to_pylist() == [[[1], [1]], [[2], [2]]]

    @pytest.mark.parametrize("value", [memoryview(b"ab"), bytearray(b"ab"), b"ab"])
    def test_bytes_of_any_kind(self, value: Any) -> None:
        """Bytes, also behind a view, are binary values."""
        assert columns_of(StructType().add("raw", BinaryType()), Row(raw=value)) == [[b"ab"]]

    def test_whole_floats_are_integers(self) -> None:
        """An integral value of another type is accepted as an integer, as in Spark."""
        schema = StructType([StructField("n", LongType()), StructField("list", ArrayType(IntegerType()))])

        assert columns_of(schema, Row(n=np.float64(3), list=[1.0, Decimal(2)])) == [[3], [[1, 2]]]

    @pytest.mark.parametrize(
        "value",
        [
            5,
            ("a", 1),
            {"user": "a"},
            Row("a", 1),  # type: ignore[call-overload]  # values without names, which Spark's types leave out
            None,
        ],
    )
    def test_other_than_named_row_is_refused(self, value: Any) -> None:
        """Anything but a row with names is refused and shown."""
        with pytest.raises(InvalidInputError, match=r"pyspark\.sql\.Row"):
            columns_of(PAIR, value)


@pytest.mark.parametrize("zone", [None, "UTC", "Etc/UTC", "Europe/Berlin", "+05:30"])
@pytest.mark.parametrize(
    "moments",
    [
        [1_700_000_000_123_456, None, 0, -1, 1_688_000_000_000_000],
        [1_698_537_600_000_000 + 600_000_000 * number for number in range(20)],  # an hour occurs twice in Berlin
        [None],
        [],
        [-62_135_500_000_000_000, 253_402_200_000_000_000],
    ],
)
def test_moments_are_converted_like_arrow_does(zone: str | None, moments: list[int | None]) -> None:
    """Timestamps become Python's, however they are converted, with their zone and with nulls."""
    column = pa.array(moments, pa.int64()).view(pa.timestamp("us", zone))
    assert to_python(column) == column.to_pylist()
    assert [repr(moment) for moment in to_python(column)] == [repr(moment) for moment in column.to_pylist()]


def test_moments_outside_of_python_are_refused_as_arrow_does() -> None:
    """A time outside Python's datetime range is an error, not a number."""
    column = pa.array([253_402_300_800_000_000], pa.int64()).view(pa.timestamp("us"))
    with pytest.raises(OverflowError):
        to_python(column)
