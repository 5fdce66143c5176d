"""A query from files to a topic of one partition, exactly once, whose output is looked at while it runs."""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from backend_client import ChangelogStateBackend
from backend_client.sinks.kafka import KafkaSink
from backend_client.sinks.protocol import Marker, Sink, Slot, SlotPublisher
from tests.e2e.support import OUTPUT, Totals, read_input, write_input
from tests.support.kafka_reader import committed_values
from tests.waiting import wait_until

WIDE_BYTES = 80_000
"""Size of the records of keys that begin with "wide"."""


@dataclass
class KafkaQuery:
    """
    A query that counts the rows of each key; one file per batch, and a record per key and batch: the key and its count.

    Args:
        spark: The session.
        backend: The backend.
        folder: Folder of the test.
        sink: Where to.
        topic: The sink's topic.
        options: How readers reach the brokers.
        caplog: What the driver logs.
    """

    spark: SparkSession
    backend: ChangelogStateBackend
    folder: Path
    sink: Sink
    topic: str
    options: Mapping[str, Any]
    caplog: pytest.LogCaptureFixture

    def __enter__(self) -> Self:
        self._files: list[list[tuple[str, float]]] = []
        (self.folder / "in").mkdir()
        stream = read_input(self.spark, self.folder / "in").groupBy("k")
        result = self.backend.transform_with_state(stream, Totals(), OUTPUT, "Update", "None")
        padding = F.when(F.col("k").startswith("wide"), F.repeat(F.lit("x"), WIDE_BYTES)).otherwise("")
        records = result.select(F.col("k").alias("key"), F.concat("k", F.lit(" "), "n", padding).alias("value"))
        writer = records.writeStream.sink(self.sink, slots=2, patience_s=120)
        self.query = writer.option("checkpointLocation", str(self.folder / "chk")).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.query.stop()

    def add(self, *keys: str) -> None:
        """Add a file with a row for each key."""
        self._files.append([(key, 1.0) for key in keys])
        write_input(self.folder / "in", self._files)

    def wait_for_warning(self, text: str) -> None:
        """Wait until the driver's log has a text; the query goes on meanwhile."""
        wait_until(lambda: any(text in record.getMessage() for record in self.caplog.records), what=f"{text!r}")
        assert self.query.isActive

    def seen(self) -> list[str]:
        """Return the committed records, in order, without padding."""
        return [
            value.decode().rstrip("x")
            for value in committed_values(str(self.options["bootstrap.servers"]), self.topic, self.options)
        ]

    def check(self, seen: Sequence[str] | None = None) -> None:
        """Have everything published, and check that each record is there once, those of a key in order."""
        self.query.processAllAvailable()
        counts: dict[str, int] = defaultdict(int)
        expected: dict[str, list[str]] = defaultdict(list)
        for rows in self._files:
            for key, _ in rows:
                counts[key] += 1
            for key in {key for key, _ in rows}:
                expected[key].append(f"{key} {counts[key]}")
        found: dict[str, list[str]] = defaultdict(list)
        for record in self.seen() if seen is None else seen:
            found[record.split()[0]].append(record)
        assert found == expected


class SuspendedSink(Sink):
    """
    A sink whose publisher suspends itself in the middle of a transaction, once for each file that `order` makes.

    Args:
        sink: The sink.
        folder: Where orders are; all processes see it.
    """

    def __init__(self, sink: KafkaSink, folder: Path) -> None:
        self.sink = sink
        self._order, self._done = folder / "suspend", folder / "suspended"
        self.refusal = folder / "refusal"
        """Has the text of the last publisher's error."""

    def order(self) -> Callable[[], int]:
        """Order that the next publisher suspends itself; the result waits for it, and returns its process id."""
        self._done.unlink(missing_ok=True)
        self._order.touch()

        def wait() -> int:
            pid = wait_until(lambda: self._done.exists() and int(self._done.read_text() or 0), what="a publisher")
            stopped = Path(f"/proc/{pid}/stat")
            wait_until(lambda: ") T " in stopped.read_text(), what="its suspension")
            return pid

        return wait

    def check(self, columns: pa.Schema, slots: Sequence[Slot]) -> None:
        """See the sink."""
        self.sink.check(columns, slots)

    def open(self, slot: Slot) -> SlotPublisher:
        """Return a publisher that obeys orders."""
        return _SuspendedPublisher(self.sink.open(slot), self.obey, self.refusal)

    def obey(self) -> None:
        """Suspend this process if it is ordered."""
        try:
            self._order.rename(self._done)
        except FileNotFoundError:
            return
        time.sleep(0.5)  # the client sends the first records
        self._done.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)


class _SuspendedPublisher(SlotPublisher):
    def __init__(self, publisher: SlotPublisher, obey: Callable[[], None], refusal: Path) -> None:
        self._publisher = publisher
        self._obey = obey
        self._refusal = refusal

    def last_published(self) -> Marker | None:
        return self._publisher.last_published()

    def publish(self, records: Iterable[pa.RecordBatch], marker: Marker) -> int:
        try:
            return self._publisher.publish(self._suspended(records), marker)
        except Exception as error:
            self._refusal.write_text(str(error))
            raise

    def _suspended(self, records: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in records:
            yield batch
            self._obey()

    def close(self) -> None:
        self._publisher.close()
