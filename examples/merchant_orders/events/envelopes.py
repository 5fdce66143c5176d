"""
Row changes as the two best known kinds of change events, those of Debezium and of Canal. No I/O.

Both write JSON. Debezium's has the row before and after, with numbers and ISO times; Canal's has lists of rows whose
values are all texts, and a list of the values that an update changed. Real Canal reads MySQL and knows no LSN; here it
is the field ``lsn``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeAlias

from examples.merchant_orders.events.pgoutput import Row, RowChange

_WHOLE_NUMBERS = {20, 21, 23}  # bigint, smallint, integer
_MOMENT = 1184  # timestamp with time zone
_DATABASE = "shop"
_LETTERS = {"insert": "c", "update": "u", "delete": "d"}  # of Debezium; c is for create


class Record(NamedTuple):
    """A Kafka record; the value of a tombstone is None."""

    key: bytes
    value: bytes | None


Envelope: TypeAlias = Callable[[RowChange, str, int], Iterator[Record]]
"""Yields the records of a change, given the name of the table's key and the current time in ms."""


def debezium(change: RowChange, key: str, now_ms: int) -> Iterator[Record]:
    """
    Yield the events of a change as Debezium's PostgreSQL connector does with its JSON converter.

    A delete is followed by a tombstone. A changed key is a delete of the old row and an insert of the new one.
    """
    before, after = (_typed(row, change) for row in (change.before, change.after))
    if before and after and before[key] != after[key]:
        yield from _debezium_event("d", before, None, change, key, now_ms)
        yield from _debezium_event("c", None, after, change, key, now_ms)
    else:
        yield from _debezium_event(_LETTERS[change.operation], before, after, change, key, now_ms)


def _debezium_event(
    operation: str, before: Any, after: Any, change: RowChange, key: str, now_ms: int
) -> Iterator[Record]:
    source = {
        "connector": "postgresql",
        "name": _DATABASE,
        "db": _DATABASE,
        "schema": "public",
        "table": change.table,
        "txId": change.transaction,
        "lsn": change.lsn,
        "ts_ms": round(change.committed_at.timestamp() * 1000),
    }
    value = {"before": before, "after": after, "source": source, "op": operation, "ts_ms": now_ms}
    record_key = _json({key: (after or before)[key]})
    yield Record(record_key, _json(value))
    if operation == "d":
        yield Record(record_key, None)


def canal(change: RowChange, key: str, now_ms: int) -> Iterator[Record]:
    """Yield the event of a change as Canal does (``flatMessage``)."""
    before, after = (_as_in_mysql(row, change) for row in (change.before, change.after))
    old = None
    if before and after:
        old = [{name: value for name, value in before.items() if value != after[name]}]
    row = after or before or {}
    value = {
        "data": [row],
        "database": _DATABASE,
        "table": change.table,
        "type": change.operation.upper(),
        "old": old,
        "pkNames": [key],
        "isDdl": False,
        "es": round(change.committed_at.timestamp() * 1000),
        "ts": now_ms,
        "lsn": change.lsn,
    }
    yield Record(str(row[key]).encode(), _json(value))


def _typed(row: Row | None, change: RowChange) -> dict[str, Any] | None:
    return None if row is None else {name: _number_or_moment(text, change.types[name]) for name, text in row.items()}


def _number_or_moment(text: str | None, kind: int) -> Any:
    if text is None:
        return None
    if kind in _WHOLE_NUMBERS:
        return int(text)
    return _utc(text).isoformat().replace("+00:00", "Z") if kind == _MOMENT else text


def _as_in_mysql(row: Row | None, change: RowChange) -> Row | None:
    """Return a row with times as MySQL writes them: in UTC, without a zone."""
    if row is None:
        return None
    moments = {name for name, kind in change.types.items() if kind == _MOMENT}
    return {
        name: f"{_utc(text).replace(tzinfo=None)}" if text is not None and name in moments else text
        for name, text in row.items()
    }


def _utc(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
