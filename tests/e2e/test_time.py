"""
Timers without rows. Timers with rows are compared with Spark's own in `differential`.

A failure means that a key is forgotten until the next row of any key.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from backend_client import ChangelogStateBackend
from backend_client.progress import BatchProgress
from storage.errors import InvalidInputError
from tests.e2e.differential.history import CLOCK, SCHEMA, START_S, Event, Feed, History, Run
from tests.e2e.differential.reporting import OUTPUT
from tests.e2e.differential.time_processors import Buffered
from tests.e2e.support import Collected
from tests.waiting import wait_until

pytestmark = pytest.mark.spark


def test_timers_fire_without_rows_if_enabled(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> None:
    """With `idle_timers`, due timers fire without rows; a query's setting cannot be changed."""
    seen, feed = Collected(), Feed(tmp_path / "input")
    progress: list[BatchProgress] = []

    def start(**options: Any) -> Any:
        stream = spark.readStream.schema(SCHEMA).json(str(feed.folder)).withColumn("plan", F.lit("idle"))
        grouped = stream.withWatermark("t", "1 second").groupBy("plan", "k")
        backend = make_backend(on_progress=progress.append, **options)
        result = backend.transform_with_state(grouped, Buffered(), OUTPUT, "Update", "EventTime")
        return result.writeStream.option("checkpointLocation", str(tmp_path / "chk")).foreachBatch(seen).start()

    def fired() -> list[str]:
        rows = [row for batch in seen.batches.values() for row in batch]
        return [text for _, key, text in rows if key != CLOCK and "in order" in text]

    events = tuple(Event("a", 0, "x", 0, second) for second in (5, 8, 11))
    query = start(idle_timers=0.5)
    try:
        feed.put(History((Run((events,), 1),)).files(0)[0][0])
        # A batch's progress follows its output, and a stop in between would suppress it.
        fired_in = (START_S + 10) * 1000
        wait_until(
            lambda: query.exception() or any(batch.watermark_ms == fired_in for batch in progress), 120, "the timers"
        )
    finally:
        query.stop()
    assert sorted(fired()) == [f"('in order', {(START_S + second) * 1000}, 'x', 0)" for second in (5, 8)]
    assert {batch.watermark_ms for batch in progress} == {0, fired_in}
    with pytest.raises(InvalidInputError, match="was started with the option idle_timers"):
        start()
