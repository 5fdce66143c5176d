"""
A job that is set back to a savepoint from before a change of its state schema, and forward again.

The sidecar keeps running, and local tables stay. A failure means that something written after the savepoint, or under
the newer schema, is still there, or that Spark resumes from another batch than the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

from backend_client import ChangelogStateBackend
from dstl_service.cli import main
from dstl_service.registry.job_store import JobStore
from storage.clock import SystemClock, SystemIds
from storage.open import open_store
from tests.e2e.support import Collected, read_input, run_to_end, write_input

pytestmark = pytest.mark.e2e

KEYS = ["a", "b", "c"]


class Counting(StatefulProcessor):
    """Counts the batches of a key; the newer version stores a note beside the number, and all notes in a list."""

    def __init__(self, *, newer: bool) -> None:
        self.newer = newer

    def init(self, handle: Any) -> None:
        self.count = handle.getValueState("count", "n long, note string" if self.newer else "n long")
        if self.newer:
            self.notes = handle.getListState("notes", "note string")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        before = self.count.get()
        n = 1 + (before[0] if before else 0)
        seen = [tuple(before) if before else None]
        if self.newer:
            seen.append(tuple(note for (note,) in self.notes.get()))
            self.notes.appendValue((f"note {n}",))
        self.count.update((n, f"note {n}") if self.newer else (n,))
        yield Row(k=key[0], seen=repr(seen))

    def close(self) -> None:
        pass


def _fail(batch: DataFrame, batch_id: int) -> None:
    raise RuntimeError("the sink is away")


class Query:
    """The job and its Spark checkpoint."""

    def __init__(self, spark: SparkSession, backend: ChangelogStateBackend, folder: Path) -> None:
        self._spark = spark
        self._backend = backend
        self._folder = folder
        self.location = folder / "chk"

    def run(self, upto: int, *, newer: bool, fails: bool = False) -> dict[int, set[str]]:
        """Run a version of the program over the new ones of this many files; return what each batch saw."""
        write_input(self._folder / "in", [[(key, 1.0) for key in KEYS]] * upto)
        stream, collected = read_input(self._spark, self._folder / "in").groupBy("k"), Collected()
        result = self._backend.transform_with_state(
            stream, Counting(newer=newer), "k string, seen string", "Update", "None", name="counting"
        )
        run_to_end(result.writeStream, self.location, _fail if fails else collected)
        return {batch_id: {seen for _, seen in rows} for batch_id, rows in collected.batches.items()}

    def savepoints(self) -> list[str]:
        """Return the names of all savepoints."""
        return JobStore(
            open_store(self._backend.settings.storage), "job", SystemClock(), SystemIds()
        ).savepoints.names()

    def command(self, *arguments: str) -> None:
        """Run a ``dstl`` command on the job."""
        name, *rest = arguments
        assert main([name, "--storage", self._backend.settings.storage, *rest, "job"]) == 0


def test_savepoint_from_before_a_schema_changed(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> None:
    """
    I14, I15: after a rewind, a program of either version sees exactly the savepoint's state.

    The local tables, which are newer than the savepoint, are not used.
    """
    query = Query(spark, make_backend(), tmp_path)
    query.run(1, newer=False)
    query.command("savepoints", "--create", "before")
    newer = {1: {"[(1, None), ()]"}, 2: {"[(2, 'note 2'), ('note 2',)]"}}
    assert query.run(3, newer=True) == newer

    # The file source puts everything since then in one batch.
    query.command("rewind", "--savepoint", "before", "--write")
    assert query.run(3, newer=False) == {1: {"[(1,)]"}}
    assert query.run(4, newer=False) == {2: {"[(2,)]"}}
    query.command("rewind", "--savepoint", "before", "--write")
    assert query.run(4, newer=True) == {1: newer[1]}


def test_job_is_set_forward_again(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> None:
    """I11, I14: the state before a rewind is kept, and the job resumes from it as if nothing had happened."""
    query = Query(spark, make_backend(), tmp_path)
    query.run(1, newer=False)
    query.command("savepoints", "--create", "first")
    query.run(3, newer=False)
    query.command("rewind", "--savepoint", "first", "--write")
    assert query.run(4, newer=False) == {1: {"[(1,)]"}}
    (later,) = set(query.savepoints()) - {"first"}

    query.command("rewind", "--savepoint", later, "--write")
    assert query.run(5, newer=False) == {3: {"[(3,)]"}}


def test_spark_checkpoint_without_old_entries(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> None:
    """A job can be set back to a savepoint older than the entries that Spark keeps in its own checkpoint."""
    query = Query(spark, make_backend(), tmp_path)
    query.run(2, newer=False)
    query.command("savepoints", "--create", "old")
    query.run(4, newer=False)
    for folder in ("offsets", "commits"):
        for number in (0, 1):
            for name in (f"{number}", f".{number}.crc"):
                (query.location / folder / name).unlink()

    query.command("rewind", "--savepoint", "old", "--write")
    assert query.run(5, newer=False) == {2: {"[(2,)]"}}


def test_batch_after_a_rewind_keeps_its_offsets(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> None:
    """I14: a batch that began after a rewind and failed is executed again with the same rows."""
    query = Query(spark, make_backend(), tmp_path)
    query.run(1, newer=False)
    query.command("savepoints", "--create", "first")
    query.run(2, newer=False)
    query.command("rewind", "--savepoint", "first", "--write")
    before = query.run(2, newer=False)
    query.command("rewind", "--savepoint", "first", "--write")
    with pytest.raises(StreamingQueryException, match="the sink is away"):
        query.run(2, newer=False, fails=True)
    offsets = (query.location / "offsets/1").read_text()

    assert query.run(4, newer=False) == {**before, 2: {"[(2,)]"}, 3: {"[(3,)]"}}
    assert (query.location / "offsets/1").read_text() == offsets
