"""Which batches of a query count for the number of its partitions."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from backend_client.autoscaling import BUSY_BATCHES, COLD_BATCHES
from backend_client.progress import BatchProgress
from backend_client.settings import BackendSettings
from backend_client.spark.scaling.autoscaler import Autoscaler
from backend_client.spark.scaling.rescaling import Rescaling
from dstl_service.wire import OperatorInfo

BATCH = BatchProgress("job", 0, 10, 10, 10, 10.0, 0.0, 0.0, 0, 0, tries=1)
BUSY = replace(BATCH, state_ms=5000.0)


class Query:
    """A query of one operator with two partitions, without Spark; requests are kept."""

    def __init__(self) -> None:
        settings = BackendSettings("file:///tmp/s", "job", autoscale_batch_ms=1000.0, autoscale_max=8)
        last = SimpleNamespace(json=json.dumps({"sources": []}))
        streams = SimpleNamespace(get=lambda _: SimpleNamespace(lastProgress=last))
        spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=4), streams=streams)
        self.requests: list[tuple[str, int]] = []
        rescaling = Rescaling([OperatorInfo("one", 2, "", {})], 128, lambda *_: ())
        rescaling.request = lambda *request: self.requests.append(request)  # type: ignore[method-assign]
        self.autoscaler = Autoscaler(spark, lambda: "id", settings, 128, rescaling)
        self.run(*[BATCH] * (COLD_BATCHES + 1))

    def run(self, *batches: BatchProgress) -> list[tuple[str, int]]:
        """Finish these batches; return what was requested so far."""
        for batch in batches:
            self.autoscaler.after(batch)
        return self.requests


def test_busy_batches_get_more_partitions() -> None:
    """Batches that take too long without a loss double the partitions."""
    assert Query().run(*[BUSY] * BUSY_BATCHES) == [("one", 4)]


def test_batches_that_recover_from_a_loss_say_nothing() -> None:
    """More partitions help nobody who lacks a table; the batch that changes them would wait for all tables."""
    recovering = [replace(BUSY, rows_waiting=7), replace(BUSY, rows_lost=7), replace(BUSY, tries=2)]
    for batch in recovering:
        assert Query().run(*[batch] * (2 * BUSY_BATCHES)) == []
    runs_what_waited = Query()
    assert runs_what_waited.run(replace(BUSY, rows_waiting=7), *[BUSY] * BUSY_BATCHES) == []
    assert runs_what_waited.run(BUSY) == [("one", 4)]
