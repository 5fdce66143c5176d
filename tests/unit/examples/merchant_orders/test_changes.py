"""The records that are changes, and the dirty ones."""

from __future__ import annotations

import json
import random
from typing import Any

import pyarrow as pa
import pytest

from examples.merchant_orders.changes import Change, DirtyRecordError, changes_of, sort_out
from examples.merchant_orders.events.dirty import dirty_record
from examples.merchant_orders.topics import MERCHANTS, ORDERS, REFUNDS

ORDER = {
    "order_id": 7,
    "merchant_id": 1,
    "amount_cents": 500,
    "status": "paid",
    "ordered_at": "2026-03-02T11:00:00+02:00",
}
MERCHANT = {"merchant_id": 1, "name": "Piazza Foods", "category": "food"}
REFUND = {"refund_id": "3", "merchant_id": "1", "order_id": "7", "amount_cents": "100"}
PAID = {"amount_cents": 500, "status": "paid", "ordered_at": "2026-03-02T09:00:00+00:00"}


def debezium(op: str, before: Any, after: Any, table: str = "orders", lsn: Any = 9) -> bytes:
    return json.dumps({"before": before, "after": after, "op": op, "source": {"table": table, "lsn": lsn}}).encode()


def canal(kind: str, data: Any, old: Any = None, lsn: Any = 9) -> bytes:
    return json.dumps({"data": data, "old": old, "type": kind, "table": "refunds", "lsn": lsn}).encode()


@pytest.mark.parametrize(
    ("topic", "value", "expected"),
    [
        (ORDERS, None, []),
        (ORDERS, debezium("c", None, ORDER), [Change("orders", 9, False, 1, 7, **PAID)]),  # type: ignore[arg-type]
        (ORDERS, debezium("r", None, ORDER), [Change("orders", 9, False, 1, 7, **PAID)]),  # type: ignore[arg-type]
        (ORDERS, debezium("u", ORDER, ORDER), [Change("orders", 9, False, 1, 7, **PAID)]),  # type: ignore[arg-type]
        (ORDERS, debezium("d", ORDER, None), [Change("orders", 9, True, 1, 7)]),
        (
            ORDERS,
            debezium("u", {**ORDER, "merchant_id": 2}, ORDER),
            [Change("orders", 9, True, 2, 7), Change("orders", 9, False, 1, 7, **PAID)],  # type: ignore[arg-type]
        ),
        (
            MERCHANTS,
            debezium("c", None, MERCHANT, "merchants"),
            [Change("merchants", 9, False, 1, name="Piazza Foods", category="food")],
        ),
        (REFUNDS, canal("INSERT", [REFUND]), [Change("refunds", 9, False, 1, 7, 3, amount_cents=100)]),
        (REFUNDS, canal("DELETE", [REFUND]), [Change("refunds", 9, True, 1, 7, 3)]),
        (
            REFUNDS,
            canal("UPDATE", [REFUND], [{"amount_cents": "90"}]),
            [Change("refunds", 9, False, 1, 7, 3, amount_cents=100)],
        ),
        (
            REFUNDS,
            canal("UPDATE", [REFUND], [{"order_id": "6"}]),
            [Change("refunds", 9, True, 1, 6, 3), Change("refunds", 9, False, 1, 7, 3, amount_cents=100)],
        ),
        (
            REFUNDS,
            canal("INSERT", [REFUND, {**REFUND, "refund_id": "4"}]),
            [Change("refunds", 9, False, 1, 7, number, amount_cents=100) for number in (3, 4)],
        ),
    ],
)
def test_change_events_become_changes(topic: str, value: bytes | None, expected: list[Change]) -> None:
    """Both forms give the same rows; a row with another key is deleted there and inserted here; a tombstone is none."""
    assert changes_of(topic, value) == expected


@pytest.mark.parametrize(
    ("topic", "value", "reason"),
    [
        (ORDERS, b"", "broken JSON"),
        (ORDERS, b"\xff\xff", "broken JSON"),
        (ORDERS, b"[" * 100_000, "broken JSON"),
        (ORDERS, b"9" * 5_000, "broken JSON"),
        (ORDERS, b"null", "not a change event"),
        (ORDERS, b"{}", "not a change event"),
        (REFUNDS, b"{}", "not a change event"),
        (REFUNDS, canal("INSERT", []), "not a change event"),
        (ORDERS, debezium("c", None, ORDER, table="customers"), "unknown table: 'customers'"),
        (ORDERS, debezium("c", None, ORDER, table=[]), "unknown table"),  # type: ignore[arg-type]
        (ORDERS, debezium("t", None, None), "unknown operation"),
        (ORDERS, debezium("c", None, ORDER, lsn=None), "no position"),
        (ORDERS, debezium("c", None, ORDER, lsn=1 << 63), "no position"),
        (ORDERS, debezium("c", None, None), "missing key"),
        (ORDERS, debezium("d", None, None), "missing key"),
        (ORDERS, debezium("u", "?", ORDER), "missing key"),
        (ORDERS, debezium("c", None, {**ORDER, "order_id": None}), "missing key: order_id is 'None'"),
        (ORDERS, debezium("c", None, {**ORDER, "merchant_id": True}), "missing key"),
        (ORDERS, debezium("c", None, {**ORDER, "order_id": 7.0}), "missing key"),
        (ORDERS, debezium("c", None, {**ORDER, "order_id": -7}), "missing key"),
        (REFUNDS, canal("INSERT", [None]), "missing key"),
        (REFUNDS, canal("UPDATE", [REFUND, REFUND], [{}]), "not as many old rows as rows"),
        (REFUNDS, canal("UPDATE", [REFUND], {"order_id": 6}), "not as many old rows as rows"),
        (REFUNDS, canal("x" * 900, [REFUND]), "unknown operation: 'x{40}'$"),
        (ORDERS, debezium("c", None, ORDER, table="x" * 900), "unknown table: 'x{40}'$"),
        (ORDERS, debezium("c", None, ORDER, lsn="x" * 900), "no position: lsn is 'x{40}'$"),
        (REFUNDS, canal("INSERT", [{**REFUND, "refund_id": "٣"}]), "missing key"),
        (REFUNDS, canal("INSERT", [{**REFUND, "refund_id": "9" * 30}]), "missing key"),
        (ORDERS, debezium("c", None, {**ORDER, "amount_cents": 0}), "impossible amount"),
        (ORDERS, debezium("c", None, {**ORDER, "amount_cents": 100_000_001}), "impossible amount"),
        (ORDERS, debezium("c", None, {**ORDER, "amount_cents": float("nan")}), "impossible amount"),
        (REFUNDS, canal("INSERT", [{**REFUND, "amount_cents": "1e3"}]), "impossible amount: amount_cents is '1e3'"),
        (ORDERS, debezium("c", None, {**ORDER, "status": ["paid"]}), "impossible status"),
        (ORDERS, debezium("c", None, {**ORDER, "ordered_at": 1}), "impossible time"),
        (ORDERS, debezium("c", None, {**ORDER, "ordered_at": "2026-03-02T09:00:00"}), "impossible time"),
        (ORDERS, debezium("c", None, {**ORDER, "ordered_at": "0001-01-01T00:00:00+14:00"}), "impossible time"),
        (MERCHANTS, debezium("c", None, {**MERCHANT, "name": " "}, "merchants"), "impossible text"),
        (MERCHANTS, debezium("c", None, {**MERCHANT, "name": "\ud800"}, "merchants"), "impossible text"),
    ],
)
def test_dirty_record_is_refused_with_its_reason(topic: str, value: bytes, reason: str) -> None:
    """Nothing that a producer can send gets past the filter, or stops the query with another error."""
    with pytest.raises(DirtyRecordError, match=reason):
        changes_of(topic, value)


def test_deleted_row_may_be_impossible() -> None:
    """Only the key counts of a row that is gone: a refusal would keep the row in the result for ever."""
    assert changes_of(ORDERS, debezium("d", {**ORDER, "amount_cents": -1}, None)) == [Change("orders", 9, True, 1, 7)]


@pytest.mark.parametrize("seed", range(60))
def test_records_of_the_demo_are_dirty(seed: int) -> None:
    """Each has the fault that it is meant to have."""
    record = dirty_record(random.Random(seed))

    with pytest.raises(DirtyRecordError) as found:
        changes_of(record.topic, record.value)
    assert str(found.value).partition(":")[0] == record.reason


def test_records_are_sorted_out_as_arrow_rows() -> None:
    """A change has no place of origin, a dead letter has all of its record and no merchant; positions stay exact."""
    records = [
        {"topic": ORDERS, "partition": 1, "offset": 5, "key": b"k", "value": debezium("c", None, ORDER, lsn=2**62 + 1)},
        {"topic": ORDERS, "partition": 0, "offset": 6, "key": None, "value": b"?"},
        {"topic": ORDERS, "partition": 0, "offset": 7, "key": b"k", "value": None},
    ]

    [batch] = sort_out(iter([pa.RecordBatch.from_pylist(records)]))

    change, letter = batch.to_pylist()
    assert (change["merchant_id"], change["lsn"], change["topic"], change["reason"]) == (1, 2**62 + 1, None, None)
    assert {name: letter[name] for name in records[1]} == records[1]
    assert (letter["merchant_id"], letter["reason"]) == (None, "broken JSON")
