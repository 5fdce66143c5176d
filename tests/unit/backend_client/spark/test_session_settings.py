"""Settings of Spark's session while an operator's job is planned."""

from __future__ import annotations

from typing import Any, cast

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from backend_client.spark.query import InitialState, Operator
from backend_client.spark.session_settings import set_for
from loadtest.bench.processors import Totals

BYTES_MAX = "spark.sql.execution.arrow.maxBytesPerBatch"
ROWS_MAX = "spark.sql.execution.arrow.maxRecordsPerBatch"
DEFAULTS = {
    "spark.sql.adaptive.enabled": "true",
    BYTES_MAX: "67108864b",
    ROWS_MAX: "10000",
}
NUMBERS = [IntegerType(), DoubleType(), DecimalType(38, 2), BooleanType()]
MOMENTS = [DateType(), TimestampType(), TimestampNTZType(), DayTimeIntervalType()]


class Session:
    """The settings of a session, and of the tasks of the thread's next job."""

    def __init__(self, changes: dict[str, str]) -> None:
        self.values = {**DEFAULTS, **changes}
        self.of_tasks: dict[str, str | None] = {}
        self.conf = self.sparkContext = self

    def get(self, name: str) -> str:
        """Return a setting."""
        return self.values[name]

    def set(self, name: str, value: str) -> None:
        """Change a setting."""
        self.values[name] = value

    def getLocalProperty(self, name: str) -> str | None:
        """Return what tasks get."""
        return self.of_tasks.get(name)

    def setLocalProperty(self, name: str, value: str | None) -> None:
        """Change what tasks get."""
        self.of_tasks[name] = value


def limit(
    kinds: list[Any],
    *steps: Any,
    initial: InitialState | None = None,
    rows_max: str = "10000",
    bytes_max: str = DEFAULTS[BYTES_MAX],
) -> str:
    """Return the limit of an Arrow batch's size for an operator with input columns of these types."""
    session = Session({ROWS_MAX: rows_max, BYTES_MAX: bytes_max})
    schema = StructType([StructField(f"c{at}", kind) for at, kind in enumerate(kinds)])
    before = dict(session.values)
    operator = Operator("op", Totals(), ("c0",), schema, StructType(), {}, None, steps, initial=initial)
    with set_for(cast("SparkSession", session), operator):
        within, of_tasks = dict(session.values), dict(session.of_tasks)
    assert session.values == before
    assert of_tasks == {name: value for name, value in within.items() if value != before[name]}
    assert not any(session.of_tasks.values())
    assert within["spark.sql.adaptive.enabled"] == "false"
    return within[BYTES_MAX]


@pytest.mark.parametrize("kinds", [NUMBERS, MOMENTS, [IntegerType()] * 190])
def test_batches_of_short_rows_are_not_measured(kinds: list[DataType]) -> None:
    """If no batch can come near Spark's limit, Spark does not measure each row."""
    assert limit(kinds) == str((1 << 31) - 1)


@pytest.mark.parametrize(
    "kinds",
    [
        [IntegerType(), StringType()],
        [BinaryType()],
        [ArrayType(IntegerType())],
        [MapType(IntegerType(), IntegerType())],
        [StructType([StructField("a", IntegerType())])],
        [IntegerType()] * 200,
    ],
)
def test_rows_of_unbounded_length_are_measured(kinds: list[DataType]) -> None:
    """If values can have any length, or are many, the limit stays; the worker relies on it."""
    assert limit(kinds) == DEFAULTS[BYTES_MAX]


def test_limits_that_were_set_stay() -> None:
    """A limit set by the user stays; without a limit of rows the limit of bytes is needed."""
    assert limit(NUMBERS, bytes_max="1048576b") == "1048576b"
    assert limit(NUMBERS, rows_max="0") == limit(NUMBERS, rows_max="-1") == DEFAULTS[BYTES_MAX]
    assert limit(NUMBERS, rows_max="1000000") == DEFAULTS[BYTES_MAX]


def test_other_rows_in_the_job_keep_the_limit() -> None:
    """The input's schema shows neither the user's operations on the rows nor an initial state."""
    initial = InitialState(cast("DataFrame", None), ("k",))

    assert limit(NUMBERS, lambda frame: frame) == DEFAULTS[BYTES_MAX]
    assert limit(NUMBERS, initial=initial) == DEFAULTS[BYTES_MAX]
