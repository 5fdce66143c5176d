"""Rows that `foreach` writes in tasks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from backend_client.spark.output import spark_sinks
from backend_client.spark.output.spark_sinks import ForeachRows
from storage.errors import ConflictError


class Batch:
    """Runs a function on one partition, as Spark does with a DataFrame's."""

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
