"""
Publishes to a table of PostgreSQL: one transaction per slot and checkpoint, with the marker in a table beside it.

Opening a slot raises its number in the markers' table and ends the sessions of those who opened it before. A publisher
locks the row and compares the number, so one that was paused can commit nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql
from psycopg.types.json import Jsonb

from backend_client.sinks.protocol import Marker, Sink, Slot, SlotPublisher
from storage.errors import FencedError, InvalidInputError, UnavailableError

_MARKERS = """
create table if not exists {} (
  sink text, job_uid text, slot int, opened bigint not null, marker text, primary key (sink, job_uid, slot)
)
"""
_TIMEOUTS = {"lock_timeout": "20s", "idle_in_transaction_session_timeout": "10min"}
_NUMBER = "dstl_number"


@dataclass(frozen=True, slots=True)
class PostgresSink(Sink):
    """
    A table in PostgreSQL; output columns go to its columns of the same names.

    Args:
        conninfo: Where to connect, as libpq takes it. It is sent to the tasks; better leave the password to a file that
            the executors have (``passfile``).
        table: The table, ``name`` or ``schema.name``.
        key: Columns by which rows replace earlier ones (an upsert); the table needs a unique index on them. Without,
            all rows are added.
        delete_when: A boolean output column, which is not one of the table: rows in which it is true delete their key.
        markers: The table of markers; created if missing.
    """

    conninfo: str = field(repr=False)
    table: str
    key: tuple[str, ...] = ()
    delete_when: str | None = None
    markers: str = "output_markers"

    def check(self, columns: pa.Schema, slots: Sequence[Slot]) -> None:
        """Check columns and rights; create the table of markers."""
        if self.delete_when is not None and not self.key:
            raise InvalidInputError("delete_when needs key: the columns by which a row is found")
        missing = [name for name in (*self.key, *filter(None, [self.delete_when])) if name not in columns.names]
        if missing:
            raise InvalidInputError(f"the result has no column {', '.join(missing)}; it has {', '.join(columns.names)}")
        with _told(self.table), self._connect("dstl-check") as connection:
            wanted = [name for name in columns.names if name != self.delete_when]
            try:
                connection.execute(_select(self.table, wanted))
            except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn) as error:
                raise InvalidInputError(
                    f"the sink writes the columns {', '.join(wanted)} of table {self.table}: {_text(error)}; create it"
                ) from error
            connection.execute(sql.SQL(_MARKERS).format(_name(self.markers)))

    def open(self, slot: Slot) -> SlotPublisher:
        """Open a slot, and end the sessions of its older publishers."""
        # PostgreSQL cuts longer names off.
        digest = hashlib.sha256(f"{slot.job_uid} {slot.sink} {slot.number}".encode()).hexdigest()[:32]
        with _told(self.table):
            return _PostgresPublisher(self, slot, self._connect(f"dstl-{digest}"))

    def _connect(self, name: str) -> psycopg.Connection:
        options = " ".join(f"-c {setting}={value}" for setting, value in _TIMEOUTS.items())
        return psycopg.connect(self.conninfo, application_name=name, options=options, connect_timeout=10)


class _PostgresPublisher(SlotPublisher):
    def __init__(self, sink: PostgresSink, slot: Slot, connection: psycopg.Connection) -> None:
        self._sink = sink
        self._key = (slot.sink, slot.job_uid, slot.number)
        self._slot = slot
        self._connection = connection
        with connection.transaction():
            connection.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid() "
                "and application_name = current_setting('application_name') and usename = current_user"
            )
            row = connection.execute(
                sql.SQL(
                    "insert into {table} as known values (%s, %s, %s, 1, null) on conflict (sink, job_uid, slot) "
                    "do update set opened = known.opened + 1 returning opened, marker"
                ).format(table=_name(sink.markers)),
                self._key,
            ).fetchone()
        assert row is not None
        self._opened: int = row[0]
        self._marker = None if row[1] is None else Marker.parse(row[1])

    def last_published(self) -> Marker | None:
        """Return the marker that was there when the slot was opened."""
        return self._marker

    def publish(self, records: Iterable[pa.RecordBatch], marker: Marker) -> int:
        """Copy the records and replace the marker in one transaction."""
        with _told(self._sink.table), self._connection.transaction():
            self._lock()
            count = self._write(records)
            self._connection.execute(
                sql.SQL("update {} set marker = %s where (sink, job_uid, slot) = (%s, %s, %s)").format(
                    _name(self._sink.markers)
                ),
                (marker.to_text(), *self._key),
            )
        self._marker = marker
        return count

    def close(self) -> None:
        """Close the connection; an open transaction is rolled back."""
        with suppress(psycopg.Error):
            self._connection.close()

    def _lock(self) -> None:
        query = sql.SQL("select opened from {} where (sink, job_uid, slot) = (%s, %s, %s) for update")
        row = self._connection.execute(query.format(_name(self._sink.markers)), self._key).fetchone()
        if row is None or row[0] != self._opened:
            raise FencedError(f"slot {self._slot.number} of sink {self._slot.sink!r} was opened by another publisher")

    def _write(self, records: Iterable[pa.RecordBatch]) -> int:
        count = 0
        for batch in records:
            if not self._sink.key:
                self._copy(_name(self._sink.table), batch)
            else:
                self._merge(batch)
            count += int(batch.num_rows)
        return count

    def _copy(self, table: sql.Composable, batch: pa.RecordBatch, *, numbered: bool = False) -> None:
        columns = [*batch.schema.names, *([_NUMBER] if numbered else [])]
        statement = sql.SQL("copy {} ({}) from stdin").format(table, _columns(columns))
        rows = _rows(batch)
        with self._connection.cursor() as cursor, cursor.copy(statement) as copy:
            for number, row in enumerate(rows):
                copy.write_row((*row, number) if numbered else row)

    def _merge(self, batch: pa.RecordBatch) -> None:
        """Upsert and delete by key; of several rows of one key the last one counts."""
        sink, names = self._sink, batch.schema.names
        target, new = _name(sink.table), sql.Identifier("dstl_new")
        own = [name for name in names if name != sink.delete_when]
        flag = sql.SQL(", false as {}").format(sql.Identifier(sink.delete_when)) if sink.delete_when else sql.SQL("")
        parts: dict[str, sql.Composable] = {
            "new": new,
            "target": target,
            "key": _columns(sink.key),
            "own": _columns(own),
            "flag": flag,
            "number": sql.Identifier(_NUMBER),
            "deleted": sql.Identifier(sink.delete_when) if sink.delete_when else sql.SQL("false"),
            "set": sql.SQL(", ").join(
                sql.SQL("{0} = excluded.{0}").format(sql.Identifier(name)) for name in own if name not in sink.key
            ),
            "same": sql.SQL(" and ").join(
                sql.SQL("t.{0} is not distinct from l.{0}").format(sql.Identifier(name)) for name in sink.key
            ),
        }
        execute = self._connection.execute
        execute(
            sql.SQL(
                "create temp table {new} on commit drop as "
                "select {own}{flag}, 0::bigint as {number} from {target} with no data"
            ).format(**parts)
        )
        self._copy(new, batch, numbered=True)
        last = sql.SQL("select distinct on ({key}) * from {new} order by {key}, {number} desc").format(**parts)
        if sink.delete_when:
            deletion = "with l as ({last}) delete from {target} t using l where l.{deleted} and {same}"
            execute(sql.SQL(deletion).format(last=last, **parts))
        parts["action"] = sql.SQL("update set {set}" if set(own) - set(sink.key) else "nothing").format(**parts)
        statement = (
            "insert into {target} ({own}) select {own} from ({last}) l where not coalesce({deleted}, false) "
            "on conflict ({key}) do {action}"
        )
        execute(sql.SQL(statement).format(last=last, **parts))
        execute(sql.SQL("drop table {new}").format(**parts))


@contextmanager
def _told(table: str) -> Iterator[None]:
    """Turn PostgreSQL's errors into those of the protocol."""
    try:
        yield
    except (psycopg.errors.AdminShutdown, psycopg.errors.IdleInTransactionSessionTimeout) as error:
        raise FencedError(f"the session was ended, maybe by another publisher of the slot: {_text(error)}") from error
    except psycopg.Error as error:
        state = error.sqlstate or ("22" if isinstance(error, psycopg.DataError) else "08")
        advice = {
            "08": "check that the server is up and reachable",
            "22": "the table cannot hold a value of the result: change the column's type, or the query",
            "23": "a row violates a constraint of the table: change the constraint, or remove what it collides with",
            "28": "check user and password",
            "42": "check the table and the rights of the sink's user",
            "53": "the server has no space, memory or connections left",
        }.get(state[:2], "it is tried again")
        raise UnavailableError(f"PostgreSQL refused output for table {table}: {_text(error)}; {advice}") from error


def _text(error: psycopg.Error) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:2])


def _name(table: str) -> sql.Identifier:
    return sql.Identifier(*table.split("."))


def _columns(names: Iterable[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, names))


def _select(table: str, names: Sequence[str]) -> sql.Composed:
    return sql.SQL("select {} from {} limit 0").format(_columns(names), _name(table))


def _rows(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    """Yield rows as psycopg takes them; structs and maps become JSON."""
    lists = []
    for column in batch.columns:
        values = column.to_pylist()
        if pa.types.is_struct(column.type) or pa.types.is_map(column.type):
            values = [None if value is None else Jsonb(value) for value in values]
        lists.append(values)
    return zip(*lists, strict=True)
