"""The time of a query's batches, as the rows of each operator have it: watermarks before, within and behind a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyspark.sql import SparkSession

from backend_client.batch_time import BatchTime, TimeMode
from backend_client.source_watermark import output_time, output_watermark_ms
from backend_client.spark.columnar_plan import ColumnarPlan
from backend_client.spark.private.session import setting
from backend_client.spark.private.stream_plan import StreamPlan
from backend_client.spark.query import Operator
from backend_client.spark.task.task import BatchContext
from dstl_service.wire import CheckpointInfo

_WITHOUT_DATA = "spark.sql.streaming.noDataMicroBatches.enabled"


class BatchTimes:
    """
    Asks Spark's plan of the running batch for what its offsets entry does not say.

    Args:
        spark: The session that started the query.
        query_id: Returns the query's id.
        operators: Those of the query.
    """

    def __init__(self, spark: SparkSession, query_id: Callable[[], str | None], operators: Sequence[Operator]) -> None:
        self._operators = operators
        self._plan = StreamPlan(spark, query_id)
        self._closes = setting(spark, _WITHOUT_DATA, "true").lower() == "true"

    def time(self, offsets: str, latest: CheckpointInfo | None) -> BatchTime | None:
        """Return a batch's time, which Spark wrote into its offsets entry; None if no operator asks for it."""
        if all(
            operator.time_mode is TimeMode.NONE and not isinstance(operator.processor, ColumnarPlan)
            for operator in self._operators
        ):
            return None
        closed_ms = latest.closed_ms if latest else None
        time = BatchTime.read(offsets, latest.offsets if latest else None, closed_ms)
        tree = self._plan.tree()
        return time if tree is None or not tree.is_stateful else output_time(tree, time)

    def closed_ms(self, time: BatchTime | None) -> tuple[int | None, int | None]:
        """
        Return the watermark at which the batch that was read is closed, and what it is behind the query's input.

        Both are None for a batch that is left open: where Spark runs one without data, which operators of its own ask
        for, and where it is told to run none.
        """
        if time is None or not self._closes:
            return None, None
        tree, next_ms = self._plan.tree(), self._plan.next_watermark_ms()
        if tree is None or next_ms is None:
            return None, None
        closed_ms = max(next_ms, time.watermark_ms)
        if not tree.is_stateful:
            return closed_ms, closed_ms
        return (None, None) if tree.asks_at(next_ms) else (closed_ms, output_watermark_ms(tree, closed_ms))

    def fires_first(self, operator: Operator, context: BatchContext) -> bool:
        """
        Say whether timers that are due fire before the rows.

        By event time they never do: the batch before was closed, or else Spark has run none between it and this one.
        By processing time there are batches without data all the time, which are not run here.
        """
        return operator.time_mode is TimeMode.PROCESSING and self._closes and not context.is_second_pass


def late_until_ms(operator: Operator, context: BatchContext) -> int | None:
    """
    Return up to which moment an operator's rows are late; None where they never are.

    As on Spark it is the watermark of the batch before: the batch's own where that was closed at it.
    """
    if context.time is None or operator.event_time is None:
        return None
    return context.time.previous_watermark_ms
