"""What Spark's session is set to while an operator's job is planned; a user's function gets its session as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession
from pyspark.sql.types import BooleanType, DatetimeType, DayTimeIntervalType, NumericType, StructType

from backend_client.spark.private.session import setting
from backend_client.spark.query import Operator

# An operator's partitions are given, so adaptive execution finds nothing to improve, and it would make three jobs of
# one.
_SETTINGS = {"spark.sql.adaptive.enabled": "false"}
_ROWS_MAX = "spark.sql.execution.arrow.maxRecordsPerBatch"
_BYTES_MAX = "spark.sql.execution.arrow.maxBytesPerBatch"
_BYTES_MAX_DEFAULT = 64 << 20
_UNLIMITED = str((1 << 31) - 1)
_FIXED_WIDTH = (BooleanType, NumericType, DatetimeType, DayTimeIntervalType)
_WIDTH_MAX = 16 + 1  # a decimal, and whether it is null


@contextmanager
def set_for(spark: SparkSession, operator: Operator) -> Iterator[None]:
    """Set a session for an operator's job."""
    settings = dict(_SETTINGS)
    # Steps and an initial state bring other rows into the same job.
    if not operator.steps and operator.initial is None and _never_too_large(spark, operator.input_schema):
        settings[_BYTES_MAX] = _UNLIMITED
    # They only save time: what this version of Spark does not know is left out.
    before = {name: old for name in settings if (old := setting(spark, name, ""))}
    for name in before:
        spark.conf.set(name, settings[name])
    try:
        yield
    finally:
        for name, old in before.items():
            spark.conf.set(name, old)


def _never_too_large(spark: SparkSession, rows: StructType) -> bool:
    """
    Say whether Arrow batches of an operator's input are shorter than Spark's default limit, whatever is in them.

    Spark adds up the size of a batch behind every row, which takes as long as writing the rows. A limit that somebody
    has set stays.
    """
    if setting(spark, _BYTES_MAX, "") != f"{_BYTES_MAX_DEFAULT}b":
        return False
    values = 2 * len(rows) + 2  # with the key, which is not more than all columns, and its order
    is_fixed = all(isinstance(field.dataType, _FIXED_WIDTH) for field in rows)
    return is_fixed and 0 < int(setting(spark, _ROWS_MAX, "0")) * values * _WIDTH_MAX <= _BYTES_MAX_DEFAULT
