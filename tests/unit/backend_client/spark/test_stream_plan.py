"""Queries of Spark's own execution, tested with fake plans; real ones are in the end-to-end tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JError

from backend_client.spark.private.stream_plan import StreamPlan


class Nodes(list["Node"]):
    """Children in Scala's form."""

    def size(self) -> int:
        return len(self)

    def apply(self, number: int) -> Node:
        return self[number]


class Node:
    """A node of a physical plan; a stateful one has an output watermark `keeps_back_ms` before that of its input."""

    def __init__(self, name: str, *children: Node, keeps_back_ms: int | None = None) -> None:
        self.name = name
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
        execution.lastExecution = lambda: SimpleNamespace(executedPlan=lambda: node)
        execution.watermarkTracker = lambda: Tracker(watermark_ms)
    query = SimpleNamespace(_jsq=SimpleNamespace(streamingQuery=lambda: execution))
    spark: Any = SimpleNamespace(streams=SimpleNamespace(get={"id": query}.__getitem__))
    return StreamPlan(spark, lambda: "id")


def watermarked() -> Node:
    """Return an input with a watermark, below which nothing matters."""
    return Node("EventTimeWatermark", Node("Scan"))


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


def test_queries_with_and_without_a_watermark() -> None:
    """One input may have it, wherever it is in the plan."""
    assert stream_plan(Node("Union", Node("Scan"), Node("Project", watermarked()))).has_watermark()
    assert not stream_plan(Node("Union", Node("Scan"), Node("Scan"))).has_watermark()


def test_other_versions_of_spark(caplog: pytest.LogCaptureFixture) -> None:
    """If Spark lacks these interfaces, that is logged once, and everything else works."""
    plan = stream_plan(None)

    assert plan.tree() is None
    assert plan.next_watermark_ms() is None
    assert not plan.has_watermark()
    assert len(caplog.records) == 1
    assert "does not expose the watermark within a batch" in caplog.text
