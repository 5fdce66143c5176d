"""
Timers and ends of values in tables that are materialized while the query runs, and lost between its runs.

A failure means that a table which comes from a snapshot and the log behind it has lost, doubled or revived something
that an undisturbed table has.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

from backend_client import ChangelogStateBackend
from tests.e2e.support import Collected, materializations, run_to_end, stored_state
from tests.e2e.test_states import WhenStored
from tests.e2e.test_time import OUTPUT, Feed, Scripted, scripted_files

pytestmark = pytest.mark.e2e

HOUR_MS = 3_600_000


class Ending(StatefulProcessor):
    """Writes states that live for a millisecond or an hour, and sets a timer for the next batch and one for later."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.brief = handle.getValueState("brief", "result string", 1)
        self.briefs = handle.getMapState("briefs", "result string", "n long", 1)
        self.kept = handle.getListState("kept", "result string", HOUR_MS)
        self.forever = handle.getValueState("forever", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        seen = [self.brief.get(), len(list(self.briefs.iterator())), sorted(text for (text,) in self.kept.get())]
        texts = sorted(row.result for row in rows)
        for text in texts:
            self.brief.update((text,))
            self.briefs.updateValue((text,), (1,))
            self.kept.appendValue((text,))
        count = (self.forever.get() or (0,))[0] + 1
        self.forever.update((count,))
        for after_ms in (1, HOUR_MS):
            self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + after_ms)
        yield Row(k=key[0], result=json.dumps([texts, *seen, count, len(list(self.handle.listTimers()))]))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(k=key[0], result=f"expired {self.brief.get()} {len(list(self.handle.listTimers()))}")

    def close(self) -> None:
        pass


def test_timers_and_ends_come_back_from_snapshots(
    spark: SparkSession,
    make_backend: Callable[..., ChangelogStateBackend],
    tmp_path: Path,
    local_dir: Path,
    always_materialized: None,
) -> None:
    """
    I13, I14: what tables from snapshots and log put out is what undisturbed ones put out, batch by batch.

    Two operators in a chain, one with event-time timers, one with timers and TTL by processing time. Tables and sidecar
    are lost while timers are pending in both, and the parallelism changes.
    """
    files = scripted_files(seed=9, files=7)

    def run(job: str, feed: Feed, parallelism: int, collected: Collected) -> str:
        backend = make_backend(job=job, storage=f"file://{tmp_path / job}", parallelism=parallelism)
        grouped = feed.stream().withWatermark("t", "5 seconds").groupBy("k")
        timers = backend.transform_with_state(grouped, Scripted(), OUTPUT, "Update", "EventTime")
        ends = backend.transform_with_state(
            timers.groupBy("k"), Ending(), "k string, result string", "Update", "ProcessingTime"
        )
        run_to_end(ends.writeStream.outputMode("update"), tmp_path / f"{job}-checkpoint", collected)
        os.kill(int(Path(backend.embedded_service.pid_path).read_text()), signal.SIGKILL)
        return backend.settings.storage

    disturbed, feed = WhenStored(local_dir), Feed(spark, tmp_path / "disturbed-in")
    for part, parallelism in ((files[:4], 2), (files[4:], 3)):
        for rows in part:
            feed.put(rows)
        url = run("job", feed, parallelism, disturbed)
        assert {handle.operator for handle in materializations(url)} == {"Scripted", "Ending"}
        shutil.rmtree(local_dir / "tables")
    undisturbed, feed = Collected(), Feed(spark, tmp_path / "undisturbed-in")
    for rows in files:
        feed.put(rows)
    other_url = run("other", feed, 2, undisturbed)

    assert disturbed.batches == undisturbed.batches
    # What was pending when the tables were lost came afterwards: by processing time at once, by event time in the end.
    assert any(result.startswith("expired") for _, result in disturbed.batches[4])
    assert any('["[\\"expired' in result for batch_id in (4, 5, 6) for _, result in disturbed.batches[batch_id])
    entries = [len(stored_state(*where, "Ending")) for where in ((url, "job"), (other_url, "other"))]
    assert entries[0] == entries[1] > 0
