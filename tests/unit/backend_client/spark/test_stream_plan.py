"""Queries of Spark's own execution, tested with fake plans; real ones are in the end-to-end tests."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JError

from backend_client.spark.private.stream_plan import StreamPlan

BEFORE_MS = 100
"""The watermark before the batch."""


class Nodes(list["Node"]):
    """Children in Scala's form."""

    def size(self) -> int:
        return len(self)

    def apply(self, number: int) -> Node:
        return self[number]


class Node:
    """A node of a physical plan; a stateful one has an output watermark `keeps_back_ms` before that of its input."""

    def __init__(
        self,
        name: str,
        *children: Node,
        keeps_back_ms: int | None = None,
        delay_ms: int = 0,
        times_ms: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.delayMs = lambda: delay_ms
        found = SimpleNamespace(count=lambda: len(times_ms), max=lambda: max(times_ms, default=-(2**63)))
        self.eventTimeStats = lambda: SimpleNamespace(value=lambda: found)
        self.initialPlan = self.executedPlan = self.plan = lambda: self
        self._children = Nodes(children)
        self._keeps_back_ms = keeps_back_ms

    def nodeName(self) -> str:
        return self.name

    def children(self) -> Nodes:
        return self._children

    def getClass(self) -> Any:
        return SimpleNamespace(getName=lambda: f"org.apache.spark.{self.name}Exec")

    def produceOutputWatermark(self, watermark_ms: int) -> Any:
        if self._keeps_back_ms is None:
            raise Py4JError("Method produceOutputWatermark([class java.lang.Integer]) does not exist")
        return SimpleNamespace(isDefined=lambda: True, get=lambda: watermark_ms - self._keeps_back_ms)


class Tracker:
    """Spark's tracker, which knows a new watermark after it got a plan."""

    def __init__(self, watermark_ms: int) -> None:
        self._next_ms = watermark_ms
        self._current_ms = 0

    def updateWatermark(self, plan: Node) -> None:
        self._current_ms = self._next_ms

    def currentWatermark(self) -> int:
        return self._current_ms


def stream_plan(node: Node | None, watermark_ms: int = 0) -> StreamPlan:
    """Return the plan of a query; without a node, that of a Spark version without the needed interfaces."""
    execution = SimpleNamespace()
    if node is not None:
        metadata = SimpleNamespace(batchWatermarkMs=lambda: BEFORE_MS)
        batch = SimpleNamespace(executedPlan=lambda: node, offsetSeqMetadata=lambda: metadata)
        execution.lastExecution = lambda: batch
        execution.watermarkTracker = lambda: Tracker(watermark_ms)
    query = SimpleNamespace(_jsq=SimpleNamespace(streamingQuery=lambda: execution))
    spark: Any = SimpleNamespace(streams=SimpleNamespace(get={"id": query}.__getitem__))
    return StreamPlan(spark, lambda: "id")


def watermarked(delay_ms: int = 0, times_ms: Sequence[int] = ()) -> Node:
    """Return an input with a watermark, of which rows with these times are read; below it nothing matters."""
    return Node("EventTimeWatermark", Node("Scan"), delay_ms=delay_ms, times_ms=times_ms)


def test_stateful_operators_are_found() -> None:
    """Stateful operators are recognised by their methods, anywhere in the plan."""
    join = Node("StreamingSymmetricHashJoin", watermarked(), Node("Filter", watermarked()), keeps_back_ms=30)
    tree = stream_plan(Node("Union", Node("Project", join), watermarked())).tree()

    assert tree is not None
    assert tree.is_stateful
    assert tree.output_ms(100) == 70


def test_plan_without_state() -> None:
    """An input without stateful operators is reported as such."""
    tree = stream_plan(Node("Project", watermarked())).tree()

    assert tree is not None
    assert not tree.is_stateful


def test_next_watermark_is_the_trackers() -> None:
    """The next watermark is the one that Spark's tracker reports for the batch."""
    assert stream_plan(watermarked(), 120).next_watermark_ms() == 120


def test_delays_of_all_watermarks() -> None:
    """An input may have one, wherever it is in the plan."""
    plan = Node("Union", Node("Scan"), Node("Project", watermarked(5)), watermarked(7))
    assert stream_plan(plan).delays_ms() == (5, 7)
    assert stream_plan(Node("Union", Node("Scan"), Node("Scan"))).delays_ms() == ()


def adaptive(planned: Node, executed: Node) -> Node:
    """Return a plan that Spark executes adaptively: its nodes and those of its stages are no children."""
    node = Node("AdaptiveSparkPlan")
    node.initialPlan = lambda: planned
    node.executedPlan = lambda: executed
    return node


def stage(plan: Node) -> Node:
    """Return a stage of such a plan."""
    node = Node("ShuffleQueryStage")
    node.plan = lambda: plan
    return node


def test_watermarks_of_an_adaptive_plan() -> None:
    """I14: all watermarks of a query are known in each batch, also in one that Spark executes without some."""
    one, other = watermarked(5, [120]), watermarked(7)
    planned = Node("Union", Node("Exchange", one), Node("Exchange", other))
    plan = stream_plan(adaptive(planned, Node("Union", stage(Node("Exchange", one)))))
    empty = stream_plan(adaptive(Node("Exchange", one), Node("LocalTableScan")))

    assert plan.delays_ms() == (5, 7)
    assert plan.watermark_ms(15) == 105
    assert empty.delays_ms() == (5,)
    assert empty.watermark_ms(15) == BEFORE_MS


@pytest.mark.parametrize(("times_ms", "expected"), [((130, 150, 140), 130), ((110,), BEFORE_MS), ((), BEFORE_MS)])
def test_watermark_with_another_delay(times_ms: Sequence[int], expected: int) -> None:
    """It is that of the newest row, and never goes back, whatever the delay of the plan is."""
    plan = stream_plan(Node("Project", watermarked(5, times_ms)))
    assert plan.watermark_ms(20) == expected


def test_other_versions_of_spark(caplog: pytest.LogCaptureFixture) -> None:
    """If Spark lacks these interfaces, that is logged once, and everything else works."""
    plan = stream_plan(None)

    assert plan.tree() is None
    assert plan.next_watermark_ms() is None
    assert plan.delays_ms() == ()
    assert plan.watermark_ms(5) is None
    assert len(caplog.records) == 1
    assert "does not expose the watermark within a batch" in caplog.text
