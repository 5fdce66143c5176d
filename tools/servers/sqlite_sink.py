"""A sink in a SQLite file: a transactional system that needs no server."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from backend_client.sinks.protocol import Marker, Sink, Slot, SlotPublisher
from storage.errors import FencedError, UnavailableError

_TABLES = """
create table if not exists slots (sink text, job_uid text, slot int, opened int, marker text,
  primary key (sink, job_uid, slot));
create table if not exists records (number integer primary key, slot int, checkpoint_id int, record text);
"""


@dataclass(frozen=True, slots=True)
class SqliteSink(Sink):
    """Publishes rows as JSON into a file of this path; no slot can be opened while the file ``<path>.down`` exists."""

    path: str

    def check(self, columns: pa.Schema, slots: Sequence[Slot]) -> None:
        """Create the tables."""
        with closing(_connect(self.path)) as connection:
            connection.executescript(_TABLES)

    def open(self, slot: Slot) -> SlotPublisher:
        """Count the slot's openings; the last one may publish."""
        if Path(f"{self.path}.down").exists():
            raise UnavailableError(f"the table {self.path} is switched off; remove {self.path}.down")
        return SqlitePublisher(self.path, slot)

    def records(self) -> list[dict[str, Any]]:
        """Return all published records, in the order in which they were published."""
        with closing(_connect(self.path)) as connection:
            return [json.loads(text) for (text,) in connection.execute("select record from records order by number")]

    def numbers(self) -> list[int]:
        """Return the field ``n`` of all published records in this order: quicker for thousands of them."""
        with closing(_connect(self.path)) as connection:
            return [n for (n,) in connection.execute("select record ->> 'n' from records order by number")]


class SqlitePublisher(SlotPublisher):
    """Publishes the records of one slot; `opened` is the number of its opening."""

    def __init__(self, path: str, slot: Slot) -> None:
        self._path, self._key = path, (slot.sink, slot.job_uid, slot.number)
        self._connection = _connect(path)
        with self._connection as transaction:
            transaction.execute("insert or ignore into slots values (?, ?, ?, 0, null)", self._key)
            # Read in a transaction of its own, it could be the number of a publisher that opened the slot just now.
            update = "update slots set opened = opened + 1 where (sink, job_uid, slot) = (?, ?, ?) returning opened"
            self.opened: int = transaction.execute(update, self._key).fetchall()[0][0]

    def last_published(self) -> Marker | None:
        """Return the slot's marker."""
        text = self.row()[1]
        return None if text is None else Marker.parse(text)

    def publish(self, records: Iterable[pa.RecordBatch], marker: Marker) -> int:
        """Insert the records and replace the marker in one transaction."""
        # Read before the transaction: its lock would block others that open the slot while this process stands still.
        texts = [json.dumps(row, default=str) for batch in records for row in batch.to_pylist()]
        with self._connection as transaction:
            transaction.execute("begin immediate")
            if self.row()[0] != self.opened:
                raise FencedError("the slot was opened again")
            rows = [(marker.slot, marker.checkpoint.id, text) for text in texts]
            transaction.executemany("insert into records (slot, checkpoint_id, record) values (?, ?, ?)", rows)
            transaction.execute(
                "update slots set marker = ? where (sink, job_uid, slot) = (?, ?, ?)", (marker.to_text(), *self._key)
            )
        return len(texts)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def row(self) -> tuple[int, str | None]:
        """Return the number of the slot's newest opening, and its marker."""
        query = "select opened, marker from slots where (sink, job_uid, slot) = (?, ?, ?)"
        found: tuple[int, str | None] = self._connection.execute(query, self._key).fetchone()
        return found


def _connect(path: str) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=30)
