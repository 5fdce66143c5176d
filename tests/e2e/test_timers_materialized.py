"""
Timers and ends of values in tables that are materialized while the query runs, and lost between its runs.

A failure means that a table from a snapshot and the later log has lost, doubled or revived something that an
undisturbed table has.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

from backend_client import ChangelogStateBackend
from tests.e2e.support import Collected, WhenStored, materializations, run_to_end, stored_state

pytestmark = pytest.mark.e2e

HOUR_MS = 3_600_000
INPUT = "k string, t timestamp, script string"
OUTPUT = "k string, t timestamp, result string"
START_S = 1_700_000_000


class Scripted(StatefulProcessor):
    """Sets and deletes timers as each row says, and acts on expired timers as told; reports all it sees."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.plan = handle.getValueState("plan", "steps string")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            script = json.loads(row.script)
            self._perform(script["do"])
            if "plan" in script:
                self.plan.update((json.dumps(script["plan"]),))
            yield self._seen(key, row.t, "row", timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        expired_ms = expiredTimerInfo.getExpiryTimeInMs()
        moment = datetime.fromtimestamp(expired_ms / 1000, UTC)
        yield self._seen(key, moment, f"expired {key.k}", timerValues)
        plan = self.plan.get()
        if plan is not None:
            self.plan.clear()
            self._perform(json.loads(plan[0]))
            yield self._seen(key, moment, "planned", timerValues)

    def close(self) -> None:
        pass

    def _perform(self, steps: list[list[Any]]) -> None:
        for verb, moment_ms in steps:
            {"set": self.handle.registerTimer, "delete": self.handle.deleteTimer}[verb](moment_ms)

    def _seen(self, key: Any, moment: datetime, what: str, values: Any) -> Row:
        assert values.getCurrentProcessingTimeInMs() > START_S * 1000
        result = [what, values.getCurrentWatermarkInMs(), sorted(self.handle.listTimers())]
        return Row(k=key[0], t=moment, result=json.dumps(result))


class Feed:
    """A folder that files are added to one by one."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark = spark
        self._folder = folder
        self._number = 0
        folder.mkdir()

    def stream(self, schema: str = INPUT) -> DataFrame:
        return self._spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(str(self._folder))

    def put(self, rows: list[dict[str, Any]]) -> None:
        hidden, path = self._folder / f".{self._number}", self._folder / f"{self._number:05d}.json"
        hidden.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        os.utime(hidden, (START_S + self._number, START_S + self._number))
        hidden.rename(path)
        self._number += 1


def row(
    key: str, second: int, do: list[list[Any]] | None = None, plan: list[list[Any]] | None = None
) -> dict[str, Any]:
    script: dict[str, Any] = {"do": do or []}
    if plan is not None:
        script["plan"] = plan
    moment = datetime.fromtimestamp(START_S + second, UTC).isoformat()
    return {"k": key, "t": moment, "script": json.dumps(script)}


def at(second: int) -> int:
    return (START_S + second) * 1000


def scripted_files(seed: int, files: int) -> list[list[dict[str, Any]]]:
    """Return rows with timers before and after the watermark, some rows late, one row per key and file."""
    chance = random.Random(seed)
    result = []
    for number in range(files):
        now = 10 * number
        rows = []
        for name in chance.sample("abcdef", chance.randrange(1, 4)):
            steps = [
                [chance.choice(["set", "set", "set", "delete"]), at(now + chance.choice([-40, -5, 0, 5, 10, 20]))]
                for _ in range(chance.randrange(4))
            ]
            plan = [["set", at(now + chance.choice([-30, 10, 30]))], ["delete", at(now + chance.choice([5, 10]))]]
            rows.append(row(name, now - chance.choice([0, 0, 3, 60]), steps, plan if chance.random() < 0.5 else None))
        result.append([*rows, row("clock", now)])
    return result


class Ending(StatefulProcessor):
    """Writes states that live for a millisecond or an hour, and sets a timer for the next batch and a later one."""

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
    I13, I14: tables from snapshots and log emit the same as undisturbed ones, batch by batch.

    Two operators in a chain, one with event-time timers, one with processing-time timers and TTL. Tables and sidecar
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
        os.kill(int(Path(backend.auto_started_sidecar.pid_path).read_text()), signal.SIGKILL)
        return backend.settings.storage

    urls: list[str] = []
    disturbed, feed = WhenStored(local_dir), Feed(spark, tmp_path / "disturbed-in")
    for part, parallelism in ((files[:4], 2), (files[4:], 3)):
        for rows in part:
            feed.put(rows)
        urls.append(run("job", feed, parallelism, disturbed))
        assert {handle.operator for handle in materializations(urls[-1])} == {"Scripted", "Ending"}
        shutil.rmtree(local_dir / "tables")
    undisturbed, feed = Collected(), Feed(spark, tmp_path / "undisturbed-in")
    for rows in files:
        feed.put(rows)
    other_url = run("other", feed, 2, undisturbed)

    assert disturbed.batches == undisturbed.batches
    # Timers pending when the tables were lost fired later: by processing time at once, by event time at the end.
    assert any(result.startswith("expired") for _, result in disturbed.batches[4])
    assert any('["[\\"expired' in result for batch_id in (4, 5, 6) for _, result in disturbed.batches[batch_id])
    entries = [len(stored_state(*where, "Ending")) for where in ((urls[-1], "job"), (other_url, "other"))]
    assert entries[0] == entries[1] > 0
