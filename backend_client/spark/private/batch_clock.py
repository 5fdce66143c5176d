"""
The current time in steps behind an operator: the batch's own, as everywhere in a stream of Spark's.

Spark puts the time of its offsets entry in for ``current_timestamp()`` and its like where it plans a stream. Steps
behind an operator are planned for a batch, action by action, where the time is that of the action: two reads of one
batch would differ, and so would a batch that is executed again. ``current_time()`` Spark reads anew for each batch of a
stream; here it is the batch's as well.
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
        if kind == _OF_THE_DAY:
            return self._time_of_day(expression)
        if kind in _WITH_A_ZONE:
            zone = expression.timeZoneId()
        elif kind in _WITHOUT:
            zone = self._jvm.scala.Option.apply("UTC")  # is not asked for
        else:
            return default.apply(expression)
        expressions = self._jvm.org.apache.spark.sql.catalyst.expressions
        return expressions.CurrentBatchTimestamp(self._timestamp_ms, expression.dataType(), zone).toLiteral()

    def _time_of_day(self, expression: Any) -> Any:
        """Return it in the expression's zone, cut to its number of digits behind the second."""
        kind = expression.dataType()
        step_ms = 10 ** max(0, 3 - int(kind.precision()))
        moment = self._jvm.java.time.Instant.ofEpochMilli(self._timestamp_ms // step_ms * step_ms)
        time = moment.atZone(expression.zoneId()).toLocalTime()
        return self._jvm.org.apache.spark.sql.catalyst.expressions.Literal.create(time, kind)

    class Java:
        """What Java is to take it for."""

        implements = ("scala.PartialFunction",)
