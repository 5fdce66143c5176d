"""
Reads pgoutput, the messages in which PostgreSQL reports the changes of committed transactions. No I/O.

The layout is in PostgreSQL's documentation, "Logical Replication Message Formats"; this is protocol version 1.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

Row: TypeAlias = Mapping[str, str | None]
"""Values by column, as PostgreSQL writes them."""

_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_OPERATIONS = {"I": "insert", "U": "update", "D": "delete"}
_WITHOUT_ROWS = "OYM"  # an origin, a type, a message of an application


@dataclass(frozen=True, slots=True)
class RowChange:
    """
    One changed row.

    Args:
        table: Name of its table.
        operation: insert, update or delete.
        before: The row before; None for an insert, and for an update where only the key is known (see `Decoder`).
        after: The row after; None for a delete.
        types: PostgreSQL's type ids by column.
        lsn: Position of the change in the log. Changes of one row have ascending positions.
        transaction: Id of the transaction.
        committed_at: When the transaction was committed.
    """

    table: str
    operation: str
    before: Row | None
    after: Row | None
    types: Mapping[str, int]
    lsn: int
    transaction: int
    committed_at: datetime


@dataclass(frozen=True, slots=True)
class Commit:
    """The end of a transaction; all before `end_lsn` can be forgotten when its changes are safe elsewhere."""

    end_lsn: int


class Decoder:
    """
    Decodes the messages of one session, in order.

    The tables need ``replica identity full``: otherwise an update does not say what the row was before, and a delete
    only its key.
    """

    def __init__(self) -> None:
        self._tables: dict[int, tuple[str, dict[str, int]]] = {}
        self._transaction = 0
        self._committed_at = _EPOCH

    def decode(self, lsn: int, message: bytes) -> RowChange | Commit | None:
        """
        Decode a message; None if it is about no row.

        Raises:
            ValueError: The message is of a kind that is not understood here.
        """
        kind, fields = chr(message[0]), _Fields(message, 1)
        if kind in _OPERATIONS:
            return self._row_change(kind, lsn, fields)
        if kind == "C":
            fields.skip(1 + 8)
            return Commit(fields.number("q"))
        if kind == "B":
            fields.skip(8)
            self._committed_at = _EPOCH + timedelta(microseconds=fields.number("q"))
            self._transaction = fields.number("I")
        elif kind == "R":
            self._learn_table(fields)
        elif kind not in _WITHOUT_ROWS:
            raise ValueError(f"pgoutput's message {kind!r} at {lsn} is unknown: {message[:40]!r}")
        return None

    def _learn_table(self, fields: _Fields) -> None:
        oid = fields.number("I")
        fields.text()  # its schema
        name = fields.text()
        fields.skip(1)
        columns = {}
        for _ in range(fields.number("H")):
            fields.skip(1)
            column = fields.text()
            columns[column] = fields.number("I")
            fields.skip(4)
        self._tables[oid] = name, columns

    def _row_change(self, kind: str, lsn: int, fields: _Fields) -> RowChange:
        table, types = self._tables[fields.number("I")]
        rows: dict[str, Row] = {}
        while fields.left:
            part = fields.letter()  # N: the new row, O: the old one, K: the old one's key
            rows[part] = fields.row(types, rows.get("O", {}))
        before = rows.get("O") if kind != "D" else rows.get("O", rows.get("K"))
        return RowChange(
            table, _OPERATIONS[kind], before, rows.get("N"), types, lsn, self._transaction, self._committed_at
        )


class _Fields:
    """Takes a message apart from left to right."""

    def __init__(self, message: bytes, position: int) -> None:
        self._message = message
        self._position = position

    @property
    def left(self) -> int:
        return len(self._message) - self._position

    def skip(self, size: int) -> None:
        self._position += size

    def number(self, kind: str) -> int:
        found: int = struct.unpack_from(f">{kind}", self._message, self._position)[0]
        self._position += struct.calcsize(f">{kind}")
        return found

    def letter(self) -> str:
        return chr(self.number("B"))

    def text(self) -> str:
        """Take a text that ends with a zero byte."""
        end = self._message.index(0, self._position)
        found = self._message[self._position : end].decode()
        self._position = end + 1
        return found

    def row(self, columns: Mapping[str, int], old: Row) -> Row:
        """Take a row; values that an update left alone and that are stored apart (TOAST) are those of the old row."""
        if self.number("H") != len(columns):
            raise ValueError(f"a row has not the columns {', '.join(columns)}")
        return {name: self._value(name, old) for name in columns}

    def _value(self, name: str, old: Row) -> str | None:
        kind = self.letter()
        if kind == "n":
            return None
        if kind == "u":
            return old[name]
        size = self.number("I")
        self._position += size
        return self._message[self._position - size : self._position].decode()
