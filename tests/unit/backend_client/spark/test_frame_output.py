"""Frames of the pandas API on their way out: the columns that Spark's own worker makes of them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql.conversion import PandasToArrowConversion
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from backend_client.spark.task.frames import FramesToArrow
from backend_client.spark.task.pandas_settings import PandasSettings
from storage.errors import InvalidInputError

SETTINGS = PandasSettings(timezone="America/New_York", by_name=True, safely=False)


def schema(text: str) -> StructType:
    fields = [field.split(" ") for field in text.split(", ")]
    built = StructType()
    for name, kind in fields:
        built.add(name, kind)
    return built


def rows_of(converter: FramesToArrow, frames: list[Any]) -> list[tuple[Any, ...]]:
    return list(
        zip(*(column.to_pylist() for column in converter.columns([*converter.taken(iter(frames))])), strict=True)
    )


def test_many_frames_become_one_batch_in_order() -> None:
    """Frames of several types are converted in groups, and their rows keep the order in which they were yielded."""
    converter = FramesToArrow(schema("k string, n long"), SETTINGS)
    frames = [
        pd.DataFrame({"n": [1, 2], "k": ["a", "b"]}),
        pd.DataFrame({"k": ["c"], "n": [None]}),
        pd.DataFrame(),
        pd.DataFrame({"k": ["d"], "n": [4.0], "more": [0]}),
        pd.DataFrame({"k": ["e"], "n": [1 << 60]}),
        pd.DataFrame([["f", 6]]),
        pd.DataFrame({"k": pd.Categorical(["g"]), "n": pd.array([None], dtype="Int64")}),
    ]

    rows = rows_of(converter, frames)

    assert rows == [("a", 1), ("b", 2), ("c", None), ("d", 4), ("e", 1 << 60), ("f", 6), ("g", None)]
    assert rows_of(converter, []) == []


def test_frames_are_taken_as_they_are_yielded() -> None:
    """A frame, or a list in it, that is changed after its yield is emitted as it was yielded, as in Spark."""
    output = StructType().add("n", LongType()).add("list", ArrayType(LongType()))
    converter = FramesToArrow(output, SETTINGS)
    frame = pd.DataFrame({"n": [0], "list": [[0]]})

    def yielded() -> Iterator[pd.DataFrame]:
        for n in range(1, 3):
            yield frame
            frame.loc[0, "n"] = n
            frame["list"][0].append(n)

    numbers, lists = converter.columns([*converter.taken(yielded())])

    assert numbers.to_pylist() == [0, 1]
    assert lists.to_pylist() == [[0], [0, 1]]


def test_objects_that_are_alike_only_within_frames() -> None:
    """Frames whose objects cannot be converted together are converted one by one, as Spark converts all frames."""
    converter = FramesToArrow(schema("v double"), SETTINGS)
    frames = [pd.DataFrame({"v": ["1.5"]}, dtype=object), pd.DataFrame({"v": [2.5]}, dtype=object)]

    assert rows_of(converter, frames) == [(1.5,), (2.5,)]


def test_output_of_every_type() -> None:
    """Values of pandas and NumPy become values of the schema; timestamps without a zone get the session's zone."""
    converter = FramesToArrow(
        schema("t timestamp, w timestamp_ntz, d date, m decimal(5,2), b binary, f float"), SETTINGS
    )
    stamp = pd.Timestamp("2020-06-01 12:00")
    frame = pd.DataFrame(
        {
            "t": [stamp, pd.NaT],
            "w": [stamp, pd.NaT],
            "d": [dt.date(2020, 1, 1), None],
            "m": [Decimal("1.5"), None],
            "b": [b"x", None],
            "f": [np.float32(0.5), np.nan],
        }
    )

    assert rows_of(converter, [frame]) == [
        (
            dt.datetime(2020, 6, 1, 16, tzinfo=dt.UTC),
            dt.datetime(2020, 6, 1, 12),
            dt.date(2020, 1, 1),
            Decimal("1.50"),
            b"x",
            0.5,
        ),
        (None, None, None, None, None, None),
    ]


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ({"n": [1]}, "must yield pandas.DataFrame"),
        (pd.DataFrame({"n": [1]}), "which lacks k of the output schema"),
        (pd.DataFrame([[1]]), "a frame with 1 columns, the output schema has 2"),
        (pd.DataFrame({"k": ["a"], "n": ["many"]}), "output column 'n' do not fit its type int64"),
    ],
)
def test_output_that_does_not_fit_is_named(frame: Any, message: str) -> None:
    """For a value that does not fit the output schema, the error names the column."""
    with pytest.raises(InvalidInputError, match=message):
        rows_of(FramesToArrow(schema("k string, n long"), SETTINGS), [frame])


NOON = dt.datetime(2024, 1, 1, 12)
STAMP = pd.Timestamp(NOON)
OUTPUTS = {
    "timestamps as objects": pd.Series([NOON, None, NOON], dtype=object),
    "timestamps with None for NaT": pd.Series([STAMP, None, STAMP], dtype=object),
    "timestamps": pd.Series([STAMP, pd.NaT, STAMP]),
    "timestamps in a zone": pd.Series([STAMP, pd.NaT, STAMP]).dt.tz_localize("Asia/Tokyo"),
    "timestamps in several zones": pd.Series([STAMP.tz_localize("UTC"), STAMP.tz_localize("Asia/Tokyo")], dtype=object),
    "intervals as objects": pd.Series([dt.timedelta(1), None], dtype=object),
    "Int64": pd.Series([1, None, (1 << 53) + 1], dtype="Int64"),
    "Float64": pd.Series([1.5, None, 3], dtype="Float64"),
    "boolean": pd.Series([True, None, False], dtype="boolean"),
    "string": pd.Series(["a", None], dtype="string"),
    "Arrow's integers": pd.Series([1, None], dtype=pd.ArrowDtype(pa.int64())),
    "Arrow's timestamps": pd.Series([STAMP, None], dtype=pd.ArrowDtype(pa.timestamp("us"))),
    "integers as objects": pd.Series([1, None, 3], dtype=object),
    "decimals": pd.Series([Decimal("12345678901234567890.5"), None]),
    "categories": pd.Series(pd.Categorical([STAMP, None])),
}
KINDS: list[DataType] = [
    BooleanType(),
    IntegerType(),
    LongType(),
    FloatType(),
    DoubleType(),
    DecimalType(22, 2),
    StringType(),
    DateType(),
    TimestampType(),
    TimestampNTZType(),
]


def values(columns: list[pa.Array]) -> list[Any]:
    """Return values, moments in UTC."""
    plain = [value for column in columns for value in column.to_pylist()]
    return [value.astimezone(dt.UTC) if getattr(value, "tzinfo", None) is not None else value for value in plain]


def of_spark(frames: list[pd.DataFrame], output: StructType, settings: PandasSettings) -> list[Any] | None:
    """Return what PySpark's worker makes of frames, one by one; None if it fails."""
    columns = []
    for frame in frames:
        try:
            batch = PandasToArrowConversion.convert(
                frame,
                output,
                timezone=settings.timezone,
                safecheck=settings.safely,
                arrow_cast=True,
                assign_cols_by_name=True,
                int_to_decimal_coercion_enabled=settings.decimals_of_integers,
            )
        except (pa.ArrowException, PySparkException, ValueError, TypeError, OverflowError):
            return None
        columns.append(batch.column(0))
    return values(columns)


def of_this(frames: list[pd.DataFrame], output: StructType, settings: PandasSettings) -> list[Any] | None:
    converter = FramesToArrow(output, settings)
    try:
        return values(converter.columns([*converter.taken(iter(frames))]))
    except InvalidInputError:
        return None


@pytest.mark.parametrize("safely", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_columns_become_what_spark_makes_of_them(kind: DataType, *, safely: bool) -> None:
    """Columns of any dtype, alone and between frames of other ones, give Spark's values, or fail where Spark fails."""
    output, settings = StructType().add("v", kind), PandasSettings("America/New_York", by_name=True, safely=safely)
    frames = {name: pd.DataFrame({"v": column}) for name, column in OUTPUTS.items()}
    same = {}

    for name, frame in frames.items():
        for other in ("integers as objects", name):
            given = [frame, frames[other]]
            # Arrow has no form for some pairs of types, which Spark's error tells later than the one here.
            same[name, other] = of_this(given, output, settings) == of_spark(given, output, settings)

    assert [pair for pair, is_same in same.items() if not is_same] == []


def test_whole_numbers_become_decimals_if_spark_is_told_so() -> None:
    """intToDecimalCoercionEnabled: whole numbers fit decimals with fewer digits than a 64-bit number may have."""
    output = StructType().add("v", DecimalType(5, 1))
    frames = [pd.DataFrame({"v": [1, 2]})]
    told = PandasSettings("UTC", by_name=True, safely=True, decimals_of_integers=True)

    assert of_this(frames, output, SETTINGS) == of_spark(frames, output, SETTINGS)
    assert of_this(frames, output, told) == of_spark(frames, output, told) == [Decimal("1.0"), Decimal("2.0")]


def test_bytes_that_change_after_their_yield() -> None:
    """A bytearray that a processor refills for each frame is emitted as it was yielded, as in Spark."""
    converter, buffer = FramesToArrow(StructType().add("raw", BinaryType()), SETTINGS), bytearray(b"a")

    def yielded() -> Iterator[pd.DataFrame]:
        for content in (b"a", b"b"):
            buffer[:] = content
            yield pd.DataFrame({"raw": [buffer]})

    (column,) = converter.columns([*converter.taken(yielded())])

    assert column.to_pylist() == [b"a", b"b"]
