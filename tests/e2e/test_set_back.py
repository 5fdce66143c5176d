"""
A job that is set back to a savepoint behind which its state schema changed.

A failure means that something written after the savepoint, or under the newer schema, is still there.
"""

from __future__ import annotations

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
from dstl_service.job_store import JobStore
from dstl_service.manifest import encode_manifest
from dstl_service.registry_format import decode_epoch, manifest_key
from storage.clock import SystemClock, SystemIds
from storage.open import open_store
from tests.e2e.support import Collected, read_input, run_to_end, write_input

pytestmark = pytest.mark.e2e

KEYS = ["a", "b", "c"]


class Counting(StatefulProcessor):
    """Counts the batches of a key; the newer version keeps a note beside the number, and all notes in a list."""

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


class Query:
    """The job, its Spark checkpoint, and a copy of that one from the time of the savepoint."""

    def __init__(self, spark: SparkSession, backend: ChangelogStateBackend, folder: Path) -> None:
        self._spark = spark
        self._backend = backend
        self._folder = folder
        self._store = open_store(backend.settings.storage)
        self._location, self._copy = folder / "chk", folder / "chk-copy"

    def run(self, upto: int, *, newer: bool) -> dict[int, set[str]]:
        """Run a version of the program over what is new of so many files; return what each batch saw."""
        write_input(self._folder / "in", [[(key, 1.0) for key in KEYS]] * upto)
        stream, collected = read_input(self._spark, self._folder / "in").groupBy("k"), Collected()
        result = self._backend.transform_with_state(
            stream, Counting(newer=newer), "k string, seen string", "Update", "None", name="counting"
        )
        run_to_end(result.writeStream, self._location, collected)
        assert all(len(rows) == len(KEYS) for rows in collected.batches.values())
        return {batch_id: {seen for _, seen in rows} for batch_id, rows in collected.batches.items()}

    def make_savepoint(self) -> None:
        """Keep the newest checkpoint, with the Spark checkpoint that belongs to it."""
        self._jobs().make_savepoint("before", None)
        shutil.copytree(self._location, self._copy)

    def set_back(self) -> None:
        """Stop the sidecar, and leave job and Spark checkpoint as they were; local tables stay as they are."""
        os.kill(int(Path(self._backend.embedded_service.pid_path).read_text()), signal.SIGKILL)
        savepoint = self._jobs().savepoints.load("before")
        self._store.delete([info.key for info in self._store.list("job/checkpoints/")])
        epochs = [info.key for info in self._store.list("job/epochs/")]
        self._store.delete([key for key in epochs if decode_epoch(self._store.get(key), key) > savepoint.id])
        self._store.put(manifest_key("job", savepoint.id, savepoint.generation), encode_manifest(savepoint))
        shutil.rmtree(self._location)
        shutil.copytree(self._copy, self._location)

    def _jobs(self) -> JobStore:
        return JobStore(self._store, "job", SystemClock(), SystemIds())


def test_savepoint_from_before_a_schema_changed(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> None:
    """
    I14, I15: what a program of either version sees after the job was set back is the savepoint's state, and no more.

    The local tables, which are newer than the savepoint, are not taken for it.
    """
    query = Query(spark, make_backend(), tmp_path)
    query.run(1, newer=False)
    query.make_savepoint()
    newer = {1: {"[(1, None), ()]"}, 2: {"[(2, 'note 2'), ('note 2',)]"}}
    assert query.run(3, newer=True) == newer

    query.set_back()
    assert query.run(3, newer=False) == {1: {"[(1,)]"}, 2: {"[(2,)]"}}
    query.set_back()
    assert query.run(3, newer=True) == newer
