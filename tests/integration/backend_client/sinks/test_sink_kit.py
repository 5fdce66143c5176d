"""The conformance kit: the sinks here keep their promises, and a sink that breaks one is found out."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.request import urlopen

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backend_client.sinks.delta import DeltaSink
from backend_client.sinks.kafka import KafkaSink
from backend_client.sinks.parquet import ParquetSink
from backend_client.sinks.postgres import PostgresSink
from backend_client.sinks.protocol import Marker, Sink, Slot, SlotPublisher
from backend_client.testing import sink_kit, sink_openings
from backend_client.testing.sink_kit import SinkKit
from dstl_service.wire import CheckpointRef
from examples.http_sink import HttpSink
from storage.errors import FencedError, UnavailableError
from tests.support.kafka_reader import committed_values
from tools.servers import sqlite_sink
from tools.servers.kafka import KafkaBroker
from tools.servers.postgres import PostgresServer
from tools.servers.programs import ServerProcess
from tools.servers.s3_server import S3Server
from tools.servers.sqlite_sink import SqliteSink

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

NUMBERS, VALUES = pa.schema({"n": pa.int64()}), pa.schema({"value": pa.string()})


def numbers(values: Sequence[int]) -> pa.RecordBatch:
    return pa.record_batch({"n": list(values)}, schema=NUMBERS)


def texts(values: Sequence[int]) -> pa.RecordBatch:
    return pa.record_batch({"value": list(map(str, values))}, schema=VALUES)


@pytest.fixture
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Kill and suspend publishers of slower systems at fewer steps; ``make chaos-sinks`` takes the kit's own numbers.

    SQLite has those here, too.
    """
    if os.environ.get("DSTL_SINK_KIT") != "long":
        monkeypatch.setattr(sink_kit, "_KILLS", 4)
        monkeypatch.setattr(sink_kit, "_SUSPENSIONS", 4)
        monkeypatch.setattr(sink_kit, "_KILLS_WITH_MANY", 2)
        monkeypatch.setattr(sink_openings, "_OPENINGS", 4)


def test_sqlite(tmp_path: Path) -> None:
    """The example of a sink of one's own."""
    sink = SqliteSink(str(tmp_path / "out.db"))
    assert SinkKit(sink, NUMBERS, numbers, sink.numbers).run() == []


def test_two_that_open_a_slot_of_sqlite_at_the_same_time_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has the number of its own opening, whatever comes between that and the first look at the slot."""
    sink = SqliteSink(str(tmp_path / "out.db"))
    slot, marker = Slot("job", "uid", "out", 0, NUMBERS), Marker("uid", 0, CheckpointRef(0, 0, "m"))
    sink.check(NUMBERS, [slot])
    newer: list[SlotPublisher] = []
    row = sqlite_sink.SqlitePublisher.row

    def opened_by_another(publisher: sqlite_sink.SqlitePublisher) -> tuple[int, str | None]:
        monkeypatch.setattr(sqlite_sink.SqlitePublisher, "row", row)
        newer.append(sink.open(slot))
        return row(publisher)

    monkeypatch.setattr(sqlite_sink.SqlitePublisher, "row", opened_by_another)
    with closing(sink.open(slot)) as older:
        assert older.last_published() is None
        with closing(newer[0]):
            assert newer[0].last_published() is None
            assert newer[0].publish([numbers([1])], marker) == 1
        with pytest.raises(FencedError):
            older.publish([numbers([1])], marker)
    assert sink.records() == [{"n": 1}]


@pytest.mark.usefixtures("few_rounds")
@pytest.mark.timeout(400)  # a reader reads the whole topic each time
def test_kafka() -> None:
    """A transaction for each slot and checkpoint."""
    with KafkaBroker(partitions=1) as broker:
        sink = KafkaSink(broker.servers, "out")
        kit = SinkKit(sink, VALUES, texts, lambda: list(map(int, committed_values(broker.servers, "out"))))
        assert kit.run() == []


@pytest.mark.usefixtures("few_rounds")
def test_postgres() -> None:
    """A transaction for each slot and checkpoint."""
    with PostgresServer() as server:
        with psycopg.connect(server.conninfo) as connection:
            connection.execute("create table out (at bigserial, n bigint)")

        def read() -> list[int]:
            with psycopg.connect(server.conninfo) as connection:
                return [n for (n,) in connection.execute("select n from out order by at")]

        assert SinkKit(PostgresSink(server.conninfo, "out"), NUMBERS, numbers, read).run() == []


@pytest.mark.usefixtures("few_rounds")
def test_parquet(tmp_path: Path) -> None:
    """A file for each slot and checkpoint."""

    def read() -> list[int]:
        files = sorted((tmp_path / "out").glob("*.parquet"))
        return [n for path in files for n in pq.read_table(path)["n"].to_pylist()]

    assert SinkKit(ParquetSink((tmp_path / "out").as_uri()), NUMBERS, numbers, read).run() == []


@pytest.mark.usefixtures("few_rounds")
@pytest.mark.parametrize("where", ["disk", "s3"])
def test_delta(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit of the table for each slot and checkpoint; a table has no order."""
    with ExitStack() as servers:
        path = (tmp_path / "out").as_uri()
        if where == "s3":
            server = servers.enter_context(S3Server())
            server.create_bucket("bucket")
            for name, value in server.env().items():
                monkeypatch.setenv(name, value)
            path = "s3://bucket/out"
        sink = DeltaSink(path)

        def read() -> list[int]:
            found: list[int] = sink.table().to_pyarrow_table()["n"].to_pylist()
            return found

        kit = SinkKit(sink, NUMBERS, numbers, read, in_order=False)
        assert kit.run() == []


class Receiver(ServerProcess):
    """The service of the HTTP example."""

    def __init__(self, folder: Path) -> None:
        super().__init__("HTTP receiver", folder / "receiver.log")
        self._path = folder / "records.db"

    def command(self, port: int) -> tuple[Sequence[str], Mapping[str, str]]:
        """Serve the file."""
        return [sys.executable, "-m", "examples.http_receiver", str(self._path), str(port)], {}

    def records(self) -> list[int]:
        """Return the numbers that the service has."""
        with urlopen(f"{self.endpoint_url}/records") as response:
            return [record["n"] for record in json.loads(response.read())]


@pytest.mark.usefixtures("few_rounds")
def test_http(tmp_path: Path) -> None:
    """The example of a service with idempotency keys; a repeated request adds nothing."""
    with Receiver(tmp_path) as receiver:
        sink = HttpSink(receiver.endpoint_url)
        assert SinkKit(sink, NUMBERS, numbers, receiver.records).run() == []
        slot, before = Slot("job", "uid", "out", 0, NUMBERS), receiver.records()
        publisher = sink.open(slot)
        for _ in range(2):
            publisher.publish([numbers([1, 2])], Marker("uid", 0, CheckpointRef(0, 0, "m")))
        assert receiver.records() == [*before, 1, 2]
    with pytest.raises(UnavailableError, match="does not answer"):
        sink.open(slot)


@dataclass(frozen=True, slots=True)
class Careless(Sink):
    """Publishes to SQLite and breaks one promise."""

    sink: SqliteSink
    fault: str

    def check(self, columns: pa.Schema, slots: Sequence[Slot]) -> None:
        """Create the tables."""
        self.sink.check(columns, slots)
        changed = {"checks by opening": "opened = opened + 1", "checks by beginning": "marker = null"}.get(self.fault)
        if changed is not None:
            with closing(sqlite3.connect(self.sink.path)) as connection, connection:
                connection.execute(f"update slots set {changed}")

    def open(self, slot: Slot) -> SlotPublisher:
        """Open the slot."""
        return _CarelessPublisher(self.sink, slot, self.fault)


class _CarelessPublisher(SlotPublisher):
    def __init__(self, sink: SqliteSink, slot: Slot, fault: str) -> None:
        slot = replace(slot, sink="one") if fault == "mixes sinks" else slot
        slot = replace(slot, number=slot.number % 2) if fault == "mixes slots" else slot
        self._sink, self._slot, self._fault = sink, slot, fault
        self._read_before = _marker_of(sink, slot) if fault == "reads before it fences" else None
        if fault == "fences all slots":
            for number in range(3):
                sink.open(replace(slot, number=number)).close()
        self._publisher = sink.open(slot)
        self._opened = self._openings()
        self._newest = self._id()

    def last_published(self) -> Marker | None:
        """Return the marker."""
        if self._fault == "reads before it fences":
            return self._read_before
        found = self._publisher.last_published()
        if self._fault == "forgets branches" and found is not None:
            return replace(found, earlier=())
        if self._fault == "takes what begins alike":
            with closing(sqlite3.connect(self._sink.path)) as connection:
                query = "select max(marker) from slots where sink = ? and job_uid = ? and slot like ? || '%'"
                (text,) = connection.execute(query, (self._slot.sink, self._slot.job_uid, self._slot.number)).fetchone()
            return None if text is None else Marker.parse(text)
        return None if self._fault == "forgets" else found

    def publish(self, records: Iterable[pa.RecordBatch], marker: Marker) -> int:
        """Publish with the fault."""
        if self._fault == "writes first":
            return self._write_first(records, marker)
        if self._fault == "commits twice":
            return self._write_first(list(records), marker)
        if self._fault == "commits in parts":
            return self._commit_parts([row["n"] for batch in records for row in batch.to_pylist()], marker)
        if self._fault in ("looks before", "looks before amid many calls", "compares ids"):
            return self._look_before(list(records), marker)
        if self._fault in ("newest opening wins", "keyed by checkpoint"):
            return self._publish_itself([row["n"] for batch in records for row in batch.to_pylist()], marker)
        if self._fault == "cuts markers":
            count = self._publisher.publish(records, marker)
            with closing(sqlite3.connect(self._sink.path)) as connection:
                connection.execute("update slots set marker = substr(marker, 1, 255)")
                connection.commit()
            return count
        batches = list(_until_error(records)) if self._fault == "keeps a part" else records
        if self._fault == "fences nobody":
            batches = list(batches)
        if self._fault == "reverses":
            batches = [batch.take(list(range(batch.num_rows))[::-1]) for batch in batches]
        if self._fault == "leaves equal records out":
            batches = [numbers(sorted({row["n"] for batch in batches for row in batch.to_pylist()}))]
        if self._fault == "fences nobody" or (self._fault == "fences no marker" and not batches):
            self._publisher = self._sink.open(self._slot)
        count = self._publisher.publish(batches, marker)
        if self._fault == "doubles":
            self._write_first([numbers([row["n"]]) for row in self._sink.records()[-1:]], marker)
        return count

    def close(self) -> None:
        """Close the file."""
        self._publisher.close()

    def _look_before(self, batches: Sequence[pa.RecordBatch], marker: Marker) -> int:
        calls = range(200 if self._fault == "looks before amid many calls" else 0)
        for number in calls:
            json.dumps(number)
        is_newest = self._newest == self._id() if self._fault == "compares ids" else self._openings() == self._opened
        if not is_newest:
            raise FencedError("the slot was opened again")
        self._publisher = self._sink.open(self._slot)
        count = self._publisher.publish(batches, marker)
        for number in calls:
            json.dumps(number)
        return count

    def _commit_parts(self, values: list[int], marker: Marker) -> int:
        count = len(values)
        while len(values) > 1000:
            with closing(sqlite3.connect(self._sink.path)) as connection, connection:
                rows = [(marker.slot, json.dumps({"n": value})) for value in values[:1000]]
                connection.executemany("insert into records (slot, record) values (?, ?)", rows)
            values = values[1000:]
        self._publisher.publish([numbers(values)], marker)
        return count

    def _id(self) -> int | None:
        found = self._publisher.last_published()
        return None if found is None else found.checkpoint.id

    def _publish_itself(self, values: Sequence[int], marker: Marker) -> int:
        """Fence those that opened the slot before the last one that published; or have one place per checkpoint id."""
        key = (self._slot.sink, self._slot.job_uid, self._slot.number)
        with closing(sqlite3.connect(self._sink.path, timeout=30)) as connection, connection:
            connection.execute("begin immediate")
            if self._fault == "keyed by checkpoint":
                place = (marker.slot, marker.checkpoint.id)
                connection.execute("delete from records where (slot, checkpoint_id) = (?, ?)", place)
                newest = self._openings()
            else:
                connection.execute("create table if not exists published (sink, job_uid, slot, opened)")
                query = "select max(opened) from published where (sink, job_uid, slot) = (?, ?, ?)"
                newest = connection.execute(query, key).fetchone()[0] or 0
                connection.execute("insert into published values (?, ?, ?, ?)", (*key, self._opened))
            if newest > self._opened:
                raise FencedError("the slot was published by a newer one")
            rows = [(marker.slot, marker.checkpoint.id, json.dumps({"n": value})) for value in values]
            connection.executemany("insert into records (slot, checkpoint_id, record) values (?, ?, ?)", rows)
            update = "update slots set marker = ? where (sink, job_uid, slot) = (?, ?, ?)"
            connection.execute(update, (marker.to_text(), *key))
        return len(values)

    def _openings(self) -> int:
        key = (self._slot.sink, self._slot.job_uid, self._slot.number)
        with closing(sqlite3.connect(self._sink.path)) as connection:
            query = "select opened from slots where (sink, job_uid, slot) = (?, ?, ?)"
            return int(connection.execute(query, key).fetchone()[0])

    def _write_first(self, records: Iterable[pa.RecordBatch], marker: Marker) -> int:
        count = 0
        with closing(sqlite3.connect(self._sink.path)) as connection:
            for batch in records:
                for row in batch.to_pylist():
                    text = f'{{"n": {row["n"]}}}'
                    connection.execute("insert into records (slot, record) values (?, ?)", (marker.slot, text))
                    count += 1
                connection.commit()
        self._publisher.publish([], marker)
        return count


def _marker_of(sink: SqliteSink, slot: Slot) -> Marker | None:
    with closing(sqlite3.connect(sink.path, timeout=30, isolation_level=None)) as connection:
        connection.execute("begin immediate")  # waits for a publisher within its transaction
        query = "select marker from slots where (sink, job_uid, slot) = (?, ?, ?)"
        row = connection.execute(query, (slot.sink, slot.job_uid, slot.number)).fetchone()
    return None if row is None or row[0] is None else Marker.parse(row[0])


def _until_error(records: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    with suppress(UnavailableError):
        yield from records


HISTORIES = {"newest opening wins": "A publisher opens the slot and reads the marker"}
"""How the histories begin that find a fault in any case; others may find it, depending on the time that calls take."""


@pytest.mark.parametrize(
    ("fault", "promise"),
    [
        ("forgets", sink_kit.MARKER),
        ("forgets branches", sink_kit.MARKER),
        ("mixes sinks", sink_kit.MARKER),
        ("mixes slots", sink_kit.MARKER),
        ("cuts markers", sink_kit.MARKER),
        ("takes what begins alike", sink_kit.MARKER),
        ("keeps a part", sink_kit.ATOMIC),
        ("commits twice", sink_kit.ATOMIC),
        ("commits in parts", sink_kit.ATOMIC),
        ("looks before", sink_kit.ONCE),
        ("looks before amid many calls", sink_kit.ONCE),
        ("compares ids", sink_kit.FENCED),
        ("fences no marker", sink_kit.FENCED),
        ("writes first", sink_kit.ATOMIC),
        ("fences nobody", sink_kit.FENCED),
        ("newest opening wins", sink_kit.ONCE),
        ("keyed by checkpoint", sink_kit.ONCE),
        ("reverses", sink_kit.ORDER),
        ("doubles", sink_kit.ONCE),
        ("checks by opening", sink_kit.CHECK),
        ("checks by beginning", sink_kit.CHECK),
        ("fences all slots", sink_kit.APART),
        ("leaves equal records out", sink_kit.ONCE),
        ("reads before it fences", sink_kit.ONCE),
    ],
)
def test_broken_promises_are_found(tmp_path: Path, fault: str, promise: str) -> None:
    """The kit says which promise was broken, and in which history."""
    sink = SqliteSink(str(tmp_path / "out.db"))
    kit = SinkKit(Careless(sink, fault), NUMBERS, numbers, sink.numbers)
    for item in kit.broken():
        assert item.history
        assert item.seen
        if item.promise == promise and item.history.startswith(HISTORIES.get(fault, "")):
            return
    pytest.fail(f"not found: {promise}")
