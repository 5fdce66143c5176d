"""Spark session settings while an operator's job runs; a user's function gets its session unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.types import BooleanType, DatetimeType, DayTimeIntervalType, NumericType, StructType

from backend_client.spark.private.session import setting
from backend_client.spark.query import Operator

# An operator's partitions are fixed, so adaptive execution has nothing to improve and would split one job into three.
_SETTINGS = {"spark.sql.adaptive.enabled": "false"}
_ROWS_MAX = "spark.sql.execution.arrow.maxRecordsPerBatch"
_BYTES_MAX = "spark.sql.execution.arrow.maxBytesPerBatch"
_BYTES_MAX_DEFAULT = 64 << 20
_UNLIMITED = str((1 << 31) - 1)
_FIXED_WIDTH = (BooleanType, NumericType, DatetimeType, DayTimeIntervalType)
_WIDTH_MAX = 16 + 1  # a decimal, and whether it is null


@contextmanager
def set_for(spark: SparkSession, operator: Operator) -> Iterator[None]:
    """Change a session's settings for an operator's job; restore them afterwards."""
    settings = dict(_SETTINGS)
    found = {name: setting(spark, name, "") for name in (*_SETTINGS, _BYTES_MAX)}
    # Steps and an initial state bring other rows into the same job; a limit that the user set stays.
    has_default = not operator.steps and operator.initial is None and found[_BYTES_MAX] == f"{_BYTES_MAX_DEFAULT}b"
    if has_default and _never_too_large(spark, operator.input_schema):
        settings[_BYTES_MAX] = _UNLIMITED
    # These settings only save time, so those that this version of Spark does not know are left out.
    before = {name: old for name in settings if (old := found[name]) and old != settings[name]}
    # The job that computes the output is no query of Spark, which would pass the settings on to its tasks.
    context: Any = spark.sparkContext
    of_tasks = {name: context.getLocalProperty(name) for name in before}
    for name in before:
        spark.conf.set(name, settings[name])
        context.setLocalProperty(name, settings[name])
    try:
        yield
    finally:
        for name, old in before.items():
            spark.conf.set(name, old)
            context.setLocalProperty(name, of_tasks[name])


def _never_too_large(spark: SparkSession, rows: StructType) -> bool:
    """
    Return whether Arrow batches of an operator's input stay below Spark's default limit, whatever their values.

    Spark recomputes a batch's size after every row, which takes as long as writing the rows.
    """
    values = 2 * len(rows) + 2  # with the key, which has at most all columns, and its order number
    is_fixed = all(isinstance(field.dataType, _FIXED_WIDTH) for field in rows)
    return is_fixed and 0 < int(setting(spark, _ROWS_MAX, "0")) * values * _WIDTH_MAX <= _BYTES_MAX_DEFAULT
