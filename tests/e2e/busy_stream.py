"""A stream whose batches arrive without a pause, run on Spark's own operators and on this backend."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

from backend_client import ChangelogStateBackend
from tests.e2e.differential.engines import PROVIDER
from tests.e2e.differential.history import START_S, Feed
from tests.e2e.support import Collected, run_to_end

OUTPUT = "k string, what string, seconds array<long>"
DELAY = "1 second"

BATCHES = (
    "a5 b6 a8 a11",
    "a7 a12 a12 a20",  # the first row is late by its own batch's watermark, not by the previous one
    "a9 b11 a15 a30",  # so are the second and the third row; the first one is late by both
    "b41",
)
"""Rows of each batch: a key and a second."""


class Waiting(StatefulProcessor):
    """Keeps the seconds of its rows; yields them with the rows, and when each one's timer fires."""

    def __init__(self, time_mode: str) -> None:
        self.by_clock = time_mode == "ProcessingTime"

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.seconds = handle.getListState("seconds", "second long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            moment = int(row.t.timestamp() * 1000)
            self.seconds.appendValue((moment // 1000 - START_S,))
            self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 1 if self.by_clock else moment)
        yield self._row(key, "rows")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        moment = expiredTimerInfo.getExpiryTimeInMs() // 1000 - START_S
        yield self._row(key, "timer" if self.by_clock else f"timer {moment}")

    def close(self) -> None:
        pass

    def _row(self, key: Any, what: str) -> Row:
        return Row(k=key[0], what=what, seconds=sorted(second for (second,) in self.seconds.get()))


def run_both(
    spark: SparkSession,
    backend: ChangelogStateBackend,
    folder: Path,
    theirs: Callable[[DataFrame], Any],
    ours: Callable[[DataFrame], Any],
    settings: Mapping[str, str] | None = None,
) -> tuple[Collected, Collected]:
    """Return the output of both programs for `BATCHES`, batch by batch."""
    feed = Feed(folder / "input")
    for batch in BATCHES:
        rows = ((name[0], datetime.fromtimestamp(START_S + int(name[1:]), UTC)) for name in batch.split())
        feed.put("".join(json.dumps({"k": k, "t": t.isoformat()}) + "\n" for k, t in rows))

    def run(program: Callable[[DataFrame], Any], session: SparkSession, name: str) -> Collected:
        for setting, value in (settings or {}).items():
            session.conf.set(setting, value)
        stream = session.readStream.schema("k string, t timestamp").option("maxFilesPerTrigger", 1)
        seen = Collected()
        result = program(stream.json(str(feed.folder)).withWatermark("t", DELAY))
        run_to_end(result.writeStream.outputMode("append"), folder / name, seen)
        return seen

    own = spark.newSession()
    own.conf.set("spark.sql.streaming.stateStore.providerClass", PROVIDER)
    session = spark.newSession()
    with backend.install(session):
        return run(theirs, own, "theirs"), run(ours, session, "ours")


def waits(time_mode: str) -> Callable[[DataFrame], Any]:
    """Return a program that is the same for both."""

    def build(stream: DataFrame) -> Any:
        return stream.groupBy("k").transformWithState(Waiting(time_mode), OUTPUT, "Append", time_mode)

    return build
