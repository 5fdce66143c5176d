"""
Publishes to a table of PostgreSQL: one transaction per slot and checkpoint, with the marker in a table beside it.

Opening a slot raises its number in the markers' table and ends the sessions of its former publishers. A publisher
locks the row and compares the number, so one that was paused can commit nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from backend_client.sinks.option_values import check_text
from backend_client.sinks.postgres.catalog import NEW, OF_SLOT, end_sessions, equality, is_partitioned
from backend_client.sinks.postgres.check import check_still_fits, check_table
from backend_client.sinks.postgres.errors import check_conninfo, refused, replicated, text_of, told
from backend_client.sinks.postgres.markers import MARKER, check_markers, found_markers, stored_marker
from backend_client.sinks.postgres.silence import ended_if_silent, ended_without_answer
from backend_client.sinks.postgres.types import noting_nulls, rows
from backend_client.sinks.protocol import Marker, Sink, Slot, SlotPublisher
from storage.errors import FencedError, InvalidInputError, UnavailableError

_MARKERS = """
create table {} (
  sink text, job_uid text, slot int, opened bigint not null, marker text, primary key (sink, job_uid, slot)
)
"""
# A pooler may give each transaction another session, which other applications had before and get afterwards: each
# transaction sets what it needs, and leaves nothing. Names without a schema are found as in a session of its own, and
# text becomes intervals and arrays as by default.
# Marker and rows must be on the server's disk before the log gives them up. `on` waits for replicas, too, if there are
# synchronous ones; other settings than `off` are the administrator's choice. This holds for opening a slot as well: it
# ends a publisher that waits for its replicas, whose marker is then seen before they have it. That such a wait was
# cancelled is a warning, which does not come where users are told errors only.
# A checkpoint's output takes as long as it takes: a limit that ends it once ends it each time.
_BEGIN = """
set local search_path to pg_catalog, pg_temp; set local synchronous_commit to default;
set local intervalstyle to postgres; set local array_nulls to on; set local client_min_messages to warning;
select set_config('lock_timeout', '20s', true), set_config('idle_in_transaction_session_timeout', '10min', true),
  set_config('synchronous_commit', replace(current_setting('synchronous_commit'), 'off', 'on'), true),
  set_config('statement_timeout', '0', true),
  case when current_setting('transaction_timeout', true) <> '' then set_config('transaction_timeout', '0', true) end;
set local search_path to default
"""
_CONNECTION = {
    # A host that vanished is noticed after half a minute; the kernel's own limits are hours.
    "connect_timeout": "10",
    # The server converts to the database's encoding, and says which character that lacks.
    "client_encoding": "utf8",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "4",
    "tcp_user_timeout": "30000",
}
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

    def __post_init__(self) -> None:
        key: object = self.key
        if isinstance(key, str):
            raise InvalidInputError(f"key must be a tuple of columns, such as ({key!r},)")
        check_conninfo(self.conninfo)
        check_text("table", self.table)
        check_text("markers", self.markers)

    def check(self, columns: pa.Schema, slots: Sequence[Slot]) -> None:
        """Check columns, types and rights; create the table of markers."""
        if self.delete_when is not None and not self.key:
            raise InvalidInputError("delete_when needs key: the columns by which a row is found")
        missing = [name for name in (*self.key, *filter(None, [self.delete_when])) if name not in columns.names]
        if missing:
            raise InvalidInputError(f"the result has no column {', '.join(missing)}; it has {', '.join(columns.names)}")
        if self.delete_when is not None and not pa.types.is_boolean(columns.field(self.delete_when).type):
            given = columns.field(self.delete_when).type
            raise InvalidInputError(f"delete_when names column {self.delete_when}, which is {given}, not boolean")
        with (
            told(self.table, self.conninfo),
            self.connect("dstl-check") as own,
            ended_if_silent(own, self.look),
            own.transaction(),
        ):
            own.execute(_BEGIN)
            table = _name(self.table).as_string(own)
            check_table(own, table, self.table, columns, self.key, self.delete_when)
            self._check_markers(own)

    def open(self, slot: Slot) -> SlotPublisher:
        """Open a slot, and end the sessions of its older publishers."""
        # PostgreSQL cuts longer names off.
        name = "dstl-" + hashlib.sha256(f"{slot.job_uid} {slot.sink} {slot.number}".encode()).hexdigest()[:32]
        with told(self.table, self.conninfo):
            connection = self.connect(name)
            try:
                return _PostgresPublisher(self, slot, connection, name)
            except BaseException:
                connection.close()
                raise

    def connect(self, name: str) -> psycopg.Connection:
        """Return a session of this name; each statement is a transaction, unless one is begun."""
        options: dict[str, Any] = {**_CONNECTION, **conninfo_to_dict(self.conninfo), "application_name": name}
        # A pooler's session may have a prepared statement of this name from another one.
        connection = psycopg.connect(make_conninfo(**options), autocommit=True, prepare_threshold=None)
        # Whatever the server's default is: a check of the table after the rows must see its present state.
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        return connection

    def look(self) -> psycopg.Connection:
        """Return a session that asks whether the server answers, and who has opened a slot."""
        return self.connect("dstl-look")

    def _check_markers(self, connection: psycopg.Connection) -> None:
        markers = _name(self.markers)
        if check_markers(connection, markers.as_string(connection), self.markers) is not None:
            return
        statement = sql.SQL(_MARKERS).format(markers)
        try:
            # It may have been made just now.
            with suppress(psycopg.errors.DuplicateTable, psycopg.errors.UniqueViolation), connection.transaction():
                connection.execute(statement)
        except (psycopg.errors.InsufficientPrivilege, psycopg.errors.InvalidSchemaName) as error:
            text = " ".join(statement.as_string(connection).split())
            raise InvalidInputError(
                f"the table of markers cannot be created: {text_of(error)}; let an administrator run: {text}; and "
                "grant select, insert, update on it to the sink's user"
            ) from error
        check_markers(connection, markers.as_string(connection), self.markers)


class _PostgresPublisher(SlotPublisher):
    def __init__(self, sink: PostgresSink, slot: Slot, connection: psycopg.Connection, name: str) -> None:
        self._sink = sink
        self._key = (slot.sink, slot.job_uid, slot.number)
        self._slot = slot
        self._connection = connection
        # Its commit waits for the replicas, and so for what former publishers committed.
        with ended_if_silent(connection, sink.look), replicated(connection, sink.table), connection.transaction():
            connection.execute(_BEGIN)
            end_sessions(connection, name)
            self._markers = found_markers(connection, _name(sink.markers).as_string(connection), sink.markers)
            row = connection.execute(
                sql.SQL(
                    "insert into {table} as known values (%s, %s, %s, 1, null) on conflict (sink, job_uid, slot) "
                    "do update set opened = known.opened operator(pg_catalog.+) 1 returning opened, {marker}"
                ).format(table=self._markers, marker=MARKER),
                self._key,
            ).fetchone()
        assert row is not None
        self._opened: int = row[0]
        self._marker = stored_marker(row[1], slot, sink.markers)

    def last_published(self) -> Marker | None:
        """Return the marker that was there when the slot was opened."""
        return self._marker

    def publish(self, records: Iterable[pa.RecordBatch], marker: Marker) -> int:
        """Copy the records and replace the marker in one transaction."""
        try:
            connection, sink = self._connection, self._sink
            with (
                told(sink.table, sink.conninfo),
                ended_if_silent(connection, sink.look),
                replicated(connection, sink.table),
                connection.transaction(),
            ):
                connection.execute(_BEGIN)
                self._lock()
                count = self._write(records)
                self._replace(marker.to_text())
        except UnavailableError as error:
            # A newer publisher ends this session; so does a restart of the server.
            if isinstance(error.__cause__, psycopg.OperationalError) and self._is_overtaken():
                raise self._fenced() from error
            raise
        self._marker = marker
        return count

    def close(self) -> None:
        """Close the connection; an open transaction is rolled back."""
        with suppress(psycopg.Error):
            self._connection.close()

    def _lock(self) -> None:
        # A number comes again if a replica takes over that lacks the newest ones, and a pooler keeps this connection.
        query = sql.SQL("select opened, {} from {} where {} for update")
        row = self._connection.execute(query.format(MARKER, self._markers, OF_SLOT), self._key).fetchone()
        marker = None if self._marker is None else self._marker.to_text()
        if row != (self._opened, marker):
            raise self._fenced()

    def _replace(self, marker: str) -> None:
        query = sql.SQL("update {} set marker = %s where {} returning {}")
        row = self._connection.execute(query.format(self._markers, OF_SLOT, MARKER), (marker, *self._key)).fetchone()
        if row != (marker,):
            raise UnavailableError(
                f"table {self._sink.markers} did not take the marker of the output, which would be published again: "
                "drop the trigger or rule that prevents it"
            )

    def _fenced(self) -> FencedError:
        return FencedError(f"slot {self._slot.number} of sink {self._slot.sink!r} was opened by another publisher")

    def _is_overtaken(self) -> bool:
        """Ask in a session of its own; no answer counts as no."""
        query = sql.SQL("select opened from {} where {}")
        with suppress(psycopg.Error), self._sink.look() as connection, ended_without_answer(connection):
            row = connection.execute(query.format(self._markers, OF_SLOT), self._key).fetchone()
            return row is None or row[0] != self._opened
        return False

    def _write(self, records: Iterable[pa.RecordBatch]) -> int:
        count = 0
        # Records from before a change of the query may have other columns.
        for columns, batches in groupby(records, lambda batch: batch.schema):
            names = tuple(columns.names)
            null_keys: set[str] = set()
            self._check_table(columns)  # before anything is written in vain, again and again
            if self._sink.key:
                count += self._merge(names, noting_nulls(batches, self._sink.key, null_keys))
            else:
                count += self._copy(_name(self._sink.table), names, batches)
            self._check_table(columns, null_keys)  # from here on it cannot be altered
        return count

    def _check_table(self, columns: pa.Schema, null_keys: Collection[str] = ()) -> None:
        sink, table = self._sink, _name(self._sink.table).as_string(self._connection)
        check_still_fits(self._connection, table, sink.table, columns, sink.key, sink.delete_when, null_keys)

    def _copy(
        self,
        table: sql.Composable,
        names: tuple[str, ...],
        batches: Iterable[pa.RecordBatch],
        *,
        numbered: bool = False,
    ) -> int:
        statement = sql.SQL("copy {} ({}) from stdin").format(table, _columns([*names, _NUMBER] if numbered else names))
        number = 0
        with self._connection.cursor() as cursor, cursor.copy(statement) as copy:
            for batch in batches:
                for row in rows(batch):
                    try:
                        copy.write_row((*row, number) if numbered else row)
                    except psycopg.DataError as error:
                        raise refused(self._sink.table, names, row, error) from error
                    number += 1
        return number

    def _merge(self, names: tuple[str, ...], batches: Iterable[pa.RecordBatch]) -> int:
        """Upsert and delete by key; of several rows of one key the last one counts."""
        sink = self._sink
        target, new = _name(sink.table), sql.Identifier(*NEW)
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
        }
        execute = self._connection.execute
        execute(
            sql.SQL(
                "create temp table {new} on commit drop as "
                "select {own}{flag}, 0::bigint as {number} from {target} with no data"
            ).format(**parts)
        )
        count = self._copy(new, names, batches, numbered=True)
        last = sql.SQL("select distinct on ({key}) * from {new} order by {key}, {number} desc").format(**parts)
        if sink.delete_when:
            self._delete(last, parts)
        parts["action"] = sql.SQL("update set {set}" if set(own) - set(sink.key) else "nothing").format(**parts)
        statement = (
            "insert into {target} ({own}) select {own} from ({last}) l where not coalesce({deleted}, false) "
            "on conflict ({key}) do {action}"
        )
        execute(sql.SQL(statement).format(last=last, **parts))
        execute(sql.SQL("drop table {new}").format(**parts))
        return count

    def _delete(self, last: sql.Composed, parts: Mapping[str, sql.Composable]) -> None:
        """
        Delete the keys whose last row says so. An index finds no key by a comparison in which nulls are equal.

        Tables that inherit from this one have keys of their own.
        """
        target = parts["target"].as_string(self._connection)
        only = sql.SQL("" if is_partitioned(self._connection, target) else "only")
        deletion = sql.SQL("with l as ({last}) delete from {only} {target} t using l where l.{deleted} and {same}")
        keys = [sql.Identifier(name) for name in self._sink.key]
        has_null = sql.SQL(" or ").join(sql.SQL("{} is null").format(key) for key in keys)
        found = self._connection.execute(
            sql.SQL("select pg_catalog.bool_or({}) from {new}").format(has_null, **parts)
        ).fetchone()
        # By a plain = the types of the key might find an operator of somebody else.
        operators = equality(self._connection, target, self._sink.key)
        one = sql.SQL("t.{0} {1} l.{0}")
        equal = [one.format(sql.Identifier(name), sql.SQL(operators[name])) for name in self._sink.key]
        ways = [equal]
        if found is not None and found[0]:
            or_null = sql.SQL("({1} or t.{0} is null and l.{0} is null)")
            ways.append([or_null.format(key, same) for key, same in zip(keys, equal, strict=True)])
        for way in ways:
            self._connection.execute(deletion.format(last=last, only=only, same=sql.SQL(" and ").join(way), **parts))


def _name(table: str) -> sql.Identifier:
    return sql.Identifier(*table.split("."))


def _columns(names: Iterable[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, names))
