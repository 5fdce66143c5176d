"""Queries that read one file per batch and whose second partition stalls on demand, for tests of failover."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor, StreamingQuery

from backend_client import ChangelogStateBackend
from backend_client.columnar import Aggregate, Count, Sum, tumbling
from backend_client.progress import BatchProgress
from tests.e2e.gated_service import GatedService
from tests.e2e.support import Collected, stored_state
from tests.waiting import wait_until

LAST_KEY_GROUPS = "00064-00127"
"""The key groups of the second of two partitions, which stalls."""

SCHEMA = "k string, v double, at timestamp"
BEGIN = datetime(2024, 1, 1, tzinfo=UTC)

Rows = Sequence[tuple[str, float, int]]
"""Key, value, and event time in seconds after BEGIN."""
Build = Callable[[ChangelogStateBackend, DataFrame], Any]
End = tuple[list[tuple[Any, ...]], dict[bytes, bytes]]
"""All output, and the state."""

_FIRST_BATCHES = 7
"""Most tests need so many."""


def random_rows(seed: int, batches: int, rows: int, keys: int) -> list[list[tuple[str, float, int]]]:
    """Return rows per batch; time moves by three seconds per batch, and rows come up to twelve seconds late."""
    chance = random.Random(seed)
    return [
        [
            (f"key-{chance.randrange(keys)}", float(chance.randrange(100)), 3 * number - chance.randrange(12))
            for _ in range(rows)
        ]
        for number in range(batches)
    ]


def write_rows(folder: Path, batches: Sequence[Rows]) -> None:
    """Write one JSON file per batch, in an order that Spark's file source keeps."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(batches):
        path, hidden = folder / f"{number:05d}.json", folder / f".{number:05d}.json"
        lines = [json.dumps({"k": k, "v": v, "at": (BEGIN + timedelta(seconds=at)).isoformat()}) for k, v, at in rows]
        hidden.write_text("\n".join(lines), encoding="utf-8")
        os.utime(hidden, (1_700_000_000 + number, 1_700_000_000 + number))
        hidden.rename(path)


class Sessions(StatefulProcessor):
    """Lists a key's values until no row came for six seconds of event time; a timer then emits and ends the session."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.values = handle.getListState("values", "v double")
        self.end = handle.getValueState("end", "ms long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        (end_ms,) = self.end.get() or (0,)
        if end_ms:
            self.handle.deleteTimer(end_ms)
        for row in rows:
            self.values.appendValue((row.v,))
            end_ms = max(end_ms, int(row.at.timestamp() * 1000) + 6000)
        end_ms = max(end_ms, timerValues.getCurrentWatermarkInMs() + 1)
        self.end.update((end_ms,))
        self.handle.registerTimer(end_ms)
        yield Row(k=key[0], what="rows", values=[value for (value,) in self.values.get()])

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        values = [value for (value,) in self.values.get()]
        self.values.clear()
        self.end.clear()
        yield Row(k=key[0], what=f"end at {timerValues.getCurrentWatermarkInMs()}", values=values)

    def close(self) -> None:
        pass


class PandasTotals(StatefulProcessor):
    """Sums a key's values, in the pandas API."""

    def init(self, handle: Any) -> None:
        self.total = handle.getValueState("total", "s double")

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        (total,) = self.total.get() or (0.0,)
        total += sum(float(frame["v"].sum()) for frame in rows)
        self.total.update((total,))
        yield pd.DataFrame({"k": [key[0]], "s": [total]})

    def close(self) -> None:
        pass


def sessions(backend: ChangelogStateBackend, stream: DataFrame) -> Any:
    """Return sessions in event time."""
    timed = stream.withWatermark("at", "2 seconds").groupBy("k")
    output = "k string, what string, values array<double>"
    return backend.transform_with_state(timed, Sessions(), output, "Append", "EventTime", name="op")


def windows(backend: ChangelogStateBackend, stream: DataFrame) -> Any:
    """Return columnar windows of five seconds, which end with the watermark."""
    timed = stream.withWatermark("at", "2 seconds").groupBy("k")
    aggregate = Aggregate(Count(name="n"), Sum("v", name="s"), windows=tumbling("at", timedelta(seconds=5)))
    return backend.transform_columns(timed, aggregate, outputMode="append", name="op")


def totals(backend: ChangelogStateBackend, stream: DataFrame) -> Any:
    """Return sums in the pandas API, without time."""
    return backend.transform_with_state_in_pandas(
        stream.groupBy("k"), PandasTotals(), "k string, s double", "Update", "None", name="op"
    )


def chain(*names: str) -> Build:
    """Return a function that returns sums, and behind them sums of those, each by another key, with these names."""

    def build(backend: ChangelogStateBackend, stream: DataFrame) -> Any:
        rows, result = stream.select("k", "v"), None
        for name in names:
            result = backend.transform_with_state_in_pandas(
                rows.groupBy("k"), PandasTotals(), "k string, s double", "Update", "None", name=name
            )
            rows = result.selectExpr("concat(k, '+') as k", "s as v")
        return result

    return build


class Run:
    """A query that reads one file per batch, and whose second partition stalls on demand."""

    def __init__(
        self, spark: SparkSession, folder: Path, backend: ChangelogStateBackend, build: Build, files: Sequence[Rows]
    ) -> None:
        self.spark, self.folder, self.backend, self.build, self.files = spark, folder, backend, build, files
        self.collected = Collected()
        self.progress: list[BatchProgress] = []
        self.written = 0
        self.checkpoint = "chk"
        self.query: StreamingQuery | None = None
        self.start(backend)

    def start(self, backend: ChangelogStateBackend) -> None:
        """Start the query, or start it again, with this backend."""
        if self.query is not None:
            self.query.stop()
        write_rows(self.folder / "in", [])
        stream = self.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(self.folder / "in"))
        writer = self.build(backend, stream).writeStream.option(
            "checkpointLocation", str(self.folder / self.checkpoint)
        )
        self.backend = backend
        backend.on_progress(self.progress.append)
        self.query = writer.foreachBatch(self.collected).start()

    def write(self) -> None:
        """Let one more batch come."""
        self.written += 1
        write_rows(self.folder / "in", self.files[: self.written])

    def batch(self) -> BatchProgress:
        """Run one more batch."""
        assert self.query is not None
        self.write()
        self.query.processAllAvailable()
        return self.progress[-1]

    def steady(self) -> None:
        """Run batches until one has its tables in time, whatever else this machine does."""
        wait_until(lambda: self._has_all(self.batch()), what="a batch that has its tables")

    @staticmethod
    def _has_all(batch: BatchProgress) -> bool:
        return batch.rows_waiting == batch.rows_lost == 0

    def stall(self, gate: GatedService) -> None:
        """Have the second partition lose its table, and hold its restore."""
        gate.close()
        folders = list(Path(self.backend.settings.local_dir).glob(f"tables/*/*/{LAST_KEY_GROUPS}"))
        assert folders
        for folder in folders:
            shutil.rmtree(folder)

    def recover(self, gate: GatedService) -> None:
        """Let the table be restored, and batches run until nothing waits."""
        gate.open()
        wait_until(lambda: self.batch().rows_waiting == 0, what="a batch that runs what waits")

    def stop(self) -> None:
        """Stop the query."""
        assert self.query is not None
        self.query.stop()

    def end(self) -> End:
        """Stop; return output and state."""
        self.stop()
        return self.now()

    def now(self) -> End:
        """Return all output, and the state, without the numbers of list parts: a task has its own."""
        rows = sorted((row for batch in self.collected.batches.values() for row in batch), key=repr)
        settings = self.backend.settings
        state = stored_state(settings.storage, settings.job, "op")
        return rows, {_without_part(key): value for key, value in state.items()}


def _without_part(key: bytes) -> bytes:
    """Return the table key of a list part without its number, which is that of a task's part; others as they are."""
    is_part = key.endswith(b"\0\0\0\0", -12, -8) and key[-8:-4] < b"\1\0\0\0"
    return key[:-4] if is_part else key


def stalls(spark: SparkSession, files: Sequence[Rows]) -> list[list[bool]]:
    """Return which rows of each file are of the partition that stalls."""
    keys = sorted({key for rows in files for key, _, _ in rows})
    found = spark.createDataFrame([(key,) for key in keys], "k string").selectExpr("k", "pmod(hash(k), 128) >= 64")
    is_stalled = {row[0]: row[1] for row in found.collect()}
    return [[is_stalled[key] for key, _, _ in rows] for rows in files]


class Undisturbed:
    """
    A run of a query in which no table is lost: it goes on where somebody needs more of its batches.

    Args:
        spark: The session.
        folder: For everything but its tables.
        local_dir: For these, and for its sidecar.
        build: The query.
        files: Its rows.
    """

    def __init__(self, spark: SparkSession, folder: Path, local_dir: Path, build: Build, files: Sequence[Rows]) -> None:
        self._folder, self._local_dir = folder, local_dir
        self._query = spark, build, files
        self._run: Run | None = None
        self._ends: list[End] = []

    def after(self, batches: int) -> End:
        """Return output and state after so many batches."""
        if batches > len(self._ends):
            backend = ChangelogStateBackend(
                (self._folder / "store").as_uri(), job="undisturbed", local_dir=str(self._local_dir), parallelism=2
            )
            if self._run is None:
                spark, build, files = self._query
                self._run = Run(spark, self._folder, backend, build, files)
            else:
                self._run.start(backend)
            while len(self._ends) < max(batches, _FIRST_BATCHES):
                self._run.batch()
                self._ends.append(self._run.now())
            self._run.stop()
        return self._ends[batches - 1]
