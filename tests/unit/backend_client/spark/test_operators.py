"""Invalid declarations of operators."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import ArrayType, LongType, MapType, StringType, StructField, StructType, TimestampType

from backend_client.columnar import Aggregate
from backend_client.spark.api.operators import OperatorInput, TransformOptions, columnar_operator, row_operator
from backend_client.spark.query import Query
from storage.errors import InvalidInputError
from tests.support.processors import SilentProcessor


def test_class_instead_of_processor_is_refused() -> None:
    """A class in place of a processor is refused with the fix; its `init` would fail because `self` is missing."""
    nothing: Any = None

    with pytest.raises(InvalidInputError, match="is the class StatefulProcessor; give an object"):
        # A class where an object is expected.
        row_operator(nothing, TransformOptions(StatefulProcessor, "a long", "Update", "None"))  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="is the class Aggregate"):
        # A class where an object is expected.
        columnar_operator(nothing, Aggregate, None, "Update", name=None, parallelism=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schema", "mode", "time", "told"),
    [
        (["name"], "Update", "None", r"outputStructType must be a StructType or text .* not \['name'\]"),
        (None, "Update", "None", "outputStructType must be a StructType or text"),
        (StructType().add("a", LongType()).add("a", LongType()), "Update", "None", "the column 'a' more than once"),
        ("a long", None, "None", "outputMode must be 'Update' or 'Append', not None"),
        ("a long", "Update", 5, "timeMode must be 'None', 'ProcessingTime' or 'EventTime', not 5"),
    ],
)
def test_argument_of_another_type_is_refused(schema: Any, mode: Any, time: Any, told: str) -> None:
    """The error names the argument, and what it may be."""
    given: Any = SimpleNamespace(check_name=lambda _: None)

    with pytest.raises(InvalidInputError, match=told):
        row_operator(given, TransformOptions(SilentProcessor(), schema, mode, time))


def test_output_may_be_null_at_every_depth() -> None:
    """As on Spark: where a schema denied nulls, Spark would optimize conditions on them away, or fail on one."""
    inner = StructType([StructField("x", LongType(), False)])
    fields = [
        ("k", StringType()),
        ("s", inner),
        ("a", ArrayType(inner, False)),
        ("m", MapType(StringType(), inner, False)),
    ]
    schema = StructType([StructField(name, kind, False, {"of": name}) for name, kind in fields])
    query = SimpleNamespace(steps=(), operators=())
    given: Any = SimpleNamespace(check_name=lambda _: None, schema=schema, key_columns=("k",), query=query)

    operator = row_operator(given, TransformOptions(SilentProcessor(), schema, "Update", "None"))

    inner = StructType([StructField("x", LongType())])
    fields = [("k", StringType()), ("s", inner), ("a", ArrayType(inner)), ("m", MapType(StringType(), inner))]
    assert operator.output_schema == StructType([StructField(name, kind, True, {"of": name}) for name, kind in fields])


def test_event_time_without_a_watermark_causes_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The next operator's input has the mark, and would wait for a watermark that never comes, without a word."""
    for delay in ({}, {"spark.watermarkDelayMs": 5000}):
        schema = StructType([StructField("k", StringType()), StructField("at", TimestampType(), True, delay)])
        output = StructType([StructField("at", TimestampType())])
        options = TransformOptions(SilentProcessor(), output, "Update", "None", eventTimeColumnName="at")
        row_operator(OperatorInput(Query(None, (), (), None), schema, ("k",)), options)  # type: ignore[arg-type]

    [record] = caplog.records
    assert "eventTimeColumnName 'at', but no column of its input has a watermark" in record.getMessage()


def test_columns_of_one_name_are_told() -> None:
    """Spark could not tell them apart; its error came with the first batch."""
    schema = StructType([StructField("k", StringType()), StructField("v", LongType()), StructField("v", StringType())])
    query: Any = SimpleNamespace(spark=SimpleNamespace(conf={}), operators=())

    with pytest.raises(
        InvalidInputError, match=r"the input of operator 'x' has several columns of one name: v, v. Ren"
    ):
        OperatorInput(query, schema, ("k",)).check_name("x")
