"""The time of a query's batches, as each operator's rows see it: watermarks before, during and after a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyspark.sql import SparkSession

from backend_client.batch_time import BatchTime, TimeMode
from backend_client.source_watermark import PlanNode, output_time, output_watermark_ms
from backend_client.spark.batch import BatchContext
from backend_client.spark.columnar_plan import ColumnarPlan
from backend_client.spark.private.session import setting
from backend_client.spark.private.stream_plan import StreamPlan
from backend_client.spark.query import Operator
from dstl_service.wire import CheckpointInfo

_WITHOUT_DATA = "spark.sql.streaming.noDataMicroBatches.enabled"


class BatchTimes:
    """
    Reads from Spark's plan of the running batch what its offsets entry does not contain.

    Args:
        spark: The session that started the query.
        query_id: Returns the query's id.
        operators: The query's operators.
    """

    def __init__(self, spark: SparkSession, query_id: Callable[[], str | None], operators: Sequence[Operator]) -> None:
        self._operators = operators
        self._plan = StreamPlan(spark, query_id)
        self._closes = setting(spark, _WITHOUT_DATA, "true").lower() == "true"

    def time(self, offsets: str, latest: CheckpointInfo | None) -> BatchTime | None:
        """Return a batch's time, which Spark wrote into its offsets entry; None if no operator uses it."""
        if all(
            operator.time_mode is TimeMode.NONE and not isinstance(operator.processor, ColumnarPlan)
            for operator in self._operators
        ):
            return None
        closed_ms = latest.closed_ms if latest else None
        time = BatchTime.read(offsets, latest.offsets if latest else None, closed_ms)
        tree = self._plan.tree()
        return time if tree is None or not tree.is_stateful else output_time(tree, time)

    def closed_ms(self, time: BatchTime | None, delay_ms: int | None = None) -> tuple[int | None, int | None]:
        """
        Return the watermark in ms that closes the batch just read, and the same as seen after the query's input plan.

        Both are None for a batch that is left open: Spark's own operators ask for a batch without data, or Spark is
        configured to run none.

        Args:
            time: The batch's time.
            delay_ms: The delay to assume in place of that of the query's only watermark.
        """
        if time is None or not self._closes:
            return None, None
        tree = self._plan.tree()
        next_ms = self._plan.next_watermark_ms() if delay_ms is None else self._plan.watermark_ms(delay_ms)
        if tree is None or next_ms is None:
            return None, None
        if tree.is_stateful and tree.asks_at(next_ms):
            return None, None
        return self.seen_ms(max(next_ms, time.watermark_ms), tree)

    def seen_ms(self, closed_ms: int | None, tree: PlanNode | None = None) -> tuple[int | None, int | None]:
        """Return a watermark that closes the batch just read, and the same as seen after `tree`, the query's input."""
        tree = tree or self._plan.tree()
        if closed_ms is None or tree is None or not tree.is_stateful:
            return closed_ms, closed_ms
        return closed_ms, output_watermark_ms(tree, closed_ms)

    def delays_ms(self) -> tuple[int, ...]:
        """Return the delay in ms of each of the query's watermarks, at which its batches are closed."""
        return self._plan.delays_ms()

    def fires_first(self, operator: Operator, context: BatchContext) -> bool:
        """
        Return whether due timers fire before the rows.

        In event time they never do: the batch before was closed, or Spark ran no batch between it and this one. In
        processing time Spark's own operator would run batches without data all the time, which do not run here.
        """
        return operator.time_mode is TimeMode.PROCESSING and self._closes and not context.is_second_pass


def late_until_ms(operator: Operator, context: BatchContext) -> int | None:
    """
    Return the moment in ms up to which an operator's rows are late; None if no row is.

    As in Spark, it is the watermark of the batch before; the batch's own if the batch before was closed at it.
    """
    if context.time is None or operator.event_time is None:
        return None
    return context.time.previous_watermark_ms
