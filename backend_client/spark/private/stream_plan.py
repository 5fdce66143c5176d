"""
What Spark's own execution of the running batch says of the watermark; the only user of these private interfaces.

The query's input may have stateful operators of Spark's own. Each has a watermark at its input, and puts out rows up to
another one, which Spark's plan knows. What stands behind them must count rows as late, and time as passed, by that.
Walking the plan is done here; what a node says is Spark's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from backend_client.source_watermark import PlanNode

logger = logging.getLogger("backend_client")

_T = TypeVar("_T")


class StreamPlan:
    """
    The execution of one query, batch by batch.

    Where a version of Spark does not have what is used here, answers are None, and the log says so once.

    Args:
        spark: The session that started the query.
        query_id: Returns the query's id.
    """

    def __init__(self, spark: SparkSession, query_id: Callable[[], str | None]) -> None:
        self._spark = spark
        self._query_id = query_id
        self._execution: Any = None
        self._is_stateless = False
        self._is_missing = False

    def tree(self) -> PlanNode | None:
        """Return the running batch's plan; None if it is unknown."""
        if self._is_stateless:
            return PlanNode()
        tree = self._asked(lambda execution: _Walk().tree(execution.lastExecution().executedPlan()))
        self._is_stateless = tree is not None and not tree.is_stateful
        return tree

    def next_watermark_ms(self) -> int | None:
        """
        Return the watermark that the running batch leads to, once all its rows were read; None if it is unknown.

        Spark's own tracker takes the batch into account, as it will again when the batch ends: what it has seen of
        each input, delays and the policy are its own. It only ever goes forward, so once is as good as twice.
        """

        def ask(execution: Any) -> int:
            tracker = execution.watermarkTracker()
            tracker.updateWatermark(execution.lastExecution().executedPlan())
            return int(tracker.currentWatermark())

        return self._asked(ask)

    def _asked(self, ask: Callable[[Any], _T]) -> _T | None:
        try:
            if self._execution is None:
                query: Any = self._spark.streams.get(str(self._query_id()))
                self._execution = query._jsq.streamingQuery()
            return ask(self._execution)
        except (Py4JError, PySparkException, AttributeError, TypeError) as error:
            if not self._is_missing:
                logger.warning(
                    "this version of Spark does not tell the watermark within a batch (%s): timers and windows that "
                    "the last rows make due wait for the next ones, and rows count as late one batch later",
                    error,
                )
            self._is_missing = True
            return None


class _Walk:
    """Makes a tree of a physical plan; which classes are stateful operators is asked once for each."""

    def __init__(self) -> None:
        self._stateful: dict[str, bool] = {}

    def tree(self, plan: Any) -> PlanNode:
        name, children = str(plan.nodeName()), plan.children()
        if name == "EventTimeWatermark":
            return PlanNode(gives=True)
        nodes = tuple(self.tree(children.apply(number)) for number in range(children.size()))
        if not self._is_stateful(str(plan.getClass().getName()), plan):
            return nodes[0] if len(nodes) == 1 else PlanNode(nodes)

        def lets_out(watermark_ms: int) -> int | None:
            output = plan.produceOutputWatermark(watermark_ms)
            return int(output.get()) if output.isDefined() else None

        def asks(watermark_ms: int) -> bool:
            return bool(plan.shouldRunAnotherBatch(watermark_ms))

        return PlanNode(nodes, lets_out=lets_out, asks=asks)

    def _is_stateful(self, name: str, plan: Any) -> bool:
        if name not in self._stateful:
            try:
                plan.produceOutputWatermark(0)
                self._stateful[name] = True
            except Py4JError as error:
                if "does not exist" not in str(error):
                    raise
                self._stateful[name] = False
        return self._stateful[name]
