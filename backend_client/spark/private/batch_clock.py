"""
The current time in steps behind an operator: the batch's own, as everywhere in a stream of Spark's.

Spark puts the time of its offsets entry in for ``current_timestamp()`` and its like where it plans a stream. Steps
behind an operator are planned for a batch, action by action, where the time is that of the action: two reads of one
batch would differ, and so would a batch that is executed again.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame

from backend_client.batch_time import BatchTime

_WITH_A_ZONE = ("CurrentDate", "LocalTimestamp")
_WITHOUT = ("CurrentTimestamp", "Now")


def at_batch_time(frame: DataFrame, offsets: str) -> DataFrame:
    """
    Return the frame with the time of a batch in place of the current one.

    Args:
        frame: Of the batch.
        offsets: Spark's offsets entry of the batch.

    Raises:
        CorruptDataError: The frame needs the time, and the entry is not as Spark writes it.
    """
    spark: Any = frame.sparkSession
    sql = spark._jvm.org.apache.spark.sql
    plan = frame._jdf.queryExecution().analyzed()
    if not plan.containsPattern(sql.catalyst.trees.TreePattern.CURRENT_LIKE()):
        return frame
    clock = _BatchClock(spark._jvm, BatchTime.read(offsets, None).timestamp_ms)
    fixed = plan.transformAllExpressionsWithSubqueries(clock)
    return DataFrame(sql.classic.Dataset.ofRows(spark._jsparkSession, fixed), spark)


class _BatchClock:
    """A partial function of Scala's: from expressions for the current time to the batch's."""

    def __init__(self, jvm: Any, timestamp_ms: int) -> None:
        self._jvm = jvm
        self._timestamp_ms = timestamp_ms

    def applyOrElse(self, expression: Any, default: Any) -> Any:
        """Return the time that an expression stands for, in its type; others are left to `default`."""
        kind = str(expression.getClass().getSimpleName())
        if kind in _WITH_A_ZONE:
            zone = expression.timeZoneId()
        elif kind in _WITHOUT:
            zone = self._jvm.scala.Option.apply("UTC")  # is not asked for
        else:
            return default.apply(expression)
        expressions = self._jvm.org.apache.spark.sql.catalyst.expressions
        return expressions.CurrentBatchTimestamp(self._timestamp_ms, expression.dataType(), zone).toLiteral()

    class Java:
        """What Java is to take it for."""

        implements = ("scala.PartialFunction",)
