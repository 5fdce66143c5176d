"""Rows that `foreach` writes in tasks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from backend_client.spark.output import apart, spark_sinks
from backend_client.spark.output.spark_sinks import ForeachRows
from storage.errors import ConflictError


class Batch:
    """Runs a function on one partition, as Spark does with a DataFrame's."""

    def __init__(self) -> None:
        self.sparkSession = SimpleNamespace(sparkContext=SimpleNamespace(getConf=dict))

    def foreachPartition(self, function: Any) -> None:
        """Run it."""
        function(iter([1, 2]))

    def localCheckpoint(self) -> Batch:
        """Return the rows, which are computed."""
        return self


@pytest.mark.parametrize(("at_most_once", "attempt", "written"), [(True, 0, True), (True, 1, False), (False, 1, True)])
def test_a_task_that_is_executed_again_writes_at_most_once(
    monkeypatch: pytest.MonkeyPatch, *, at_most_once: bool, attempt: int, written: bool
) -> None:
    """Spark repeats a failed task several times, and its first try may have written rows."""
    seen: list[int] = []
    context = SimpleNamespace(attemptNumber=lambda: attempt, partitionId=lambda: 0)
    monkeypatch.setattr(spark_sinks, "TaskContext", SimpleNamespace(get=lambda: context))
    released: list[int] = []
    application = SimpleNamespace(unpersistRDD=lambda number, _: released.append(number))
    blocks = SimpleNamespace(id=lambda: 7, sparkContext=lambda: application)
    monkeypatch.setattr(spark_sinks, "local_checkpoint", lambda _: blocks)
    shipments: Any = SimpleNamespace(parcel=lambda target: SimpleNamespace(unpack=lambda: target))
    write = ForeachRows(seen.append).shipped(shipments, at_most_once=at_most_once)
    batch: Any = Batch()
    if written:
        write(batch, 0)
    else:
        with pytest.raises(ConflictError, match=r"the task of partition 0 again: .* are not written twice"):
            write(batch, 0)
    assert seen == ([1, 2] if written else [])
    assert released == ([7] if at_most_once else [])


class Rows:
    """The rows of a batch of two partitions; each job is noted."""

    def __init__(self) -> None:
        self.jobs: list[list[int]] = []
        self.context = SimpleNamespace(runJob=self.run)

    def mapPartitions(self, function: Any) -> Rows:
        """Take the function."""
        self.function = function
        return self

    def getNumPartitions(self) -> int:
        """Return the number of partitions."""
        return 2

    def run(self, _: Rows, collect: Any, partitions: list[int]) -> Any:
        """Run a job."""
        self.jobs.append(partitions)
        return [collect(self.function(iter([number]))) for number in partitions]


def test_slow_tasks_get_no_second_attempt_at_most_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be refused, again and again, and end the query; Spark begins none at a job's only task."""
    seen: list[int] = []
    monkeypatch.setattr(spark_sinks, "speculates", lambda _: True)
    monkeypatch.setattr(apart, "inheritable_thread_target", lambda _: lambda work: work)
    monkeypatch.setattr(spark_sinks, "local_checkpoint", MagicMock())
    shipments: Any = SimpleNamespace(parcel=lambda target: SimpleNamespace(unpack=lambda: target))
    batch: Any = Batch()
    batch.rdd = Rows()
    ForeachRows(seen.append).shipped(shipments, at_most_once=True)(batch, 0)
    assert (sorted(seen), sorted(batch.rdd.jobs)) == ([0, 1], [[0], [1]])
