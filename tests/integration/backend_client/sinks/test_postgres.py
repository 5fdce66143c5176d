"""Publishing to a real PostgreSQL server: what other sessions see."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from backend_client.sinks.postgres import PostgresSink
from backend_client.sinks.protocol import Marker, Slot
from dstl_service.wire import CheckpointRef
from storage.errors import FencedError, InvalidInputError, UnavailableError
from tests.waiting import wait_until
from tools.servers.postgres import PostgresServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

_numbers = count()
COLUMNS = pa.schema({"k": pa.string(), "v": pa.int64()})


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as running:
        yield running


@pytest.fixture
def table(server: PostgresServer) -> str:
    """An empty table that no other test uses."""
    name = f"t{next(_numbers)}"
    with psycopg.connect(server.conninfo) as connection:
        connection.execute(f"create table {name} (k text primary key, v bigint check (v < 1000))")
    return name


@pytest.fixture
def slot(table: str) -> Slot:
    return Slot("job", "uid", table, 1, COLUMNS)


@pytest.fixture
def sink(server: PostgresServer, table: str, slot: Slot) -> PostgresSink:
    made = PostgresSink(server.conninfo, table)
    made.check(COLUMNS, [slot])
    return made


def batch(**values: int | None) -> pa.RecordBatch:
    return pa.record_batch({"k": list(values), "v": list(values.values())}, schema=COLUMNS)


def marker(checkpoint_id: int) -> Marker:
    return Marker("uid", 1, CheckpointRef(checkpoint_id, 0, f"m{checkpoint_id}"))


def publish(sink: PostgresSink, slot: Slot, checkpoint_id: int, *batches: pa.RecordBatch) -> int:
    publisher = sink.open(slot)
    try:
        return publisher.publish(batches, marker(checkpoint_id))
    finally:
        publisher.close()


def last(sink: PostgresSink, slot: Slot) -> Marker | None:
    publisher = sink.open(slot)
    try:
        return publisher.last_published()
    finally:
        publisher.close()


def rows(sink: PostgresSink) -> list[tuple[Any, ...]]:
    with psycopg.connect(sink.conninfo) as connection:
        return connection.execute(f"select * from {sink.table} order by 1").fetchall()


def test_rows_and_marker_are_one_transaction(sink: PostgresSink, slot: Slot) -> None:
    """What fails leaves nothing; the marker is the newest published one."""
    assert last(sink, slot) is None
    assert publish(sink, slot, 0, batch(a=1), batch(b=2)) == 2
    assert publish(sink, slot, 1) == 0
    assert (last(sink, slot), rows(sink)) == (marker(1), [("a", 1), ("b", 2)])
    with pytest.raises(UnavailableError, match=r"violates a constraint of the table"):
        publish(sink, slot, 2, batch(c=3), batch(a=4))
    with pytest.raises(UnavailableError, match=r'"t\d+_v_check".*violates a constraint'):
        publish(sink, slot, 2, batch(c=3000))
    assert (last(sink, slot), rows(sink)) == (marker(1), [("a", 1), ("b", 2)])


def test_older_publisher_is_fenced(sink: PostgresSink, slot: Slot) -> None:
    """Whether it stands in its transaction or before it, a newer one does not wait for it."""
    older = sink.open(slot)
    publish(sink, slot, 0, batch(a=1))
    with pytest.raises(FencedError):
        older.publish([batch(b=1)], marker(0))
    older.close()

    def paused() -> Iterator[pa.RecordBatch]:
        yield batch(c=1)
        publish(sink, slot, 1, batch(d=1))
        yield batch(e=1)

    older = sink.open(slot)
    with pytest.raises(FencedError):
        older.publish(paused(), marker(1))
    older.close()
    assert (last(sink, slot), rows(sink)) == (marker(1), [("a", 1), ("d", 1)])


def _publish_and_stand_still(sink: PostgresSink, slot: Slot) -> None:
    def records() -> Iterator[pa.RecordBatch]:
        yield batch(x=1)
        os.kill(os.getpid(), signal.SIGSTOP)

    sink.open(slot).publish(records(), marker(0))


def test_suspended_process_holds_nobody_up(sink: PostgresSink, slot: Slot) -> None:
    """It holds the lock of its slot; the newer publisher ends its session. Resumed, it commits nothing."""
    process = multiprocessing.get_context("spawn").Process(target=_publish_and_stand_still, args=(sink, slot))
    process.start()
    assert process.pid is not None
    stat = Path(f"/proc/{process.pid}/stat")
    wait_until(lambda: stat.read_text(encoding="ascii").split()[2] == "T")
    publish(sink, slot, 0, batch(a=1))
    os.kill(process.pid, signal.SIGCONT)
    process.join(30)
    assert process.exitcode == 1
    assert rows(sink) == [("a", 1)]


def test_upsert_and_delete(server: PostgresServer, table: str, slot: Slot) -> None:
    """Of a key's rows in one batch, and over batches, the last one counts; a flag deletes."""
    columns = pa.schema({"k": pa.string(), "v": pa.int64(), "gone": pa.bool_()})
    sink = PostgresSink(server.conninfo, table, key=("k",), delete_when="gone")
    sink.check(columns, [slot])

    def changes(*items: tuple[str, int, bool | None]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([dict(zip(columns.names, item, strict=True)) for item in items], columns)

    publish(sink, slot, 0, changes(("a", 1, False), ("b", 1, None), ("a", 2, False), ("c", 1, False), ("c", 1, True)))
    assert rows(sink) == [("a", 2), ("b", 1)]
    publish(sink, slot, 1, changes(("b", 1, True)), changes(("b", 5, False), ("d", 1, False)), changes(("a", 1, True)))
    assert rows(sink) == [("b", 5), ("d", 1)]


def test_types(server: PostgresServer, slot: Slot) -> None:
    """Values arrive as they are; structs and maps are JSON."""
    with psycopg.connect(server.conninfo) as connection:
        connection.execute(
            "create table kinds (b bool, i smallint, f double precision, d numeric(10,2), t text, y bytea, "
            "at timestamptz, day date, l bigint[], s jsonb, m jsonb)"
        )
    at, day = datetime(2026, 1, 2, 3, 4, 5, 678901, UTC), date(1969, 12, 31)
    values = {
        "b": pa.array([True, None]),
        "i": pa.array([7, None], pa.int16()),
        "f": pa.array([0.1, float("nan")]),
        "d": pa.array([Decimal("1.50"), None], pa.decimal128(10, 2)),
        "t": pa.array(["\t\\.\nÄ", ""]),
        "y": pa.array([b"\0\\x", None]),
        "at": pa.array([at, None], pa.timestamp("us", "UTC")),
        "day": pa.array([day, None]),
        "l": pa.array([[1, None], None], pa.list_(pa.int64())),
        "s": pa.array([{"x": 1}, None], pa.struct({"x": pa.int64()})),
        "m": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
    }
    batch_of_kinds = pa.record_batch(values)
    sink = PostgresSink(server.conninfo, "public.kinds")
    sink.check(batch_of_kinds.schema, [slot])
    publish(sink, slot, 0, batch_of_kinds)
    with psycopg.connect(server.conninfo) as connection:
        first, second = connection.execute("select * from kinds order by b").fetchall()
    expected = (True, 7, 0.1, Decimal("1.50"), "\t\\.\nÄ", b"\0\\x", at, day, [1, None], {"x": 1})
    assert first[:10] == expected
    assert first[10] in ({"k": 1}, [["k", 1]])
    assert (second[0], second[4]) == (None, "")
    with pytest.raises(UnavailableError, match=r"NUL.*the table cannot hold a value"):
        publish(sink, slot, 1, pa.record_batch({"t": ["a\0b"]}))


def test_lost_server_comes_back(slot: Slot) -> None:
    """The error says what to check; afterwards the marker tells what is missing."""
    with PostgresServer() as own:
        with psycopg.connect(own.conninfo) as connection:
            connection.execute("create table t (k text, v bigint)")
        sink = PostgresSink(own.conninfo, "t")
        sink.check(COLUMNS, [slot])
        publish(sink, slot, 0, batch(a=1))
        publisher = sink.open(slot)
        own.stop(signal.SIGQUIT)
        with pytest.raises((UnavailableError, FencedError)):
            publisher.publish([batch(b=1)], marker(1))
        publisher.close()
        with pytest.raises(UnavailableError, match="check that the server is up"):
            sink.open(slot)
        own.start()
        assert (last(sink, slot), rows(sink)) == (marker(0), [("a", 1)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"table": "nothing"}, r'writes the columns k, v of table nothing: relation "nothing" does not exist'),
        ({"key": ("x",)}, "has no column x; it has k, v"),
        ({"delete_when": "v"}, "delete_when needs key"),
    ],
)
def test_start_is_checked(
    server: PostgresServer, table: str, slot: Slot, options: dict[str, Any], message: str
) -> None:
    """The error says what to create or name."""
    with pytest.raises(InvalidInputError, match=message):
        PostgresSink(**{"conninfo": server.conninfo, "table": table, **options}).check(COLUMNS, [slot])


def test_secrets_are_not_shown() -> None:
    """A password in the connection's text is in no message."""
    assert "secret" not in repr(PostgresSink("host=h password=secret", "t"))
