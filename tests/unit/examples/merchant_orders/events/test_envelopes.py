"""Change events in the forms of Debezium and of Canal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from examples.merchant_orders.events.envelopes import Envelope, canal, debezium
from examples.merchant_orders.events.pgoutput import RowChange

TYPES = {"order_id": 20, "merchant_id": 20, "status": 25, "ordered_at": 1184}
ROW = {"order_id": "7", "merchant_id": "1", "status": "paid", "ordered_at": "2026-03-02 09:00:01.5+00"}
COMMITTED = datetime(2026, 3, 2, 9, 1, tzinfo=UTC)


def change(
    operation: str, before: Mapping[str, str | None] | None, after: Mapping[str, str | None] | None
) -> RowChange:
    return RowChange("orders", operation, before, after, TYPES, 1234, 5, COMMITTED)


def events(envelope: Envelope, given: RowChange) -> list[tuple[bytes, Any]]:
    return [(key, value and json.loads(value)) for key, value in envelope(given, "order_id", 99)]


def test_debezium_insert_and_update() -> None:
    """An event has the row before and after with typed values, the operation, and its place in the log."""
    [(key, inserted)] = events(debezium, change("insert", None, ROW))
    [(_, updated)] = events(debezium, change("update", ROW, {**ROW, "status": None}))

    typed = {"order_id": 7, "merchant_id": 1, "status": "paid", "ordered_at": "2026-03-02T09:00:01.500000Z"}
    assert key == b'{"order_id":7}'
    assert (inserted["op"], inserted["before"], inserted["after"]) == ("c", None, typed)
    assert (updated["op"], updated["before"], updated["after"]) == ("u", typed, {**typed, "status": None})
    assert inserted["source"]["table"] == "orders"
    assert (inserted["source"]["lsn"], inserted["source"]["txId"]) == (1234, 5)
    assert inserted["source"]["ts_ms"] == COMMITTED.timestamp() * 1000


def test_debezium_delete_is_followed_by_a_tombstone() -> None:
    """Compaction of the topic can then forget the key."""
    [(key, deleted), tombstone] = events(debezium, change("delete", ROW, None))

    assert (deleted["op"], deleted["before"]["order_id"], deleted["after"]) == ("d", 7, None)
    assert tombstone == (key, None)


def test_debezium_changed_key_is_delete_and_insert() -> None:
    """Each key's events are in its own partition."""
    found = events(debezium, change("update", ROW, {**ROW, "order_id": "8"}))

    assert [(key, value and value["op"]) for key, value in found] == [
        (b'{"order_id":7}', "d"),
        (b'{"order_id":7}', None),
        (b'{"order_id":8}', "c"),
    ]


def test_canal_event_has_texts_and_what_was_changed() -> None:
    """Values are texts as MySQL writes them; an update also has the old values of what it changed."""
    text = {**ROW, "ordered_at": "2026-03-02 09:00:01.500000"}
    [(key, inserted)] = events(canal, change("insert", None, ROW))
    [(_, updated)] = events(canal, change("update", ROW, {**ROW, "status": "shipped"}))
    [(_, deleted)] = events(canal, change("delete", ROW, None))

    assert (key, inserted["type"], inserted["data"], inserted["old"]) == (b"7", "INSERT", [text], None)
    assert updated["type"] == "UPDATE"
    assert (updated["data"], updated["old"]) == ([{**text, "status": "shipped"}], [{"status": "paid"}])
    assert (deleted["type"], deleted["data"], deleted["lsn"]) == ("DELETE", [text], 1234)
