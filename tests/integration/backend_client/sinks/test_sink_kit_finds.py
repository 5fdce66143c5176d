"""The conformance kit finds out sinks whose fault shows beside other slots, to a reader, in records or in errors."""

from __future__ import annotations

import json
import multiprocessing
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backend_client.sinks.protocol import Marker, Sink, Slot, SlotPublisher
from backend_client.testing import sink_kit
from backend_client.testing.sink_kit import SinkKit
from storage.errors import FencedError, UnavailableError
from tools.servers.sqlite_sink import SqlitePublisher, SqliteSink

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

NUMBERS = pa.schema({"n": pa.int64()})
CUT_AT = 60


def numbers(values: Sequence[int]) -> pa.RecordBatch:
    return pa.record_batch({"n": list(values)}, schema=NUMBERS)


@dataclass(frozen=True, slots=True)
class Faulty(Sink):
    """Publishes to SQLite and has one fault."""

    sink: SqliteSink
    fault: str

    def check(self, columns: pa.Schema, slots: Sequence[Slot]) -> None:
        """Create the tables."""
        self.sink.check(columns, slots)
        self.execute("create table if not exists place (slot, n)")
        if self.fault == "a check tidies up":
            self.execute("delete from place")

    def open(self, slot: Slot) -> SlotPublisher:
        """Open the slot."""
        if self.fault == "ignores case":
            slot = replace(slot, sink=slot.sink.lower())
        if self.fault == "cuts names":
            slot = replace(slot, sink=slot.sink[:CUT_AT])
        if self.fault == "each slot tidies up":
            self.execute("delete from place")
        if self.fault == "writes, and removes it later":
            self.execute("delete from records where slot = ? and checkpoint_id is null", slot.number)
        return _FaultyPublisher(self, slot)

    def execute(self, statement: str, *values: Any) -> list[Any]:
        """Execute a statement in a transaction of its own."""
        with closing(sqlite3.connect(self.sink.path, timeout=30)) as connection, connection:
            return connection.execute(statement, values).fetchall()


class _FaultyPublisher(SlotPublisher):
    def __init__(self, sink: Faulty, slot: Slot) -> None:
        self._sink, self._fault = sink, sink.fault
        self._place = 0 if sink.fault == "slots share a place" else slot.number
        self._key = f"{slot.job_uid} {slot.sink} {slot.number}"
        self._publisher = sink.sink.open(slot)
        if sink.fault == "takes the number of another opening":
            assert isinstance(self._publisher, SqlitePublisher)
            self._publisher.opened = self._publisher.row()[0]
        self._unpublished: tuple[list[int], Marker] | None = None

    def last_published(self) -> Marker | None:
        """Return the marker."""
        return self._publisher.last_published()

    def publish(self, records: Iterable[pa.RecordBatch], marker: Marker) -> int:
        """Publish with the fault."""
        if self._fault == "works in one process" and multiprocessing.parent_process() is not None:
            raise KeyError("a table of the main process")
        if self._fault == "has an error of its own":
            try:
                return self._publisher.publish(records, marker)
            except FencedError as error:
                raise sqlite3.IntegrityError("the row has changed") from error
        if self._fault.startswith("is silent"):
            return self._publish_in_silence(records, marker)
        if self._fault == "locks all while it reads":
            with self._lock():
                return self._publisher.publish(records, marker)
        if self._fault in ("a check tidies up", "each slot tidies up", "slots share a place"):
            values = self._through_the_place(records)
        elif self._fault == "writes, and removes it later":
            values = self._written(records, marker)
        else:
            values = [n for batch in records for n in batch["n"].to_pylist()]
        if self._fault == "knows what it had last":
            return self._publish_other_than_last(values, marker)
        if self._fault == "commits at its end":
            self._unpublished = values, marker
            return len(values)
        count = self._publisher.publish([numbers(sorted(values) if self._fault == "sorts" else values)], marker)
        return 0 if self._fault == "does not count" else count

    def close(self) -> None:
        """Close the file."""
        if self._unpublished is not None:
            values, marker = self._unpublished
            self._publisher.publish([numbers(values)], marker)
        self._publisher.close()

    def _publish_in_silence(self, records: Iterable[pa.RecordBatch], marker: Marker) -> int:
        try:
            return self._publisher.publish(records, marker)
        except FencedError as error:
            if self._fault == "is silent once":
                self._fault = ""
            raise UnavailableError("there was no answer for 20 s") from error

    @contextmanager
    def _lock(self) -> Iterator[None]:
        lock = Path(f"{self._sink.sink.path}.lock")
        lock.touch(exist_ok=False)  # of one that waits, the wait would be over some time
        try:
            yield
        finally:
            lock.unlink()

    def _through_the_place(self, records: Iterable[pa.RecordBatch]) -> list[int]:
        self._sink.execute("delete from place where slot = ?", self._place)
        for batch in records:
            values = json.dumps(batch["n"].to_pylist())
            self._sink.execute("insert into place select ?, value from json_each(?)", self._place, values)
        return [n for (n,) in self._sink.execute("select n from place where slot = ? order by rowid", self._place)]

    def _written(self, records: Iterable[pa.RecordBatch], marker: Marker) -> list[int]:
        values = []
        for batch in records:
            values += batch["n"].to_pylist()
            rows = json.dumps([{"n": n} for n in batch["n"].to_pylist()])
            insert = "insert into records (slot, record) select ?, value from json_each(?)"
            self._sink.execute(insert, marker.slot, rows)
        self._sink.execute("delete from records where slot = ? and checkpoint_id is null", marker.slot)
        return values

    def _publish_other_than_last(self, values: list[int], marker: Marker) -> int:
        text = json.dumps(values)
        last = self._sink.execute("select n from place where slot = ?", self._key)
        self._publisher.publish([] if last == [(text,)] else [numbers(values)], marker)
        self._sink.execute("delete from place where slot = ?", self._key)
        self._sink.execute("insert into place values (?, ?)", self._key, text)
        return len(values)


@pytest.mark.parametrize(
    ("fault", "promise"),
    [
        ("slots share a place", sink_kit.APART),
        ("each slot tidies up", sink_kit.APART),
        ("a check tidies up", sink_kit.CHECK),
        ("writes, and removes it later", sink_kit.ATOMIC),
        ("commits at its end", sink_kit.ATOMIC),
        ("knows what it had last", sink_kit.ONCE),
        ("sorts", sink_kit.ORDER),
        ("ignores case", sink_kit.MARKER),
        ("cuts names", sink_kit.MARKER),
        ("does not count", sink_kit.COUNT),
        ("takes the number of another opening", sink_kit.ONCE),
        ("has an error of its own", sink_kit.FENCED),
        ("is silent for good", sink_kit.FENCED),
        ("locks all while it reads", sink_kit.APART),
        ("works in one process", sink_kit.WORKS),
    ],
)
def test_faults_are_found(tmp_path: Path, fault: str, promise: str) -> None:
    """The kit says which promise a sink breaks."""
    assert any(item.promise == promise for item in broken_by(tmp_path, fault))


def test_silence_of_a_busy_system_breaks_no_promise(tmp_path: Path) -> None:
    """A publisher that is fenced, and gets no answer at first, is asked again."""
    assert list(broken_by(tmp_path, "is silent once")) == []


def broken_by(folder: Path, fault: str) -> Iterator[sink_kit.BrokenPromise]:
    """Run the kit for a sink with a fault, until no more is read."""
    sink = SqliteSink(str(folder / "out.db"))
    return SinkKit(Faulty(sink, fault), NUMBERS, numbers, sink.numbers).broken()
