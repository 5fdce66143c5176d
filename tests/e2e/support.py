"""
Shared helpers of the end-to-end tests: a small stream of rows, a processor, and access to stored state.

Every Python worker that runs the processor imports this module, so what only the driver's side needs is imported there.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor, StreamingQuery
from pyspark.sql.types import DoubleType, LongType, StructType

from storage.key_groups import KeyGroupRange
from tests.waiting import wait_until

if TYPE_CHECKING:
    from backend_client import ChangelogStateBackend
    from storage.key_group_sets import KeyGroups
    from storage.model import MaterializationHandle
    from storage.object_store import ObjectStore

INPUT = "k string, v double"
STATE = "n long, s double"
OUTPUT = "k string, n long, s double"

Files: TypeAlias = Sequence[Sequence[tuple[str | None, float]]]
"""The rows (k, v) of each file."""
ALL_KEY_GROUPS = KeyGroupRange(0, 32767)


class Totals(StatefulProcessor):
    """Counts and sums the rows of each key, over all batches; `pause_s` delays each key."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s

    def init(self, handle: Any) -> None:
        self.totals = handle.getValueState("totals", STATE)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        n, s = self.totals.get() or (0, 0.0)
        for row in rows:
            n, s = n + 1, s + row.v
        if self.pause_s:
            time.sleep(self.pause_s)
        self.totals.update((n, s))
        yield Row(k=key[0], n=n, s=s)

    def close(self) -> None:
        pass


def write_input(folder: Path, files: Files) -> None:
    """
    Write one JSON file per batch, in an order that Spark's file source keeps.

    A query may list the folder meanwhile: it sees a file only once it is whole and has its time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(files):
        path, hidden = folder / f"{number:05d}.json", folder / f".{number:05d}.json"
        hidden.write_text("".join(json.dumps({"k": k, "v": v}) + "\n" for k, v in rows), encoding="utf-8")
        os.utime(hidden, (1_700_000_000 + number, 1_700_000_000 + number))
        hidden.rename(path)


def random_input(seed: int, batches: int, rows: int, keys: int) -> list[list[tuple[str | None, float]]]:
    """Return rows per batch; one key is null, and values are integers, so that sums are exact in any order."""
    chance = random.Random(seed)
    names: list[str | None] = [None, *(f"key-{number}" for number in range(keys - 1))]
    return [[(chance.choice(names), float(chance.randrange(1000))) for _ in range(rows)] for _ in range(batches)]


def read_input(spark: SparkSession, folder: Path, schema: str = INPUT) -> DataFrame:
    """Return the stream of the files, one file per batch."""
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(str(folder))


class Collected:
    """A user's function that keeps each batch's rows by batch id, like an idempotent sink."""

    def __init__(self) -> None:
        self.batches: dict[int, list[tuple[Any, ...]]] = {}

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        self.batches[batch_id] = sorted((tuple(row) for row in batch.collect()), key=repr)


class WhenStored(Collected):
    """
    Collects rows, and delays the end of each batch until the previous one's snapshots are stored.

    The next checkpoint then names them. They are stored from the first restore that finds them listed by a checkpoint.
    """

    def __init__(self, local_dir: Path) -> None:
        super().__init__()
        self.local_dir = local_dir
        self._made: set[Path] = set()

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        super().__call__(batch, batch_id)
        wait_until(lambda: not any(path.exists() for path in self._made), what="the end of the snapshots")
        self._made = set(self.local_dir.rglob("*.snapshot-*"))


def run_to_end(writer: Any, location: Path, function: Callable[[DataFrame, int], object]) -> StreamingQuery:
    """Run a query over all existing input; raise its error."""
    started = writer.option("checkpointLocation", str(location)).trigger(availableNow=True).foreachBatch(function)
    query: StreamingQuery = started.start()
    try:
        query.awaitTermination()
    finally:
        query.stop()
    return query


class JobQueries:
    """
    Queries of several jobs over the same files, each with a Spark checkpoint and a folder of output of its own.

    Args:
        spark: The session.
        make: Makes the backend of a job.
        folder: The place for everything.
    """

    def __init__(self, spark: SparkSession, make: Callable[..., ChangelogStateBackend], folder: Path) -> None:
        self._spark = spark
        self._make = make
        self._folder = folder
        self.storage = f"file://{folder / 'store'}"

    def location(self, job: str) -> Path:
        """Return the Spark checkpoint of a job's query."""
        return self._folder / "chk" / job

    def output(self, job: str) -> Path:
        """Return the folder of a job's output, which exists then."""
        folder = self._folder / "out" / job
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def to_end(self, writer: Any, location: str) -> None:
        """Run a query over all existing input."""
        query = writer.option("checkpointLocation", str(self.location(location))).trigger(availableNow=True).start()
        query.awaitTermination(180)
        assert query.exception() is None

    def records(self, job: str) -> list[dict[str, Any]]:
        """Return the records that a job has published."""
        import pyarrow.parquet as pq

        files = sorted(self.output(job).glob("*.parquet"))
        return [row for file in files for row in pq.read_table(file).to_pylist()]

    def dstl(self, command: str, *arguments: str) -> int:
        """Run a command of ``dstl``; return its exit code."""
        from dstl_service.cli import main

        return main([command, "--storage", self.storage, *arguments])


def expected_output(files: Files) -> dict[int, list[tuple[Any, ...]]]:
    """Return the output of `Totals`, batch by batch, computed in plain Python."""
    totals: dict[str | None, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    batches = {}
    for batch_id, rows in enumerate(files):
        for key, value in rows:
            n, s = totals[key]
            totals[key] = (n + 1, s + value)
        batches[batch_id] = sorted(((key, *totals[key]) for key in {key for key, _ in rows}), key=repr)
    return batches


def expected_state(files: Files) -> list[tuple[Any, ...]]:
    """Return all values that `Totals` stores, sorted."""
    last: dict[Any, tuple[Any, ...]] = {}
    for rows in expected_output(files).values():
        for key, *value in rows:
            last[key] = tuple(value)
    return sorted(last.values())


def materializations(url: str, job: str = "job") -> tuple[MaterializationHandle, ...]:
    """Return the materializations in the newest checkpoint's state."""
    from dstl_service.registry.job_store import JobStore
    from storage.clock import SystemClock, SystemIds
    from storage.open import open_store

    jobs = JobStore(open_store(url), job, SystemClock(), SystemIds())
    return jobs.state(list(jobs.completed())[-1].ref).materializations


def stored_state(url: str | ObjectStore, job: str, operator: str) -> dict[bytes, bytes]:
    """Read an operator's whole state from the newest checkpoint: table key to value."""
    from backend_client.table.snapshot import IncomingSnapshot
    from dstl_service.registry.job_store import JobStore
    from dstl_service.restore.plan import plan_restore, read_handles, read_snapshots
    from dstl_service.restore.segment_cache import SegmentCache
    from dstl_service.wire import FileFrame
    from storage.change_set import decode_change_set
    from storage.clock import SystemClock, SystemIds
    from storage.open import open_store

    store = open_store(url) if isinstance(url, str) else url
    jobs = JobStore(store, job, SystemClock(), SystemIds())
    plan = plan_restore(jobs, operator, ALL_KEY_GROUPS, None, list(jobs.completed())[-1].ref)
    table: dict[bytes, bytes] = {}
    for planned, index, pieces in read_snapshots(plan, store):
        with tempfile.TemporaryDirectory() as folder:
            incoming = IncomingSnapshot(Path(folder) / "snapshot", planned.handle.index_key, index.version.to_text())
            for file, offset, data in pieces:
                assert isinstance(data, bytes)
                incoming.take(FileFrame(file.name, file.object_key, offset, file.size_bytes, file.checksum), data)
            table.update({key: value for key, value in incoming.items(b"") if _counts(key, planned.counted)})
    for handle, payload in read_handles(plan.handles, store, SegmentCache(0)):
        for key, change in decode_change_set(bytes(payload), handle.object_key):
            if _counts(key, plan.counted(handle)):
                if change is None:
                    table.pop(key, None)
                else:
                    table[key] = change
    return table


def _counts(key: bytes, key_groups: KeyGroups) -> bool:
    return any(part.contains(int.from_bytes(key[:2], "big")) for part in key_groups)


def stored_totals(url: str | ObjectStore, job: str, operator: str = "Totals") -> list[tuple[Any, ...]]:
    """Read the values of `Totals`, sorted."""
    from backend_client.state.codec import ValueCodec

    codec = ValueCodec(StructType().add("n", LongType()).add("s", DoubleType()).json(), "totals")
    return sorted(codec.decode(value) for value in stored_state(url, job, operator).values())
