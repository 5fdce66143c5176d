"""Runs the history of a query on Spark's own operator and on this backend, at the same time, and compares."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from backend_client import ChangelogStateBackend
from tests.e2e.differential.history import SCHEMA, Feed, History
from tests.e2e.differential.plans import Query
from tests.e2e.support import materializations
from tests.waiting import wait_until

PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"

Batches = dict[int, Counter[tuple[str, ...]]]
"""The rows of each batch as text, so that NaN equals itself."""


class Outputs:
    """A user's function that keeps each batch's rows by batch id, like an idempotent sink."""

    def __init__(self, batch_ended: Callable[[], None] = lambda: None) -> None:
        self.batches: Batches = {}
        self._batch_ended = batch_ended

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        self.batches[batch_id] = Counter(tuple(map(_text, row)) for row in batch.collect())
        self._batch_ended()

    @property
    def all(self) -> Batches:
        """The rows of all batches in one list."""
        return {0: sum(self.batches.values(), Counter())}


_WORKER_IS_LATE = "Python worker failed to connect back"
"""Spark's operator ends its query if a worker takes more than 10 s to start, as on a loaded machine."""
_STARTS_MAX = 5


@dataclass(slots=True)
class Engines:
    """
    Both engines, and the figures of the comparisons.

    Args:
        spark: Each query gets its own sessions from it.
        folder: For inputs and checkpoints.
        make_backend: Makes a backend for a job and a parallelism.
        local_dir: Folder of its tables.
    """

    spark: SparkSession
    folder: Path
    make_backend: Callable[[str, int], ChangelogStateBackend]
    local_dir: Path
    plans: set[str] = field(default_factory=set)
    """Plans with output."""
    drawn_plans: set[str] = field(default_factory=set)
    """Plans whose histories Hypothesis drew."""
    mismatches: set[str] = field(default_factory=set)
    """Queries with different outputs or a failure."""
    materialized: set[str] = field(default_factory=set)
    """Queries that resumed from a checkpoint with a snapshot."""
    histories: int = 0
    rows: int = 0
    outputs: int = 0
    _numbers: Iterator[int] = field(default_factory=count)
    _snapshots: set[Path] = field(default_factory=set)

    def compare(self, query: Query, history: History) -> None:
        """
        Run a history on both.

        Raises:
            AssertionError: Their outputs differ; the message shows the first difference.
        """
        name = f"{query.name}-{next(self._numbers)}"
        folder = self.folder / name
        folder.mkdir()
        try:
            with ThreadPoolExecutor(2) as pool:
                runs = [pool.submit(run, query, history, name, folder) for run in (self._theirs, self._ours)]
            theirs, ours = (run.result() for run in runs)
            assert ours == theirs, _difference(query, theirs, ours)
        except BaseException as error:
            self.mismatches.add(query.name)
            print(f"{query.name} differs or fails with\n{history}\n{error}", flush=True)
            raise
        shutil.rmtree(folder)
        rows = [row for batch in ours.values() for row in batch.elements()]
        self.plans |= {row[0] for row in rows} & query.plans.keys() if query.shared else query.plans.keys()
        self.histories += 1
        self.rows += history.rows
        self.outputs += len(rows)

    def _theirs(self, query: Query, history: History, name: str, folder: Path) -> Batches:
        session = self.spark.newSession()
        session.conf.set("spark.sql.streaming.stateStore.providerClass", PROVIDER)
        session.conf.set("spark.sql.shuffle.partitions", "1")  # the fixed cost of a partition is always the same
        for setting, value in query.spark_settings.items():
            session.conf.set(setting, value)
        feed, outputs, location = Feed(folder / "their-input"), Outputs(), folder / "theirs"
        for run, files in enumerate(history.files(query.closing)):
            result = query.build(_stream(session, feed), run)
            _drive(result, feed, files, location, outputs, ticks=query.by_clock)
        return outputs.all if query.as_a_whole else outputs.batches

    def _ours(self, query: Query, history: History, name: str, folder: Path) -> Batches:
        feed, outputs, location = Feed(folder / "our-input"), Outputs(self._wait_for_snapshots), folder / "ours"
        files = history.files(query.closing)
        for number, (run, contents) in enumerate(zip(history.runs, files, strict=True)):
            if run.tables_lost:
                shutil.rmtree(self.local_dir / "tables")
            if run.commit_lost:
                _forget_last_commit(location)
            session, backend = self.spark.newSession(), self.make_backend(name, run.parallelism)
            with backend.install(session):
                _drive(query.build(_stream(session, feed), number), feed, contents, location, outputs)
            if materializations(backend.settings.storage, name):
                self.materialized.add(query.name)
        return outputs.all if query.as_a_whole else outputs.batches

    def _wait_for_snapshots(self) -> None:
        """Delay each batch's end until the previous one's snapshots are stored, so the next checkpoint names them."""
        made = self._snapshots
        wait_until(lambda: not any(path.exists() for path in made), what="the end of the snapshots")
        self._snapshots = set(self.local_dir.rglob("*.snapshot-*"))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _stream(session: SparkSession, feed: Feed) -> DataFrame:
    return session.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(feed.folder))


def _drive(result: Any, feed: Feed, files: list[str], location: Path, outputs: Outputs, *, ticks: bool = False) -> None:
    """
    Run a query over files, each of which is processed before the next one is added.

    Args:
        result: The result to write.
        feed: Receives the files.
        files: Their contents.
        location: Folder of the checkpoints.
        outputs: Collects the output.
        ticks: Whether the query runs endless batches without data; the end waits for one of them.
    """

    def start() -> StreamingQuery:
        writer = result.writeStream.option("checkpointLocation", str(location)).foreachBatch(outputs)
        started: StreamingQuery = writer.start()
        return started

    query = start()
    try:
        for content in files:
            number = feed.put(content)
            for tries_left in reversed(range(_STARTS_MAX)):
                try:
                    _work_off(query, location, number if ticks else None)
                    break
                except StreamingQueryException as error:
                    if _WORKER_IS_LATE not in str(error) or not tries_left:
                        raise
                    query.stop()
                    query = start()
    finally:
        query.stop()


def _work_off(query: StreamingQuery, location: Path, awaited_file: int | None) -> None:
    """Wait until all files are processed or, if one is named, for two batches of it; raise the query's error."""
    if awaited_file is None:
        query.processAllAvailable()
    else:
        wait_until(lambda: query.exception() or _batches_up_to(location, awaited_file) > 1, 120, "a batch")
    if (error := query.exception()) is not None:
        raise error


def _batches_up_to(location: Path, file: int) -> int:
    """Return how many finished batches have this file as their newest one."""
    count = 0
    for commit in (location / "commits").glob("[0-9]*"):
        *_, offset = (location / "offsets" / commit.name).read_text(encoding="utf-8").splitlines()
        count += int(json.loads(offset)["logOffset"]) == file
    return count


def _forget_last_commit(location: Path) -> None:
    """Leave a query as if it had died before Spark's commit: the batch exists, and Spark executes it again."""
    last = max(int(path.name) for path in (location / "commits").iterdir() if path.name.isdigit())
    for name in (f"{last}", f".{last}.crc"):
        (location / "commits" / name).unlink()


def _difference(query: Query, theirs: Batches, ours: Batches) -> str:
    """Describe the first difference."""
    if sorted(theirs) != sorted(ours):
        return f"{query.name}: Spark ran the batches {sorted(theirs)}, this backend {sorted(ours)}"
    batch = min(number for number in theirs if theirs[number] != ours[number])
    missing, extra = theirs[batch] - ours[batch], ours[batch] - theirs[batch]
    shown = "\n".join(
        [f"  only Spark's: {row}" for row in sorted(missing)[:5]]
        + [f"  only this one's: {row}" for row in sorted(extra)[:5]]
    )
    return f"{query.name}, batch {batch}: outputs differ\n{shown}"
