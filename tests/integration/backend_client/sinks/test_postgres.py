"""Publishing to a real PostgreSQL server: what other sessions see."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import socket
import threading
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, LiteralString

import psycopg
import pyarrow as pa
import pytest

from backend_client.sinks.postgres import PostgresSink, silence
from backend_client.sinks.postgres import check as postgres_check
from backend_client.sinks.postgres import sink as postgres_sink
from backend_client.sinks.protocol import Marker, Slot
from dstl_service.wire import CheckpointRef
from storage.errors import CorruptDataError, FencedError, InvalidInputError, UnavailableError
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
    """A failed publish leaves nothing; the marker is the newest published one."""
    assert last(sink, slot) is None
    assert publish(sink, slot, 0, batch(a=1), batch(b=2)) == 2
    assert publish(sink, slot, 1) == 0
    assert (last(sink, slot), rows(sink)) == (marker(1), [("a", 1), ("b", 2)])
    with pytest.raises(UnavailableError, match=r"violates a constraint of the table"):
        publish(sink, slot, 2, batch(c=3), batch(a=4))
    with pytest.raises(UnavailableError, match=r'"t\d+_v_check".*violates a constraint') as refused:
        publish(sink, slot, 2, batch(c=3000))
    assert "3000" not in str(refused.value)  # rows do not belong into logs
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
    """The last of a key's rows counts, in one batch and over batches; a flag deletes."""
    columns = pa.schema({"k": pa.string(), "v": pa.int64(), "gone": pa.bool_()})
    sink = PostgresSink(server.conninfo, table, key=("k",), delete_when="gone")
    sink.check(columns, [slot])

    def changes(*items: tuple[str, int, bool | None]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([dict(zip(columns.names, item, strict=True)) for item in items], columns)

    publish(sink, slot, 0, changes(("a", 1, False), ("b", 1, None), ("a", 2, False), ("c", 1, False), ("c", 1, True)))
    assert rows(sink) == [("a", 2), ("b", 1)]
    publish(sink, slot, 1, changes(("b", 1, True)), changes(("b", 5, False), ("d", 1, False)), changes(("a", 1, True)))
    assert rows(sink) == [("b", 5), ("d", 1)]


@pytest.mark.parametrize(
    ("definition", "is_nullable", "fits"),
    [
        ("(k text unique, v bigint)", True, False),
        ("(k text unique, v bigint)", False, True),
        ("(k text unique nulls not distinct, v bigint)", True, True),
        ("(k text not null unique, v bigint)", True, True),
    ],
)
def test_null_is_a_key_like_others_or_refused(
    server: PostgresServer, slot: Slot, definition: str, is_nullable: bool, fits: bool
) -> None:
    """A plain unique index finds no row whose key is null: each batch would add one instead of replacing it."""
    name = f"nulls{next(_numbers)}"
    with psycopg.connect(server.conninfo) as connection:
        connection.execute(f"create table {name} {definition}")
    columns = pa.schema([pa.field("k", pa.string(), is_nullable), pa.field("v", pa.int64())])
    sink = PostgresSink(server.conninfo, name, key=("k",))
    if not fits:
        with pytest.raises(InvalidInputError, match=r"key is null, .*: alter table \w+ alter column k set not null"):
            sink.check(columns, [slot])
        return
    sink.check(columns, [slot])
    keys = [None, "a"] if "not distinct" in definition else ["b", "a"]
    for number in (1, 2):
        publish(sink, slot, number, pa.record_batch({"k": keys, "v": [number, number]}, schema=COLUMNS))
    assert sorted(rows(sink), key=repr) == sorted(((key, 2) for key in keys), key=repr)


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
    assert first == (True, 7, 0.1, Decimal("1.50"), "\t\\.\nÄ", b"\0\\x", at, day, [1, None], {"x": 1}, {"k": 1})
    assert (second[0], second[4]) == (None, "")
    with pytest.raises(UnavailableError, match=r"column t of table public.kinds cannot hold the character NUL"):
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
        ({"table": "nothing"}, "table nothing does not exist; create it with the columns k text, v int8"),
        ({"key": ("x",)}, "has no column x; it has k, v"),
        ({"delete_when": "v"}, "delete_when needs key"),
        ({"key": ("k",), "delete_when": "v"}, "delete_when names column v, which is int64, not boolean"),
        ({"key": ("k", "v")}, r"needs a unique index on exactly k, v, without a condition .*; it has: k\. alter"),
        ({"key": "k"}, r"key must be a tuple of columns, such as \('k',\)"),
        ({"conninfo": "host=h password=se cret"}, "conninfo has a wrong form"),
        ({"markers": "unlogged_markers"}, "table unlogged_markers is unlogged or temporary"),
        ({"markers": "none.markers"}, r"markers cannot be created: .* let an administrator run: create table"),
    ],
)
def test_start_is_checked(
    server: PostgresServer, table: str, slot: Slot, options: dict[str, Any], message: str
) -> None:
    """The error says what to create or name, and quotes no part of a password."""
    with psycopg.connect(server.conninfo) as connection:
        connection.execute("create unlogged table if not exists unlogged_markers (k text)")
    with pytest.raises(InvalidInputError, match=message) as raised:
        PostgresSink(**{"conninfo": server.conninfo, "table": table, **options}).check(COLUMNS, [slot])
    assert "cret" not in str(raised.value)


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ("table {} (k text)", r"table \w+ lacks v int8; it has k: add them"),
        ("table {} (k text, v smallint, w int not null)", "columns w of table .* are not in the result; it has k, v"),
        ("table {} (k int, v int)", "column k is string in the result and int4 in table .*, or alter it to text"),
        ("table {} (k text, v text)", "column v is int64 in the result and text in table .*, or alter it to int8"),
        ("table {} (k text, v bigint generated always as (length(k)) stored)", "column v of table .* is generated"),
        (
            "table {} (k text primary key, v bigint generated always as identity)",
            "column v of table .* is always generated, so no row of an upsert can name it; generate it by default",
        ),
        ("unlogged table {} (k text, v int)", r"unlogged or temporary: .*; alter table \w+ set logged"),
        ("view {} as select ''::text k, 1 v", "is a view or foreign table"),
    ],
)
def test_table_is_checked(server: PostgresServer, slot: Slot, definition: str, message: str) -> None:
    """A table with which each publish would fail, or a crash lose rows, is refused at the start."""
    name = f"bad{next(_numbers)}"
    with psycopg.connect(server.conninfo) as connection:
        connection.execute(f"create {definition.format(name)}")
    with pytest.raises(InvalidInputError, match=message):
        PostgresSink(server.conninfo, name, key=("k",) if "primary key" in definition else ()).check(COLUMNS, [slot])


def test_index_finds_the_same_keys_as_the_table(server: PostgresServer, slot: Slot) -> None:
    """Where the table takes keys for equal that the index tells apart, or the other way round, rows would be lost."""
    columns = pa.schema([pa.field("k", pa.string(), nullable=False), pa.field("v", pa.int64())])
    with psycopg.connect(server.conninfo) as connection:
        connection.execute(
            "create collation no_case (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
        )
        for name, of_column, of_index in (("c1", "no_case", '"C"'), ("c2", '"C"', "no_case"), ("c3", "no_case", "")):
            connection.execute(f"create table {name} (k text not null collate {of_column}, v bigint)")
            collate = f"collate {of_index}" if of_index else ""
            connection.execute(f"create unique index on {name} (k {collate}) include (v)")
        connection.execute('create table c4 (k text not null, v bigint); create unique index on c4 (k collate "C")')
    for name in ("c1", "c2"):
        with pytest.raises(InvalidInputError, match=r"unique index on exactly k, .* the columns' own collations"):
            PostgresSink(server.conninfo, name, key=("k",)).check(columns, [slot])
    for name, expected in (("c3", [("A", 2)]), ("c4", [("A", 2), ("a", 1)])):
        sink = PostgresSink(server.conninfo, name, key=("k",))
        sink.check(columns, [slot])
        publish(sink, replace(slot, sink=name), 0, batch(a=1, A=2).cast(columns))
        assert rows(sink) == expected


def test_index_compares_keys_as_their_type_does(server: PostgresServer, slot: Slot) -> None:
    """An index of another operator class tells keys apart that are equal by their type: one of them would be lost."""
    columns = pa.schema([pa.field("k", pa.string(), nullable=False), pa.field("v", pa.int64())])
    with psycopg.connect(server.conninfo) as connection:
        connection.execute("create extension if not exists citext; create domain o0_key as citext")
        classes = {
            "o1": ("citext", "text_ops"),
            "o2": ("o0_key", "text_ops"),
            "o3": ("citext", ""),
            "o4": ("text", "text_pattern_ops"),
            "o5": ("varchar(9)", ""),
        }
        for name, (type_, class_) in classes.items():
            connection.execute(f"create table {name} (k {type_} not null, v bigint)")
            connection.execute(f"create unique index on {name} (k {class_})")
    for name in ("o1", "o2"):
        with pytest.raises(InvalidInputError, match=r"unique index on exactly k, .* and operator classes"):
            PostgresSink(server.conninfo, name, key=("k",)).check(columns, [slot])
    for name, expected in (("o3", [("A", 2)]), ("o4", [("A", 2), ("a", 1)]), ("o5", [("A", 2), ("a", 1)])):
        sink = PostgresSink(server.conninfo, name, key=("k",))
        sink.check(columns, [slot])
        publish(sink, replace(slot, sink=name), 0, batch(a=1, A=2).cast(columns))
        assert rows(sink) == expected


def test_rows_are_deleted_by_the_keys_own_index(server: PostgresServer, slot: Slot) -> None:
    """Other unique indexes that have a column of the key may compare it in other ways."""
    columns = pa.schema([pa.field("k", pa.string(), nullable=False), pa.field("v", pa.int64()), ("gone", pa.bool_())])
    with psycopg.connect(server.conninfo) as connection:
        connection.execute("create extension if not exists citext")
        connection.execute("create table p1 (k citext primary key, v bigint)")
        connection.execute(
            "create unique index on p1 (k text_ops, v); create unique index on p1 (k text_ops) where v > 5"
        )
    sink = PostgresSink(server.conninfo, "p1", key=("k",), delete_when="gone")
    sink.check(columns, [slot])
    publish(sink, slot, 0, pa.record_batch([["a", "b"], [1, 2], [False, False]], schema=columns))
    publish(sink, slot, 1, pa.record_batch([["A"], [None], [True]], schema=columns))
    assert rows(sink) == [("b", 2)]


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    "index",
    [
        "create unique index on {name} (k collate {name}_no_case)",
        "alter table {name} add unique (k) deferrable",
        "alter table {name} drop constraint {name}_pkey; create unique index on {name} (k collate {name}_no_case)",
    ],
)
def test_a_second_index_replaces_no_rows_of_other_keys(
    server: PostgresServer, slot: Slot, index: str, *, is_late: bool
) -> None:
    """An upsert uses all unique indexes of the key's columns; one may be made while the query runs."""
    name = f"keys{next(_numbers)}"
    sink = PostgresSink(server.conninfo, name, key=("k",))
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        locale = "provider = icu, locale = 'und-u-ks-level2', deterministic = false"
        connection.execute(f"create collation {name}_no_case ({locale})")
        connection.execute(f"create table {name} (k text primary key, v bigint)")
        if is_late:
            sink.check(COLUMNS, [slot])
            publish(sink, slot, 0, batch(a=1))
        connection.execute(index.format(name=name))
        with pytest.raises((InvalidInputError, UnavailableError), match="unique index on exactly k"):
            sink.check(COLUMNS, [slot])
        if is_late:
            with pytest.raises(UnavailableError, match=r"was altered, .* unique index on exactly k"):
                publish(sink, slot, 1, batch(A=2))
            assert rows(sink) == [("a", 1)]


def test_partitions_must_be_kept_as_their_table(server: PostgresServer, slot: Slot) -> None:
    """A crash empties an unlogged partition of a logged table; another server commits rows without their marker."""
    with psycopg.connect(server.conninfo) as connection:
        for name in ("halves", "far_halves"):
            connection.execute(f"create table {name} (k text, v bigint) partition by list (k)")
            connection.execute(f"create table {name}_a partition of {name} for values in ('a')")
        connection.execute("create table deep partition of halves for values in ('b') partition by range (v)")
        connection.execute("create unlogged table deeper partition of deep default")
        connection.execute("create foreign data wrapper nothing")
        connection.execute("create server elsewhere foreign data wrapper nothing")
        connection.execute("create foreign table far partition of far_halves default server elsewhere")
    sink = PostgresSink(server.conninfo, "halves")
    with pytest.raises(InvalidInputError, match=r"table public\.deeper is unlogged .* table public\.deeper set logged"):
        sink.check(COLUMNS, [slot])
    with psycopg.connect(server.conninfo) as connection:
        connection.execute("alter table deeper set logged")
    sink.check(COLUMNS, [slot])
    with pytest.raises(InvalidInputError, match=r"partition public\.far of table far_halves is on another server"):
        PostgresSink(server.conninfo, "far_halves").check(COLUMNS, [slot])


def test_decimals_that_would_be_rounded_are_refused(server: PostgresServer, slot: Slot) -> None:
    """PostgreSQL silently rounds to the digits of the column; also in arrays and domains."""
    with psycopg.connect(server.conninfo) as connection:
        connection.execute("create domain money2 as numeric(10, 2)")
        connection.execute(
            "create table prices (a numeric(10, 2), b numeric(10, 2)[], c money2, d numeric, e numeric(9))"
        )
    sink = PostgresSink(server.conninfo, "prices")
    exact = pa.decimal128(10, 2)
    sink.check(pa.schema({"a": exact, "b": pa.list_(exact), "c": exact, "d": pa.decimal128(38, 18)}), [slot])
    more = pa.decimal128(10, 3)
    for name, given in (("a", more), ("b", pa.list_(more)), ("c", more), ("e", exact)):
        with pytest.raises(InvalidInputError, match=f"column {name} is .* in table prices: cast it in the query, or"):
            sink.check(pa.schema({name: given}), [slot])


def test_times_that_would_be_rounded_are_refused(server: PostgresServer, slot: Slot) -> None:
    """As decimals: by a key of whole seconds, one of two rows within a second would replace the other."""
    with psycopg.connect(server.conninfo) as connection:
        connection.execute("create domain moment as timestamptz(3)")
        connection.execute(
            "create table times (a timestamptz(3), b timestamp(0)[], c moment, d interval day, e interval(3), "
            "f timestamptz, g timestamptz(6), h interval, i interval day to second, j timestamptz[], "
            "k interval second(6))"
        )
    sink = PostgresSink(server.conninfo, "times")
    at, span = pa.timestamp("us", "UTC"), pa.duration("us")
    sink.check(pa.schema({"f": at, "g": at, "h": span, "i": span, "j": pa.list_(at), "k": span}), [slot])
    for name, given in (("a", at), ("b", pa.list_(pa.timestamp("us"))), ("c", at), ("d", span), ("e", span)):
        with pytest.raises(InvalidInputError, match=f"column {name} is .* digits after the point.* in table times"):
            sink.check(pa.schema({name: given}), [slot])


def test_domains_and_own_types_fit(server: PostgresServer, slot: Slot) -> None:
    """A domain counts as its base type; text goes into all that PostgreSQL reads from text."""
    with psycopg.connect(server.conninfo) as connection:
        connection.execute("create domain small as int check (value < 9)")
        connection.execute("create domain smaller as small")
        connection.execute("create type mood as enum ('good')")
        connection.execute("create table own (s smaller, m mood, u uuid, a smaller[])")
    uid = "00000000-0000-0000-0000-000000000001"
    batch = pa.record_batch({"s": [1], "m": ["good"], "u": [uid]})
    sink = PostgresSink(server.conninfo, "own")
    sink.check(batch.schema, [slot])
    assert publish(sink, slot, 0, batch) == 1
    with pytest.raises(UnavailableError, match=r'enum mood: "bad".*column m; the table cannot'):
        publish(sink, slot, 1, pa.record_batch({"m": ["bad"]}))


def test_user_needs_no_more_rights_than_it_uses(
    server: PostgresServer, table: str, sink: PostgresSink, slot: Slot
) -> None:
    """Adding rows needs no right to read them; missing rights are named before the query starts."""
    user = f"u{next(_numbers)}"
    with psycopg.connect(server.conninfo) as connection:
        connection.execute(f"create role {user} login")
        connection.execute(f"grant insert on {table} to {user}")
    theirs = PostgresSink(server.conninfo.replace(f"user={server.user}", f"user={user}"), table)
    with pytest.raises(InvalidInputError, match="grant select, insert, update on table output_markers"):
        theirs.check(COLUMNS, [slot])
    with psycopg.connect(server.conninfo) as connection:
        connection.execute(f"grant select, insert, update on output_markers to {user}")
    theirs.check(COLUMNS, [slot])
    theirs.open(slot).close()
    assert publish(theirs, slot, 0, batch(a=1)) == 1
    with pytest.raises(InvalidInputError, match="grant select, update, delete on table"):
        PostgresSink(theirs.conninfo, table, key=("k",), delete_when="v").check(
            pa.schema({"k": pa.string(), "v": pa.bool_()}), [slot]
        )


@pytest.mark.parametrize("rights", ["login", "login superuser"])
def test_markers_of_a_stranger_are_refused(server: PostgresServer, table: str, slot: Slot, rights: str) -> None:
    """A user who may create tables in the schema could give the table of markers a trigger with the sink's rights."""
    stranger, user = (f"u{next(_numbers)}" for _ in range(2))
    markers = f"markers{next(_numbers)}"
    PostgresSink(server.conninfo, table, markers=markers).check(COLUMNS, [slot])
    with psycopg.connect(server.conninfo) as connection:
        connection.execute(f"create role {stranger}; create role {user} {rights}; grant insert on {table} to {user}")
        connection.execute(f"alter table {markers} owner to {stranger}; grant all on {markers} to public")
    conninfo = server.conninfo.replace(f"user={server.user}", f"user={user}")
    sink = PostgresSink(conninfo, table, markers=markers)
    with pytest.raises(InvalidInputError, match=f"{markers} of the sink's markers belongs to user {stranger}, whose"):
        sink.check(COLUMNS, [slot])
    with psycopg.connect(server.conninfo) as connection:
        connection.execute(f"alter table {markers} owner to {user}")
    sink.check(COLUMNS, [slot])


@pytest.mark.parametrize("shadowed", ["markers", "table"])
def test_tables_in_a_schema_of_the_users_name_are_refused(
    server: PostgresServer, table: str, slot: Slot, shadowed: str
) -> None:
    """Names are looked for there first. Who may create schemas could have a trigger of his run while the query does."""
    stranger, user = (f"u{next(_numbers)}" for _ in range(2))
    names = {"table": table, "markers": f"markers{next(_numbers)}"}
    columns = {"table": "k text, v bigint", "markers": "sink text, job_uid text, slot int, opened bigint, marker text"}
    PostgresSink(server.conninfo, table, markers=names["markers"]).check(COLUMNS, [slot])
    conninfo = server.conninfo.replace(f"user={server.user}", f"user={user}")
    sink = PostgresSink(conninfo, table, markers=names["markers"])
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        connection.execute(
            f"create role {stranger}; create role {user} login;"
            f"grant create on database {server.database} to {stranger};"
            f"grant select, insert, update on {table}, {names['markers']} to {user}"
        )
        sink.check(COLUMNS, [slot])
        publish(sink, slot, 0, batch(a=1))
        connection.execute(
            f"set role {stranger}; create schema {user}; grant all on schema {user} to public;"
            f"create table {user}.{names[shadowed]} ({columns[shadowed]});"
            f"create table {user}.called (who text); grant all on all tables in schema {user} to public;"
            f"create function {user}.f() returns trigger language plpgsql as "
            f"'begin insert into {user}.called values (current_user); return new; end';"
            f"create trigger f before insert or update on {user}.{names[shadowed]} for each row "
            f"execute function {user}.f(); reset role"
        )
        with pytest.raises(UnavailableError, match=f"has the name of the sink's user and belongs to user {stranger}"):
            publish(sink, slot, 1, batch(b=1))
        with pytest.raises(InvalidInputError, match="name the table with the schema that is meant"):
            sink.check(COLUMNS, [slot])
        assert connection.execute(f"select * from {user}.called").fetchall() == []
        named = PostgresSink(conninfo, f"public.{table}", markers=f"public.{names['markers']}")
        named.check(COLUMNS, [slot])
        assert publish(named, slot, 1, batch(b=1)) == 1
        assert connection.execute(f"select * from public.{table}").fetchall() == [("a", 1), ("b", 1)]


def test_replaced_table_of_markers_is_not_used(server: PostgresServer, table: str, slot: Slot) -> None:
    """Whoever makes it again while the query runs is not trusted more than at the start."""
    stranger, markers = f"u{next(_numbers)}", f"markers{next(_numbers)}"
    sink = PostgresSink(server.conninfo, table, markers=markers)
    sink.check(COLUMNS, [slot])
    publish(sink, slot, 0, batch(a=1))
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        connection.execute(f"create role {stranger}; alter table {markers} owner to {stranger}")
        with pytest.raises(UnavailableError, match=f"altered or replaced: .* belongs to user {stranger}"):
            publish(sink, slot, 1, batch(b=1))
        connection.execute(f"drop table {markers}")
        with pytest.raises(UnavailableError, match="no longer exists: restore it"):
            publish(sink, slot, 1, batch(b=1))


def test_functions_of_a_stranger_are_not_called(slot: Slot) -> None:
    """C33: who may create functions where names are found would run code with the rights of the sink's user."""
    planted = {
        "unnest(text[])": "setof text",
        "unnest(int2[])": "setof int2",
        "ltrim(name, text)": "text",
        "to_jsonb(pg_index)": "jsonb",
        "to_jsonb(pg_collation)": "jsonb",
        "has_database_privilege(name, text)": "bool",
        "pg_terminate_backend(int)": "bool",
        "same(varchar, varchar)": "bool",
    }
    columns = pa.schema([pa.field("k", pa.string()), pa.field("v", pa.int64()), pa.field("gone", pa.bool_())])
    with PostgresServer() as own:
        with psycopg.connect(own.conninfo) as connection:
            connection.execute("create role sink login; create role stranger login; create table called (who text)")
            connection.execute("grant create on schema public to public; grant insert on called to public")
            connection.execute("create table t (k varchar(9), v bigint, unique nulls not distinct (k))")
            connection.execute("alter table t owner to sink")
        with psycopg.connect(own.conninfo.replace(f"user={own.user}", "user=stranger")) as connection:
            for function, result in planted.items():
                body = f"insert into called values (current_user); select null::{result.removeprefix('setof ')}"
                connection.execute(f"create function {function} returns {result} language sql as $$ {body} $$")
            connection.execute("create operator = (leftarg = varchar, rightarg = varchar, function = same)")
        sink = PostgresSink(own.conninfo.replace(f"user={own.user}", "user=sink"), "t", key=("k",), delete_when="gone")
        sink.check(columns, [slot])
        for number, gone in enumerate((False, True)):
            found = [{"k": "a", "v": 1, "gone": gone}, {"k": None, "v": 2, "gone": True}]
            assert publish(sink, slot, number, pa.RecordBatch.from_pylist(found, schema=columns)) == 2
        sink.open(slot).close()
        with psycopg.connect(own.conninfo) as connection:
            assert connection.execute("select k, v from t").fetchall() == []
            assert connection.execute("select who from called").fetchall() == []


def test_search_path_that_names_own_schemas_last(slot: Slot) -> None:
    """There, a stranger's table takes no records, and a stranger's functions do not run as the sink's user."""
    planted = {
        "bool_or(bool)": "bool",
        "equal(text, text)": "bool",
        "equal(int, int2)": "bool",
        "sum(int8, int)": "int8",
    }
    columns = pa.schema([pa.field("k", pa.string()), pa.field("v", pa.int64()), pa.field("gone", pa.bool_())])
    with PostgresServer() as own:
        with psycopg.connect(own.conninfo) as connection:
            connection.execute("create role sink login; create role stranger login; create table called (who text)")
            connection.execute("grant create on schema public to public; grant insert on called to public")
            connection.execute("create table t (k text primary key, v bigint); alter table t owner to sink")
            connection.execute("alter role sink set search_path to public, pg_catalog, pg_temp")
        with psycopg.connect(own.conninfo.replace(f"user={own.user}", "user=stranger")) as connection:
            for function, result in planted.items():
                body = f"insert into called values (current_user); select null::{result}"
                connection.execute(f"create function {function} returns {result} language sql as $$ {body} $$")
            connection.execute("create operator = (leftarg = text, rightarg = text, function = equal)")
            connection.execute("create operator = (leftarg = int, rightarg = int2, function = equal)")
            connection.execute("create operator + (leftarg = int8, rightarg = int, function = sum)")
            connection.execute("create table dstl_new (k text, v bigint, gone bool, dstl_number bigint)")
            connection.execute("grant all on dstl_new to public")
        sink = PostgresSink(own.conninfo.replace(f"user={own.user}", "user=sink"), "t", key=("k",), delete_when="gone")
        sink.check(columns, [slot])
        for number, gone in enumerate((False, True, False)):
            found = [{"k": "a", "v": number, "gone": gone}]
            assert publish(sink, slot, number, pa.RecordBatch.from_pylist(found, schema=columns)) == 1
        with psycopg.connect(own.conninfo) as connection:
            assert connection.execute("select k, v from t").fetchall() == [("a", 2)]
            assert connection.execute("select count(*) from dstl_new").fetchone() == (0,)
            assert connection.execute("select who from called").fetchall() == []


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:p@secret@host/db",
        "postgresql://u:secret/p@host:5432/db",
        "postgres://u:12/secret@host/db",
        "postgresql://u:p@secret/x@host/db",
    ],
)
def test_errors_tell_no_part_of_a_password_in_a_url(url: str) -> None:
    """Its password ends at the first @ or /; the server's name in errors would be the rest of it."""
    with pytest.raises(InvalidInputError, match="write %40 for @") as caught:
        PostgresSink(url, "t")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["sslmode", "connect_timeout", "keepalives", "target_session_attrs", "port"])
@pytest.mark.parametrize("form", ["host=127.0.0.1 {}=s3cret", "postgresql://u@127.0.0.1/d?{}=s3cret"])
def test_errors_tell_no_value_of_an_option(name: str, form: str, slot: Slot) -> None:
    """It may be the password, given to the wrong option; not even the cause tells it."""
    with pytest.raises(UnavailableError, match="PostgreSQL refused output") as caught:
        PostgresSink(form.format(name), "t").check(COLUMNS, [slot])
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))


def test_errors_tell_what_the_server_advises(server: PostgresServer, slot: Slot) -> None:
    """On one line, since the driver's log shows the first one of an error: a trigger's text may have several."""
    table = f"t{next(_numbers)}"
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        connection.execute(f"create table {table} (k text, v bigint) partition by range (v)")
        sink = PostgresSink(server.conninfo, table)
        sink.check(COLUMNS, [slot])
        with pytest.raises(UnavailableError, match=r"no partition .* for row; Partition key .* \(v\) = \(7\)"):
            publish(sink, slot, 0, batch(a=7))
        connection.execute(f"""
            create function f{table}() returns trigger language plpgsql as
            $$ begin raise exception E'closed\n  since May' using hint = E'ask\nthe owner'; end $$;
            create trigger closed before insert on {table} for each row execute function f{table}();
            create table {table}_1 partition of {table} default
        """)
        with pytest.raises(UnavailableError, match="closed since May; ask the owner; publishing is retried"):
            publish(sink, slot, 0, batch(a=7))


def test_text_with_an_at_sign_is_no_second_password() -> None:
    """Only in a URL may it be the rest of a password."""
    PostgresSink("host=h dbname=a@b password=p@q", "t")
    PostgresSink("postgresql://u:p%40q@host/db", "t")


def test_a_server_that_hangs_is_given_up(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host still takes what is sent, so the session would wait for ever; a long statement is waited for."""
    monkeypatch.setattr(silence, "_LOOK_EVERY_S", 0.2)
    with PostgresServer() as own:
        with psycopg.connect(own.conninfo) as connection:
            connection.execute("create table t (k text, v bigint)")
            connection.execute(
                "create function slow() returns trigger language plpgsql as "
                "'begin perform pg_sleep(1); return new; end'"
            )
            connection.execute("create trigger slow before insert on t for each statement execute function slow()")
        sink = PostgresSink(f"{own.conninfo} connect_timeout=2", "t")
        sink.check(COLUMNS, [slot])
        assert publish(sink, slot, 0, batch(a=1)) == 1
        publisher = sink.open(slot)
        with psycopg.connect(own.conninfo) as connection:
            query = "select pid from pg_stat_activity where application_name like 'dstl-%'"
            processes = [own.pid, *(pid for (pid,) in connection.execute(query))]
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(UnavailableError, match="check that the server is up and reachable"):
                publisher.publish([batch(a=2)], marker(1))
        finally:
            for pid in processes:
                os.kill(pid, signal.SIGCONT)
        publisher.close()
        assert publish(sink, slot, 1, batch(a=2)) == 1
        assert rows(sink) == [("a", 1), ("a", 2)]


class _Pooler(threading.Thread):
    """
    Passes sessions on to a server, without what is to be hidden.

    When `server_hangs` is set it logs clients in, and nothing else is answered.
    """

    def __init__(self, port: int, hidden: bytes = b"") -> None:
        super().__init__(daemon=True)
        self._port = port
        self._hidden = hidden
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.server_hangs = threading.Event()

    def run(self) -> None:
        while True:
            client, _ = self._listening.accept()
            server = socket.create_connection(("127.0.0.1", self._port))
            threading.Thread(target=self._pass_on, args=(client, server), daemon=True).start()

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        is_logged_in = False
        with client, server:
            while True:
                for ready in select.select([client, server], [], [])[0]:
                    data = ready.recv(1 << 16)
                    if not data:
                        return
                    if is_logged_in and self.server_hangs.is_set():
                        continue
                    is_logged_in |= ready is server and data.endswith(b"Z\0\0\0\x05I")  # ready for a query
                    (server if ready is client else client).sendall(data.replace(self._hidden, b""))


def test_a_server_that_hangs_behind_a_pooler_is_given_up(
    server: PostgresServer, sink: PostgresSink, slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pooler logs sessions in without its server, so that they are there says nothing; also at a start."""
    monkeypatch.setattr(silence, "_LOOK_EVERY_S", 0.2)
    monkeypatch.setattr(silence, "_ANSWER_S", 1.0)
    pooler = _Pooler(server.port)
    pooler.start()
    through = PostgresSink(server.conninfo.replace(f"port={server.port}", f"port={pooler.port}"), sink.table)
    publisher = through.open(slot)
    pooler.server_hangs.set()
    with pytest.raises(UnavailableError, match="check that the server is up and reachable"):
        publisher.publish([batch(a=1)], marker(0))
    publisher.close()
    with pytest.raises(UnavailableError, match="check that the server is up and reachable"):
        through.check(COLUMNS, [slot])
    pooler.server_hangs.clear()
    assert publish(through, slot, 0, batch(a=1)) == 1


def test_nothing_is_left_in_the_sessions_of_a_pooler(
    server: PostgresServer, slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go to other applications: those would get the sink's limits, or find its prepared statements."""
    connect, made = PostgresSink.connect, list[psycopg.Connection]()

    def remember(self: PostgresSink, name: str) -> psycopg.Connection:
        made.append(connect(self, name))
        return made[-1]

    monkeypatch.setattr(PostgresSink, "connect", remember)
    with psycopg.connect(server.conninfo) as connection:
        connection.execute(
            "create table shared (k text, v bigint, limits text default "
            "current_setting('lock_timeout') || ' ' || current_setting('idle_in_transaction_session_timeout'))"
        )
    sink = PostgresSink(server.conninfo, "shared")
    sink.check(COLUMNS, [slot])
    publisher = sink.open(slot)
    changes_of_columns = [batch(a=1), pa.record_batch({"k": ["b"]})] * 5
    publisher.publish(changes_of_columns, marker(0))
    left = (
        "select current_setting('lock_timeout'), current_setting('idle_in_transaction_session_timeout'), "
        "(select count(*) from pg_prepared_statements)"
    )
    assert made[-1].execute(left).fetchone() == ("0", "0", 0)
    publisher.close()
    assert {limits for *_, limits in rows(sink)} == {"20s 10min"}


def begin_sessions_with(monkeypatch: pytest.MonkeyPatch, statements: LiteralString) -> None:
    """Execute statements in each session of a sink before the sink has it, as others do in those of a pooler."""
    connect = PostgresSink.connect

    def connect_to_used(self: PostgresSink, name: str) -> psycopg.Connection:
        connection = connect(self, name)
        connection.execute(statements)
        return connection

    monkeypatch.setattr(PostgresSink, "connect", connect_to_used)


def test_what_others_left_in_the_sessions_of_a_pooler_does_not_count(
    server: PostgresServer, slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the settings of another application rows would go to its table, and values would become others."""
    left = "set search_path to others; set intervalstyle to sql_standard; set array_nulls to off; "
    begin_sessions_with(monkeypatch, left + "set synchronous_commit to local")
    with psycopg.connect(server.conninfo) as connection:
        connection.execute("create schema others")
        for name in ("others.both", "public.both"):
            connection.execute(
                f"create table {name} (d interval, n text[], how text default current_setting('synchronous_commit'))"
            )
    # Poolers before PgBouncer 1.20 do not tell their clients of this setting.
    pooler = _Pooler(server.port, b"S\0\0\0\x1fIntervalStyle\0sql_standard\0")
    pooler.start()
    conninfo = server.conninfo.replace(f"port={server.port}", f"port={pooler.port}")
    value = {"d": timedelta(days=-1, hours=5), "n": ["a", None]}
    records = pa.RecordBatch.from_pylist(
        [value], schema=pa.schema({"d": pa.duration("us"), "n": pa.list_(pa.string())})
    )
    sink = PostgresSink(conninfo, "both", markers="public.of_both")
    sink.check(records.schema, [slot])
    publish(sink, slot, 0, records)
    monkeypatch.undo()
    with psycopg.connect(server.conninfo) as connection:
        assert connection.execute("select count(*) from others.both").fetchall() == [(0,)]
        assert connection.execute("select * from public.both").fetchall() == [(*value.values(), "on")]


def test_publisher_of_before_a_failover_is_fenced(
    server: PostgresServer, sink: PostgresSink, slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A replica takes over that lacks the slot's last opening, so the next one has the same number.

    A pooler keeps the connection of a suspended publisher, and no session of it is there to be ended.
    """
    connect, numbers = PostgresSink.connect, count()
    monkeypatch.setattr(PostgresSink, "connect", lambda self, name: connect(self, f"pooler-{next(numbers)}-{name}"))
    publish(sink, slot, 0, batch(a=1))
    older = sink.open(slot)
    with psycopg.connect(server.conninfo) as connection:
        connection.execute("update output_markers set opened = opened - 1 where sink = %s", [slot.sink])
    newer = sink.open(slot)
    assert newer.publish([batch(b=2)], marker(1)) == 1
    with pytest.raises(FencedError):
        older.publish([batch(b=2)], marker(1))
    assert newer.publish([batch(c=3)], marker(2)) == 1
    older.close()
    newer.close()
    assert rows(sink) == [("a", 1), ("b", 2), ("c", 3)]


def test_user_options_hold(server: PostgresServer, slot: Slot) -> None:
    """Options in the connection's text are not replaced by the sink's own."""
    with psycopg.connect(server.conninfo) as connection:
        connection.execute("create schema own")
        connection.execute("create table own.here (k text, v bigint)")
    sink = PostgresSink(f"{server.conninfo} options='-c search_path=own'", "here")
    sink.check(COLUMNS, [slot])
    assert publish(sink, slot, 0, batch(a=1)) == 1


def test_published_output_survives_a_crash(slot: Slot) -> None:
    """Where commits need not wait for the disk, those of the sink do: the log gives up what is published."""
    with PostgresServer() as own:
        with psycopg.connect(own.conninfo, autocommit=True) as connection:
            connection.execute("create table t (k text, v bigint)")
            connection.execute("alter system set wal_writer_delay = '10s'")
            connection.execute("select pg_reload_conf()")
            connection.execute("alter database postgres set synchronous_commit = off")
        sink = PostgresSink(own.conninfo, "t")
        sink.check(COLUMNS, [slot])
        publish(sink, slot, 0, batch(a=1))
        own.stop(signal.SIGQUIT)
        own.start()
        assert (last(sink, slot), rows(sink)) == (marker(0), [("a", 1)])


def test_each_transaction_waits_for_the_disk(
    server: PostgresServer, slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pooler may run it in another session than the one that was set up."""
    begin_sessions_with(monkeypatch, "reset all")
    with psycopg.connect(server.conninfo) as connection:
        connection.execute(
            "create table pooled (k text, v bigint, how text default current_setting('synchronous_commit'))"
        )
    sink = PostgresSink(f"{server.conninfo} options='-c synchronous_commit=off'", "pooled")
    sink.check(COLUMNS, [slot])
    publish(sink, slot, 0, batch(a=1))
    with psycopg.connect(server.conninfo) as connection:
        assert connection.execute("select how from pooled").fetchall() == [("on",)]


def test_ended_session_is_not_a_newer_publisher(server: PostgresServer, sink: PostgresSink, slot: Slot) -> None:
    """An administrator's restart ends sessions, too: the publisher is told to try again, not that it is fenced."""

    def ended() -> Iterator[pa.RecordBatch]:
        yield batch(a=1)
        with psycopg.connect(server.conninfo) as connection:
            connection.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity "
                "where application_name ~ '^dstl-[0-9a-f]{32}$'"
            )
        yield batch(b=1)

    publisher = sink.open(slot)
    with pytest.raises(UnavailableError):
        publisher.publish(ended(), marker(0))
    publisher.close()
    assert rows(sink) == []


def test_marker_counts_when_replicas_have_it(slot: Slot) -> None:
    """It is seen before they do, once a newer publisher has ended the one that waits for them."""
    with PostgresServer() as own, psycopg.connect(own.conninfo, autocommit=True) as connection:
        connection.execute("create table t (k text, v bigint)")
        connection.execute("alter database postgres set synchronous_commit = off")
        sink = PostgresSink(own.conninfo, "t")
        sink.check(COLUMNS, [slot])
        with closing(sink.open(slot)) as older, ThreadPoolExecutor() as threads:
            with _without_replica(own, connection, threads) as probe:
                overtaken = threads.submit(older.publish, [batch(a=1)], marker(0))
                waiting = wait_until(lambda: _waiting_for_replicas(connection) - probe)
                found = threads.submit(last, sink, slot)
                wait_until(lambda: found.done() or _waiting_for_replicas(connection) - probe - waiting)
                is_early = found.done()
            assert (is_early, found.result()) == (False, marker(0))
            assert isinstance(overtaken.exception(), FencedError | UnavailableError)
        assert rows(sink) == [("a", 1)]


@pytest.mark.parametrize("told", ["notice", "error"])
def test_cancelled_wait_for_replicas_publishes_nothing(slot: Slot, told: str) -> None:
    """
    An administrator may cancel a commit's wait: the server has committed, and only warns that no replica has it.

    It also warns where users are told errors only.
    """
    with PostgresServer() as own, psycopg.connect(own.conninfo, autocommit=True) as connection:
        connection.execute("create table t (k text, v bigint)")
        connection.execute(f"alter database postgres set client_min_messages = {told}")
        sink = PostgresSink(own.conninfo, "t")
        sink.check(COLUMNS, [slot])
        with (
            closing(sink.open(slot)) as publisher,
            ThreadPoolExecutor() as threads,
            _without_replica(own, connection, threads) as probe,
        ):
            for work in (partial(publisher.publish, [batch(a=1)], marker(0)), partial(sink.open, slot)):
                cancelled = threads.submit(work)
                waiting = wait_until(lambda: _waiting_for_replicas(connection) - probe)
                connection.execute("select pg_cancel_backend(pid) from unnest(%s) pid", [[*waiting]])
                with pytest.raises(UnavailableError, match="did not wait until synchronous replicas have the output"):
                    cancelled.result()
        assert last(sink, slot) == marker(0)
        assert rows(sink) == [("a", 1)]


@contextmanager
def _without_replica(
    server: PostgresServer, connection: psycopg.Connection, threads: ThreadPoolExecutor
) -> Iterator[set[int]]:
    """Have commits wait for a synchronous replica that is away; yield the sessions that wait from the beginning."""
    connection.execute("alter system set synchronous_standby_names = 'away'")
    connection.execute("select pg_reload_conf()")
    threads.submit(_commit_until_it_waits, server.conninfo)
    probe = wait_until(lambda: _waiting_for_replicas(connection))
    try:
        yield probe
    finally:
        connection.execute("select pg_terminate_backend(pid) from unnest(%s) pid", [[*probe]])
        connection.execute("alter system reset synchronous_standby_names")
        connection.execute("select pg_reload_conf()")


def _commit_until_it_waits(conninfo: str) -> None:
    """The server applies its new setting in the background. Ends with its session."""
    with psycopg.connect(conninfo, application_name="dstl-probe", autocommit=True) as connection:
        connection.execute("set synchronous_commit = on")
        while True:
            connection.execute("select txid_current()")


def _waiting_for_replicas(connection: psycopg.Connection) -> set[int]:
    query = "select pid from pg_stat_activity where wait_event = 'SyncRep' and application_name like 'dstl-%'"
    return {pid for (pid,) in connection.execute(query)}


def test_opening_a_slot_ends_no_other_sessions(
    server: PostgresServer, sink: PostgresSink, slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Poolers may give the server's sessions one name for all clients, or add the address of their client to it."""
    connect, name = PostgresSink.connect, "the pooler"

    def rename(self: PostgresSink, given: str) -> psycopg.Connection:
        connection = connect(self, given)
        connection.execute("select set_config('application_name', %s, false)", [name.format(given)])
        return connection

    monkeypatch.setattr(PostgresSink, "connect", rename)
    application = psycopg.connect(server.conninfo, application_name=name, autocommit=True)
    with application, closing(sink.open(slot)) as publisher:
        sink.open(replace(slot, number=2)).close()
        application.execute("select 1")
        assert publisher.publish([batch(a=1)], marker(0)) == 1
    name = "{} - 127.0.0.1:5000"
    with closing(sink.open(slot)) as older:
        name = "{} - 127.0.0.1:5001"
        with pytest.raises(FencedError):
            older.publish(_while_published(sink, slot), marker(1))
    assert rows(sink) == [("a", 1), ("b", 2)]


def _while_published(sink: PostgresSink, slot: Slot) -> Iterator[pa.RecordBatch]:
    yield batch(x=1)
    publish(sink, slot, 1, batch(b=2))
    yield batch(y=1)


class _LosesAnswers(threading.Thread):
    """A proxy that passes a COMMIT on, waits until readers see what it did, and hangs up instead of answering."""

    def __init__(self, port: int, is_seen: Callable[[], bool]) -> None:
        super().__init__(daemon=True)
        self._port, self._is_seen = port, is_seen
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]

    def run(self) -> None:
        client, _ = self._listening.accept()
        with self._listening, client, socket.create_connection(("127.0.0.1", self._port)) as server:
            while True:
                for ready in select.select([client, server], [], [])[0]:
                    data = ready.recv(1 << 16)
                    if not data:
                        return
                    (server if ready is client else client).sendall(data)
                    if ready is client and b"COMMIT" in data and self._is_commit():
                        return

    def _is_commit(self) -> bool:
        # The first one is that of opening the slot.
        deadline = time.monotonic() + 0.5
        while not self._is_seen() and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._is_seen()


def test_lost_answer_of_a_commit(server: PostgresServer, sink: PostgresSink, slot: Slot) -> None:
    """Whether it was published is not known to the publisher, but told by the marker."""
    proxy = _LosesAnswers(server.port, lambda: bool(rows(sink)))
    proxy.start()
    through = PostgresSink(server.conninfo.replace(f"port={server.port}", f"port={proxy.port}"), sink.table)
    publisher = through.open(slot)
    with pytest.raises(UnavailableError):
        publisher.publish([batch(a=1)], marker(0))
    publisher.close()
    proxy.join(10)
    assert (last(sink, slot), rows(sink)) == (marker(0), [("a", 1)])


def test_large_publish_has_several_batches(server: PostgresServer, table: str, slot: Slot) -> None:
    """They are one COPY; batches from before a change of the query may lack columns."""
    sink = PostgresSink(server.conninfo, table, key=("k",))
    batches = [batch(**{f"k{number}": number % 1000 for number in range(n, n + 500)}) for n in range(0, 5_000, 250)]
    assert publish(sink, slot, 0, *batches, pa.record_batch({"k": ["k0", "new"]})) == 10_002
    found = dict(rows(sink))
    assert (len(found), found["k0"], found["k5249"], found["new"]) == (5251, 0, 249, None)


@pytest.mark.parametrize(("encoding", "refused"), [("LATIN1", "€"), ("SQL_ASCII", None)])
def test_databases_of_any_encoding(server: PostgresServer, slot: Slot, encoding: str, refused: str | None) -> None:
    """The server converts text; a character that the database lacks is an error that names it."""
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        options = f"encoding {encoding} template template0 lc_collate 'C' lc_ctype 'C'"
        connection.execute(f"create database {encoding} {options}")
    conninfo = server.conninfo.replace("dbname=postgres", f"dbname={encoding.lower()}")
    with psycopg.connect(conninfo) as connection:
        connection.execute("create table t (k text, v bigint)")
    sink = PostgresSink(conninfo, "t")
    sink.check(COLUMNS, [slot])
    assert publish(sink, slot, 0, batch(é=1)) == 1
    if refused is not None:
        with pytest.raises(UnavailableError, match=r"has no equivalent in encoding .*; the table cannot hold a value"):
            publish(sink, slot, 1, batch(**{refused: 1}))


def test_secrets_are_not_shown() -> None:
    """A password in the connection's text is in no message."""
    assert "secret" not in repr(PostgresSink("host=h password=secret", "t"))


@pytest.mark.parametrize(
    ("kind", "altered", "value"),
    [
        ("numeric(20,6)", "numeric(20,2)", pa.array([Decimal("1.123456")], pa.decimal128(20, 6))),
        ("timestamptz", "timestamp", pa.array([datetime(2026, 1, 1, tzinfo=UTC)], pa.timestamp("us", "Asia/Tokyo"))),
        ("timestamp", "timestamptz", pa.array([datetime(2026, 1, 1)], pa.timestamp("us"))),
        ("timestamp", "date", pa.array([datetime(2026, 1, 1, 23)], pa.timestamp("us"))),
        ("bigint", "real", pa.array([2**53 + 1])),
        ("bytea", "text", pa.array([b"a"])),
    ],
)
@pytest.mark.parametrize("key", [(), ("k",)])
def test_a_table_that_was_altered_takes_no_other_values(
    server: PostgresServer, slot: Slot, kind: str, altered: str, value: pa.Array, key: tuple[str, ...]
) -> None:
    """The server would round them or move them in time; what is unpublished waits until the column is altered back."""
    name = f"altered{next(_numbers)}"
    rows_of = pa.record_batch({"k": pa.array([1]), "v": value})
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        connection.execute(f"create table {name} (k bigint primary key, v {kind})")
        sink = PostgresSink(server.conninfo, name, key)
        sink.check(rows_of.schema, [slot])
        connection.execute(f"alter table {name} alter column v type {altered} using null")
        with pytest.raises(UnavailableError, match=rf"table {name} was altered, .*: column v is .* in the result and "):
            publish(sink, slot, 0, rows_of)
        assert (rows(sink), last(sink, slot)) == ([], None)
        connection.execute(f"alter table {name} alter column v type {kind} using null")
    assert publish(sink, slot, 0, rows_of) == 1


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_a_table_that_is_altered_just_before_the_copy_takes_nothing(
    server: PostgresServer, slot: Slot, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    """From the first row on nobody can alter it; so the last look is after the rows, and sees what is there then."""
    name = f"altered{next(_numbers)}"
    half = pa.record_batch({"v": pa.array([Decimal("0.5")], pa.decimal128(9, 1))})
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        connection.execute(f"create table {name} (v numeric(9, 1))")
        connection.execute(f"create user {name}_user")
        connection.execute(f"alter user {name}_user set default_transaction_isolation = '{isolation}'")
        connection.execute(f"grant all on {name} to {name}_user")
        connection.execute(f"grant create on schema public to {name}_user")
        conninfo = server.conninfo.replace("user=postgres", f"user={name}_user")
        sink = PostgresSink(conninfo, name, markers=f"{name}_markers")
        check = postgres_check.check_still_fits

        def check_and_alter(*args: Any) -> None:
            check(*args)
            monkeypatch.setattr(postgres_sink, "check_still_fits", check)
            connection.execute(f"alter table {name} alter column v type numeric(9)")

        sink.check(half.schema, [slot])
        monkeypatch.setattr(postgres_sink, "check_still_fits", check_and_alter)
        with pytest.raises(UnavailableError, match="numeric with 0 digits"):
            publish(sink, slot, 0, half)
    assert rows(sink) == []


def test_a_table_that_became_unlogged_takes_nothing(server: PostgresServer, slot: Slot) -> None:
    """The same for a partition that came later: a crash would empty it, and the log has given the rows up."""
    name = f"later{next(_numbers)}"
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        connection.execute(f"create table {name} (k text, v bigint) partition by range (v)")
        connection.execute(f"create table {name}_1 partition of {name} for values from (0) to (10)")
        sink = PostgresSink(server.conninfo, name)
        sink.check(COLUMNS, [slot])
        connection.execute(f"create unlogged table {name}_2 partition of {name} for values from (10) to (20)")
        with pytest.raises(UnavailableError, match=rf"table public\.{name}_2 is unlogged"):
            publish(sink, slot, 0, batch(a=11))
        connection.execute(f"alter table {name}_2 set logged")
    assert publish(sink, slot, 0, batch(a=11)) == 1


@pytest.mark.parametrize("key", [(), ("k",)])
@pytest.mark.parametrize("kind", ["view", "foreign table"])
def test_a_table_that_became_something_else_takes_nothing(
    server: PostgresServer, slot: Slot, kind: str, key: tuple[str, ...]
) -> None:
    """Behind a view may be an unlogged table; another server commits rows without their marker."""
    name = f"moved{next(_numbers)}"
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        connection.execute(f"create table {name} (k text primary key, v bigint)")
        sink = PostgresSink(server.conninfo, name, key)
        sink.check(COLUMNS, [slot])
        connection.execute(f"alter table {name} rename to {name}_before")
        connection.execute(f"create unlogged table {name}_far (k text primary key, v bigint)")
        if kind == "view":
            connection.execute(f"create view {name} as select * from {name}_far")
        else:
            connection.execute(f"create foreign data wrapper {name}")
            connection.execute(f"create server {name} foreign data wrapper {name}")
            connection.execute(f"create foreign table {name} (k text, v bigint) server {name}")
        with pytest.raises(UnavailableError, match=rf"was altered, .*: {name} is a view or foreign table"):
            publish(sink, slot, 0, batch(a=1))
        assert connection.execute(f"select from {name}_far").fetchall() == []
        connection.execute(f"drop {kind} {name}; alter table {name}_before rename to {name}")
    assert publish(sink, slot, 0, batch(a=1)) == 1


def test_null_that_became_a_possible_key_waits(server: PostgresServer, slot: Slot) -> None:
    """A key may be null since the table was altered, and its index finds none: each batch would add another row."""
    name = f"nulls{next(_numbers)}"
    sink = PostgresSink(server.conninfo, name, key=("k",))
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        connection.execute(f"create table {name} (k text not null unique, v bigint)")
        sink.check(COLUMNS, [slot])
        nulls = [pa.record_batch({"k": [None], "v": [number]}, schema=COLUMNS) for number in (1, 2)]
        with pytest.raises(UnavailableError, match="violates not-null constraint"):
            publish(sink, slot, 0, nulls[0])
        connection.execute(f"alter table {name} alter column k drop not null")
        with pytest.raises(UnavailableError, match=r"does not find rows whose key is null, .*nulls not distinct"):
            publish(sink, slot, 0, nulls[0])
        connection.execute(f"alter table {name} drop constraint {name}_k_key")
        connection.execute(f"create unique index on {name} (k) nulls not distinct")
    for number, rows_of in enumerate(nulls):
        publish(sink, slot, number, rows_of)
    assert rows(sink) == [(None, 2)]


def test_rows_that_the_user_no_longer_sees_are_not_left_undeleted(server: PostgresServer, slot: Slot) -> None:
    """Row-level security that comes later hides rows from `delete`, without an error."""
    name = f"hidden{next(_numbers)}"
    columns = pa.schema({"k": pa.string(), "v": pa.int64(), "gone": pa.bool_()})
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        connection.execute(f"create table {name} (k text primary key, v bigint)")
        connection.execute(f"create user {name}_user")
        connection.execute(f"grant all on {name} to {name}_user")
        connection.execute(f"grant create on schema public to {name}_user")
        conninfo = server.conninfo.replace("user=postgres", f"user={name}_user")
        sink = PostgresSink(conninfo, name, key=("k",), delete_when="gone", markers=f"{name}_markers")
        sink.check(columns, [slot])
        publish(sink, slot, 0, pa.record_batch({"k": ["a"], "v": [1], "gone": [False]}, columns))
        connection.execute(f"alter table {name} enable row level security")
        connection.execute(f"create policy p on {name} using (v > 1) with check (true)")
        deletion = pa.record_batch({"k": ["a"], "v": [1], "gone": [True]}, columns)
        with pytest.raises(UnavailableError, match=r"row-level security .* deletes only the rows that it sees"):
            publish(sink, slot, 1, deletion)
        connection.execute(f"alter user {name}_user bypassrls")
        publish(sink, slot, 1, deletion)
        assert connection.execute(f"select * from {name}").fetchall() == []


@pytest.mark.parametrize("has_null", [False, True])
def test_keys_to_delete_are_found_by_the_index(server: PostgresServer, slot: Slot, has_null: bool) -> None:
    """A comparison of each key with each row would take minutes for a few thousand keys; null is a key as well."""
    name = f"many{next(_numbers)}"
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        connection.execute(f"create table {name} (k text, v bigint, unique nulls not distinct (k))")
        connection.execute(f"insert into {name} select i, i from generate_series(1, 100000) i")
        connection.execute(f"insert into {name} values (null, 0)")
        connection.execute(f"analyze {name}")
    columns = pa.schema({"k": pa.string(), "v": pa.int64(), "gone": pa.bool_()})
    sink = PostgresSink(server.conninfo, name, key=("k",), delete_when="gone")
    sink.check(columns, [slot])
    gone = [str(number) for number in range(1, 5001)]
    keys = [*gone[:5], None] if has_null else gone
    began_s = time.monotonic()
    publish(sink, slot, 0, pa.record_batch({"k": keys, "v": [0] * len(keys), "gone": [True] * len(keys)}, columns))
    assert time.monotonic() - began_s < 10
    left = rows(sink)
    assert len(left) == 100_001 - len(keys)
    assert ((None, 0) in left) != has_null


@pytest.mark.parametrize("kind", ["child", "partition"])
def test_rows_of_tables_that_inherit_are_not_deleted(server: PostgresServer, slot: Slot, kind: str) -> None:
    """They have keys of their own, unlike partitions, which are the table."""
    name = f"parent{next(_numbers)}"
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        is_partition = kind == "partition"
        connection.execute(
            f"create table {name} (k text primary key, v bigint)" + " partition by list (k)" * is_partition
        )
        connection.execute(
            f"create table {name}_below partition of {name} default"
            if is_partition
            else f"create table {name}_below () inherits ({name})"
        )
        connection.execute(f"insert into {name} values ('a', 1)")
        if not is_partition:
            connection.execute(f"insert into {name}_below values ('a', 2)")
    columns = pa.schema({"k": pa.string(), "v": pa.int64(), "gone": pa.bool_()})
    sink = PostgresSink(server.conninfo, name, key=("k",), delete_when="gone")
    sink.check(columns, [slot])
    publish(sink, slot, 0, pa.record_batch({"k": ["a"], "v": [0], "gone": [True]}, columns))
    assert rows(sink) == ([] if is_partition else [("a", 2)])


def test_sessions_are_ended_where_another_user_is_set(server: PostgresServer, table: str, slot: Slot) -> None:
    """They belong to the user who logs in; those for whom passwords are made have the rights of a common one."""
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        connection.execute(
            f"create user {table}_login; create role {table}_owner; grant {table}_owner to {table}_login"
        )
        connection.execute(f"alter user {table}_login set role to {table}_owner")
        connection.execute(
            f"create schema {table}_s authorization {table}_owner; alter table {table} set schema {table}_s"
        )
        connection.execute(f"alter table {table}_s.{table} owner to {table}_owner")
    conninfo = server.conninfo.replace("user=postgres", f"user={table}_login")
    sink = PostgresSink(conninfo, f"{table}_s.{table}", markers=f"{table}_s.markers")
    sink.check(COLUMNS, [slot])
    with closing(sink.open(slot)) as older, pytest.raises(FencedError):
        older.publish(_while_published(sink, slot), marker(1))
    with psycopg.connect(server.conninfo) as connection:
        assert connection.execute(f"select k, v from {table}_s.{table}").fetchall() == [("b", 2)]


@pytest.mark.parametrize("is_left_by_others", [False, True])
def test_a_publish_may_take_longer_than_the_users_statements(
    server: PostgresServer, table: str, slot: Slot, monkeypatch: pytest.MonkeyPatch, is_left_by_others: bool
) -> None:
    """Repeated, it would take as long again; another application may have left its limit in a pooler's session."""

    def slow() -> Iterator[pa.RecordBatch]:
        yield batch(a=1)
        time.sleep(1)
        yield batch(b=2)

    sink = PostgresSink(server.conninfo, table)
    if is_left_by_others:
        begin_sessions_with(monkeypatch, "set statement_timeout to '300ms'")
    else:
        sink = replace(sink, conninfo=f"{server.conninfo} options='-c statement_timeout=300ms'")
    sink.check(COLUMNS, [slot])
    with closing(sink.open(slot)) as publisher:
        assert publisher.publish(slow(), marker(0)) == 2


def test_rows_whose_marker_is_not_taken_are_not_published(server: PostgresServer, table: str, slot: Slot) -> None:
    """A trigger may leave the update of the marker out, without an error: the rows would be published again."""
    sink = PostgresSink(server.conninfo, table, markers=f"{table}_markers")
    sink.check(COLUMNS, [slot])
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        connection.execute(
            f"create function {table}_keep() returns trigger language plpgsql as 'begin return null; end'; "
            f"create trigger keep before update of marker on {table}_markers "
            f"for each row execute function {table}_keep()"
        )
        with pytest.raises(UnavailableError, match="did not take the marker"):
            publish(sink, slot, 0, batch(a=1))
        assert (last(sink, slot), rows(sink)) == (None, [])
        connection.execute(f"drop trigger keep on {table}_markers")
    assert publish(sink, slot, 0, batch(a=1)) == 1


def test_text_of_any_length_is_no_marker(server: PostgresServer, sink: PostgresSink, slot: Slot) -> None:
    """Whoever may write to the table puts 50 MB into a row: they are not fetched, and the error names the table."""
    publish(sink, slot, 0, batch(a=1))
    tracemalloc.start()
    try:
        with closing(sink.open(slot)) as publisher, psycopg.connect(server.conninfo, autocommit=True) as connection:
            connection.execute("update output_markers set marker = repeat('x', 50000000) where sink = %s", [slot.sink])
            with pytest.raises(FencedError):
                publisher.publish([batch(b=1)], marker(1))
        with pytest.raises(CorruptDataError, match=r"output_markers has no marker for slot 1 .* restore the marker"):
            sink.open(slot)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
    assert rows(sink) == [("a", 1)]


def test_documented_function_writes_a_batch_once(server: PostgresServer) -> None:
    """The function of docs/sinks.md, which makes `foreachBatch` idempotent."""
    text = Path("docs/sinks.md").read_text(encoding="utf-8").partition("## foreachBatch")[2]
    names: dict[str, Any] = {"connect": lambda: psycopg.connect(server.conninfo)}
    exec(text.partition("```python\n")[2].partition("```")[0], names)
    with psycopg.connect(server.conninfo) as connection:
        connection.execute("create table batches (id bigint primary key)")
        connection.execute("create table totals (k text, v bigint)")
    for batch_id in (0, 1, 1):
        names["write"](SimpleNamespace(collect=lambda number=batch_id: [("a", number), ("b", number)]), batch_id)
    with psycopg.connect(server.conninfo) as connection:
        assert connection.execute("select v from totals order by v").fetchall() == [(0,), (0,), (1,), (1,)]
