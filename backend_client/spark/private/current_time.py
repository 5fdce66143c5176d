"""
The current time in steps after an operator is the batch's, as in any Spark stream.

When Spark plans a stream, it replaces ``current_timestamp()`` and its relatives by the time in the offsets entry. Steps
after an operator are planned per batch and action, with the time of the action: two reads of one batch would differ,
and so would a batch that is executed again. Spark evaluates ``current_time()`` for each batch of a stream; here it is
the batch's time as well.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame

from backend_client.batch_time import BatchTime

_WITH_A_ZONE = ("CurrentDate", "LocalTimestamp")
_WITHOUT = ("CurrentTimestamp", "Now")
_OF_THE_DAY = "CurrentTime"


def at_batch_time(frame: DataFrame, offsets: str) -> DataFrame:
    """
    Return the frame with the current time replaced by the batch's.

    Args:
        frame: A frame of the batch.
        offsets: Spark's offsets entry of the batch.

    Raises:
        CorruptDataError: The frame uses the current time, and the entry does not have Spark's format.
    """
    spark: Any = frame.sparkSession
    # By its whole name: for each part of it, Py4J would look for a class in all jars.
    patterns = getattr(spark._jvm, "org.apache.spark.sql.catalyst.trees.TreePattern")
    plan = frame._jdf.queryExecution().analyzed()
    if not plan.containsPattern(patterns.CURRENT_LIKE()):
        return frame
    clock = _BatchClock(spark._jvm, BatchTime.read(offsets, None).timestamp_ms)
    fixed = plan.transformAllExpressionsWithSubqueries(clock)
    return DataFrame(spark._jvm.org.apache.spark.sql.classic.Dataset.ofRows(spark._jsparkSession, fixed), spark)


class _BatchClock:
    """A Scala partial function that maps current-time expressions to the batch's time."""

    def __init__(self, jvm: Any, timestamp_ms: int) -> None:
        self._jvm = jvm
        self._timestamp_ms = timestamp_ms

    def applyOrElse(self, expression: Any, default: Any) -> Any:
        """Return a current-time expression's value in its type; pass other expressions to `default`."""
        kind = str(expression.getClass().getSimpleName())
        if kind == _OF_THE_DAY:
            return self._time_of_day(expression)
        if kind in _WITH_A_ZONE:
            zone = expression.timeZoneId()
        elif kind in _WITHOUT:
            zone = self._jvm.scala.Option.apply("UTC")  # unused
        else:
            return default.apply(expression)
        expressions = self._jvm.org.apache.spark.sql.catalyst.expressions
        return expressions.CurrentBatchTimestamp(self._timestamp_ms, expression.dataType(), zone).toLiteral()

    def _time_of_day(self, expression: Any) -> Any:
        """Return the time of day in the expression's zone, truncated to its precision."""
        kind = expression.dataType()
        step_ms = 10 ** max(0, 3 - int(kind.precision()))
        moment = self._jvm.java.time.Instant.ofEpochMilli(self._timestamp_ms // step_ms * step_ms)
        time = moment.atZone(expression.zoneId()).toLocalTime()
        return self._jvm.org.apache.spark.sql.catalyst.expressions.Literal.create(time, kind)

    class Java:
        """The Java interface that Py4J exposes."""

        implements = ("scala.PartialFunction",)
