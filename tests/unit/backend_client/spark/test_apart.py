"""Jobs of a sink's slots: one for all, or one for each where Spark gives slow tasks a second attempt."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from backend_client.spark.driver.placement import slots_placer
from backend_client.spark.output import apart
from backend_client.spark.output.apart import run_apart
from backend_client.spark.places import hosts as places
from backend_client.spark.places.hosts import Hosts
from tests.waiting import wait_until

SPARK: Any = None


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How many threads are begun; they have no properties of Spark."""
    begun: list[str] = []

    class Thread(threading.Thread):
        def start(self) -> None:
            begun.append(self.name)
            super().start()

    monkeypatch.setattr(apart, "inheritable_thread_target", lambda _: lambda work: work)
    monkeypatch.setattr(threading, "Thread", Thread)
    return begun


def test_jobs_run_side_by_side(threads: list[str]) -> None:
    """None waits for another one; a single one needs no thread, and many have few."""
    gate = threading.Barrier(3)

    def together() -> int:
        return gate.wait(30)

    assert sorted(run_apart(SPARK, [together] * 3)) == [0, 1, 2]
    assert len(threads) == 3
    assert run_apart(SPARK, [lambda: 7]) == [7]
    assert len(threads) == 3
    assert run_apart(SPARK, [lambda: 7] * 100) == [7] * 100
    assert len(threads) < 100


def test_a_failed_job_is_told_when_all_have_ended() -> None:
    """Otherwise the next try would begin beside a job that still publishes."""
    ended: list[int] = []
    both_run = threading.Barrier(2)

    def fail() -> None:
        both_run.wait(30)
        raise RuntimeError("refused")

    def end_later() -> None:
        both_run.wait(30)
        wait_until(lambda: len([one for one in threading.enumerate() if one.name == "dstl-job-apart"]) < 2, what="it")
        ended.append(1)

    with pytest.raises(RuntimeError, match="refused"):
        run_apart(SPARK, [fail, end_later])
    assert ended == [1]


def test_no_job_begins_after_an_error() -> None:
    """A query that is stopped, or whose function has failed, would go on for all its partitions."""
    begun: list[int] = []

    def fail() -> None:
        begun.append(1)
        raise RuntimeError("cancelled")

    with pytest.raises(RuntimeError, match="cancelled"):
        run_apart(SPARK, [fail] * 1000)
    assert len(begun) <= 32


def test_jobs_that_did_not_run_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """S61: a thread that gets no connection to Spark ends before its job; its slot must not count as published."""
    monkeypatch.setattr(apart, "inheritable_thread_target", lambda _: lambda _: lambda: None)
    with pytest.raises(RuntimeError, match="2 of 2 Spark jobs did not run"):
        run_apart(SPARK, [lambda: 1, lambda: 2])


@pytest.mark.parametrize(("speculates", "expected"), [("TRUE", ["0", "1"]), ("false", ["both"]), (None, ["both"])])
def test_each_slot_has_a_job_where_spark_speculates(speculates: str | None, expected: list[str]) -> None:
    """A second attempt at a slot fences the first one; Spark begins none at a job's only task."""
    found: Any = SimpleNamespace(anchor=lambda _: "both", anchors_apart=lambda slots: [str(at) for at in range(slots)])
    spark: Any = MagicMock()
    spark.sparkContext.getConf().get = lambda _, default: speculates or default
    placed: Any = slots_placer(spark, found)(2)
    assert placed == expected


def test_a_slot_that_is_alone_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its task prefers the executor that the partition of its number has."""
    monkeypatch.setattr(places, "executor_addresses", lambda _: "a b")
    monkeypatch.setattr(places, "executor_ids", lambda _: frozenset(("0", "1")))
    monkeypatch.setattr(places, "executors_at", lambda *_: [("0", "a", 1), ("1", "b", 1)])
    named: list[Any] = []

    def located(frame: Any, where: Any) -> Any:
        named.append(where)
        return frame

    monkeypatch.setattr(places, "located", located)
    monkeypatch.setattr(places, "F", MagicMock())
    spark: Any = MagicMock()
    hosts = Hosts(spark, keeps_copies=False)
    frames = hosts.anchors_apart(2)
    together, *apart = named
    assert (len(frames), together) == (2, [places_ for (places_,) in apart])
    assert together[0] != together[1]
    assert hosts.anchors_apart(2) is frames
