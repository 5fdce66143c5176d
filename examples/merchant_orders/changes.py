"""
Change events as rows for the join, and dirty records as dead letters with the reason.

Everything that comes from Kafka is checked here, so the processor can rely on its rows. A change whose row
has moved, to another merchant for one, is a deletion there and an insertion here. No I/O.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pyarrow as pa

from examples.merchant_orders.topics import REFUNDS

CENTS_MAX = 100_000_000
STATUSES = ("placed", "paid", "shipped", "cancelled")
_YEARS = range(2000, 2100)
_KEYS = {
    "merchants": ("merchant_id",),
    "orders": ("merchant_id", "order_id"),
    "refunds": ("merchant_id", "order_id", "refund_id"),
}
_DEBEZIUM_OPERATIONS = {"r": "insert", "c": "insert", "u": "update", "d": "delete"}  # r: from the first snapshot

_COLUMNS = {
    # a change; all null in a dead letter
    "merchant_id": ("bigint", pa.int64()),
    "table": ("string", pa.string()),
    "order_id": ("bigint", pa.int64()),
    "refund_id": ("bigint", pa.int64()),
    "lsn": ("bigint", pa.int64()),
    "deleted": ("boolean", pa.bool_()),
    "name": ("string", pa.string()),
    "category": ("string", pa.string()),
    "amount_cents": ("bigint", pa.int64()),
    "status": ("string", pa.string()),
    "ordered_at": ("string", pa.string()),
    # a dead letter; all null in a change
    "reason": ("string", pa.string()),
    "topic": ("string", pa.string()),
    "partition": ("int", pa.int32()),
    "offset": ("bigint", pa.int64()),
    "key": ("binary", pa.binary()),
    "value": ("binary", pa.binary()),
}
SORTED_OUT = ", ".join(f"{name} {ddl}" for name, (ddl, _) in _COLUMNS.items())
"""Spark's schema of what `sort_out` yields."""
_ARROW = pa.schema([(name, arrow) for name, (_, arrow) in _COLUMNS.items()])


class DirtyRecordError(ValueError):
    """A record that cannot be used. The text says why, and before a colon what kind of fault it is."""


class Change(NamedTuple):
    """One row of a table, as it is after a change or, if `deleted`, no longer is."""

    table: str
    lsn: int
    deleted: bool
    merchant_id: int
    order_id: int | None = None
    refund_id: int | None = None
    name: str | None = None
    category: str | None = None
    amount_cents: int | None = None
    status: str | None = None
    ordered_at: str | None = None
    """In UTC and ISO 8601."""


def sort_out(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Turn records of the sources into changes and dead letters; pass this function to ``mapInArrow``."""
    for batch in batches:
        rows = [row for record in batch.to_pylist() for row in _rows_of(record)]
        yield pa.RecordBatch.from_pylist(rows, schema=_ARROW)


def _rows_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        return [change._asdict() for change in changes_of(record["topic"], record["value"])]
    except DirtyRecordError as error:
        return [{**record, "reason": str(error)}]


def changes_of(topic: str, value: bytes | None) -> list[Change]:
    """
    Return the changes of a record; none for a tombstone, which follows a delete for the sake of compaction.

    Raises:
        DirtyRecordError: The record is not a change event of a known table, or its row is impossible.
    """
    if value is None:
        return []
    try:
        event = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DirtyRecordError("broken JSON") from error
    if not isinstance(event, dict):
        raise DirtyRecordError("not a change event: it is not an object")
    return list(_of_canal(event) if topic == REFUNDS else _of_debezium(event))


def _of_debezium(event: Mapping[str, Any]) -> Iterator[Change]:
    source = event.get("source")
    if not isinstance(source, dict):
        raise DirtyRecordError("not a change event: it names no source")
    operation = _DEBEZIUM_OPERATIONS.get(str(event.get("op")))
    yield from _changes(source, operation, event.get("before"), event.get("after"))


def _of_canal(event: Mapping[str, Any]) -> Iterator[Change]:
    operation = str(event.get("type")).lower()
    rows = event.get("data")
    if not isinstance(rows, list) or not rows:
        raise DirtyRecordError("not a change event: it has no list of rows")
    olds = event.get("old") or [{}] * len(rows)
    if not isinstance(olds, list) or len(olds) != len(rows):
        raise DirtyRecordError("not a change event: it has not as many old rows as rows")
    for row, old in zip(rows, olds, strict=True):
        before = {**row, **old} if isinstance(row, dict) and isinstance(old, dict) else None
        yield from _changes(event, operation, before, None if operation == "delete" else row)


def _changes(where: Mapping[str, Any], operation: str | None, before: Any, after: Any) -> Iterator[Change]:
    """Yield what an event says about its row: one change, or two if the row has another key than before."""
    table = where.get("table")
    if not isinstance(table, str) or table not in _KEYS:
        raise DirtyRecordError(f"unknown table: {str(table)[:40]!r}")
    if operation not in ("insert", "update", "delete"):
        raise DirtyRecordError(f"unknown operation: {str(operation)[:40]!r}")
    lsn = _whole_number(where.get("lsn"))
    if lsn is None:
        raise DirtyRecordError(f"no position: lsn is {str(where.get('lsn'))[:40]!r}")
    old = None if operation == "insert" or before is None else _key(table, before)
    new = None if operation == "delete" else _key(table, after)
    if old is None and new is None:
        raise DirtyRecordError("missing key: the deleted row is not there")
    if old is not None and old != new:
        yield Change(table, lsn, deleted=True, **old)
    if new is not None:
        yield Change(table, lsn, deleted=False, **new, **_columns(table, after))


def _key(table: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DirtyRecordError(f"missing key: the row is {str(row)[:40]!r}")
    found = {name: _whole_number(row.get(name)) for name in _KEYS[table]}
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise DirtyRecordError(f"missing key: {missing[0]} is {str(row.get(missing[0]))[:40]!r}")
    return {name: value for name, value in found.items() if value is not None}


def _columns(table: str, row: Mapping[str, Any]) -> dict[str, Any]:
    if table == "merchants":
        return {name: _text(row, name) for name in ("name", "category")}
    amount = {"amount_cents": _amount(row)}
    return amount if table == "refunds" else {**amount, "status": _status(row), "ordered_at": _moment(row)}


def _whole_number(value: Any) -> int | None:
    """Return a positive whole number of 64 bits, given as such or as text; None for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    return value if type(value) is int and 0 < value < 1 << 63 else None


def _amount(row: Mapping[str, Any]) -> int:
    amount = _whole_number(row.get("amount_cents"))
    if amount is None or amount > CENTS_MAX:
        raise DirtyRecordError(f"impossible amount: amount_cents is {str(row.get('amount_cents'))[:40]!r}")
    return amount


def _status(row: Mapping[str, Any]) -> str:
    status = row.get("status")
    if status not in STATUSES:
        raise DirtyRecordError(f"impossible status: {str(status)[:40]!r}")
    return str(status)


def _text(row: Mapping[str, Any], name: str) -> str:
    text = row.get(name)
    # Half of a surrogate pair is valid JSON, but no text that could be stored.
    if not isinstance(text, str) or not text.strip() or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise DirtyRecordError(f"impossible text: {name} is {str(text)[:40]!r}")
    return text


def _moment(row: Mapping[str, Any]) -> str:
    try:
        moment = datetime.fromisoformat(row["ordered_at"])
    except (KeyError, TypeError, ValueError) as error:
        raise DirtyRecordError(f"impossible time: ordered_at is {str(row.get('ordered_at'))[:40]!r}") from error
    if moment.tzinfo is None or moment.year not in _YEARS:
        raise DirtyRecordError(f"impossible time: ordered_at is {moment.isoformat()!r}")
    return moment.astimezone(UTC).isoformat()
