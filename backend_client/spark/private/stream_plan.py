"""
Reads watermarks from Spark's own execution of the running batch; the only user of these private interfaces.

The query's input may contain Spark's own stateful operators. Each has a watermark at its input and emits rows up to
another one, which Spark's plan knows; operators after it must judge lateness and time by that one. This module walks
the plan; the nodes' answers are Spark's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from backend_client.source_watermark import PlanNode

logger = logging.getLogger("backend_client")

_T = TypeVar("_T")


_STATEFUL = frozenset(
    {
        "Aggregate",
        "Deduplicate",
        "DeduplicateWithinWatermark",
        "Distinct",
        "FlatMapGroupsInPandasWithState",
        "FlatMapGroupsWithState",
        "GlobalLimit",
        "TransformWithState",
        "TransformWithStateInPandas",
        "TransformWithStateInPySpark",
    }
)
"""Spark's logical operators that have state if they read a stream; so has a join of two streams."""


def stateful_operators(frame: DataFrame) -> list[str]:
    """Return the names of Spark's own operators with state in a streaming DataFrame's plan, from the top down."""
    found: list[str] = []
    seen: Any = frame
    nodes = [seen._jdf.queryExecution().analyzed()]
    while nodes:
        node = nodes.pop()
        name, children = str(node.nodeName()), node.children()
        inputs = [children.apply(number) for number in range(children.size())]
        streams = [child for child in inputs if child.isStreaming()]
        if (name in _STATEFUL and streams) or (name == "Join" and len(streams) > 1):
            found.append(name)
        nodes += reversed(streams)
    return found


class StreamPlan:
    """
    The execution of one query, batch by batch.

    If a version of Spark lacks these interfaces, answers are None, and the log says so once.

    Args:
        spark: The session that started the query.
        query_id: Returns the query's id.
    """

    def __init__(self, spark: SparkSession, query_id: Callable[[], str | None]) -> None:
        self._spark = spark
        self._query_id = query_id
        self._execution: Any = None
        self._is_stateless = False
        self._delays_ms: tuple[int, ...] | None = None
        self._is_missing = False

    def tree(self) -> PlanNode | None:
        """Return the running batch's plan; None if it is unknown."""
        if self._is_stateless:
            return PlanNode()
        tree = self._asked(lambda execution: _tree(execution.lastExecution().executedPlan(), {}))
        self._is_stateless = tree is not None and not tree.is_stateful
        return tree

    def delays_ms(self) -> tuple[int, ...]:
        """Return the delay in ms of each watermark of the query; none if it is unknown."""
        if self._delays_ms is None:

            def ask(execution: Any) -> tuple[int, ...]:
                plan = execution.lastExecution().executedPlan()
                return tuple(int(node.delayMs()) for node in _watermarks(plan, as_planned=True))

            self._delays_ms = self._asked(ask)
        return self._delays_ms or ()

    def watermark_ms(self, delay_ms: int) -> int | None:
        """Return what `next_watermark_ms` would with another delay, of a query with one watermark."""

        def ask(execution: Any) -> int:
            batch = execution.lastExecution()
            found = [node.eventTimeStats().value() for node in _watermarks(batch.executedPlan())]
            newest_ms = [int(times.max()) - delay_ms for times in found if times.count()]
            return max([int(batch.offsetSeqMetadata().batchWatermarkMs()), *newest_ms])

        return self._asked(ask)

    def next_watermark_ms(self) -> int | None:
        """
        Return the watermark in ms that the running batch leads to, after all its rows were read; None if unknown.

        Spark's own tracker, with its inputs, delays and policy, counts the batch here and again when the batch ends.
        The watermark only moves forward, so counting twice is harmless.
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
                    "this version of Spark does not expose the watermark within a batch (%s): timers and windows that "
                    "the last rows make due wait for the next rows, and rows count as late one batch later",
                    error,
                )
            self._is_missing = True
            return None


def _tree(plan: Any, stateful: dict[str, bool]) -> PlanNode:
    """Build a tree from a physical plan; `stateful` says which classes are stateful operators, as far as known."""
    name, children = str(plan.nodeName()), plan.children()
    if name == "EventTimeWatermark":
        return PlanNode(gives=True)
    nodes = tuple(_tree(children.apply(number), stateful) for number in range(children.size()))
    kind = str(plan.getClass().getName())
    if kind not in stateful:
        stateful[kind] = _is_stateful(plan)
    if not stateful[kind]:
        return nodes[0] if len(nodes) == 1 else PlanNode(nodes)

    def lets_out(watermark_ms: int) -> int | None:
        output = plan.produceOutputWatermark(watermark_ms)
        return int(output.get()) if output.isDefined() else None

    def asks(watermark_ms: int) -> bool:
        return bool(plan.shouldRunAnotherBatch(watermark_ms))

    return PlanNode(nodes, lets_out=lets_out, asks=asks)


def _watermarks(plan: Any, *, as_planned: bool = False) -> Iterator[Any]:
    """
    Yield the nodes of a physical plan that give watermarks.

    Spark executes an input that shuffles rows, or joins a static table, adaptively: in stages that hide their nodes,
    and without those parts that turn out to have no rows.

    Args:
        plan: The plan.
        as_planned: Yield the nodes with which Spark began, the same in each batch, instead of those that it executed.
    """
    name = str(plan.nodeName())
    if name == "EventTimeWatermark":
        yield plan
    if name == "AdaptiveSparkPlan":
        yield from _watermarks(plan.initialPlan() if as_planned else plan.executedPlan(), as_planned=as_planned)
    elif name.endswith("QueryStage"):
        yield from _watermarks(plan.plan(), as_planned=as_planned)
    children = plan.children()
    for number in range(children.size()):
        yield from _watermarks(children.apply(number), as_planned=as_planned)


def _is_stateful(plan: Any) -> bool:
    try:
        plan.produceOutputWatermark(0)
    except Py4JError as error:
        if "does not exist" not in str(error):
            raise
        return False
    return True
