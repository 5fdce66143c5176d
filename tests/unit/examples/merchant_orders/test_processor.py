"""The join of merchants, orders and refunds, on real tables and without Spark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import Row

from backend_client.testing import StateTester
from examples.merchant_orders.processor import REMEMBERED_MS, OrdersOfMerchant
from examples.merchant_orders.topics import DEAD_LETTERS, RESULT


@pytest.fixture
def tester() -> Iterator[StateTester]:
    with StateTester(OrdersOfMerchant(), timeMode="ProcessingTime", keySchema="merchant_id bigint") as made:
        yield made


def merchant(lsn: int, name: str | None = "Piazza Foods") -> Row:
    return Row(table="merchants", lsn=lsn, deleted=name is None, order_id=None, name=name, category="food")


def order(lsn: int, status: str | None = "paid", amount_cents: int = 500, order_id: int = 7) -> Row:
    columns = {"status": status, "amount_cents": amount_cents, "ordered_at": "2026-03-02T09:00:00+00:00"}
    return Row(table="orders", lsn=lsn, deleted=status is None, order_id=order_id, **columns)


def refund(lsn: int, amount_cents: int | None = 100, refund_id: int = 3) -> Row:
    columns = {"order_id": 7, "refund_id": refund_id, "amount_cents": amount_cents}
    return Row(table="refunds", lsn=lsn, deleted=amount_cents is None, **columns)


def published(rows: list[Row]) -> list[tuple[Any, ...]]:
    """Return each record's revision and what it says: merchant, status, amount and refunds; None for a tombstone."""
    assert {row.topic for row in rows} <= {RESULT}
    assert {row.key for row in rows} <= {b"1/7", b"1/8"}
    found: list[tuple[Any, ...]] = []
    for row in rows:
        value = row.value and json.loads(row.value)
        columns = value and tuple(value[name] for name in ("merchant", "status", "amount_cents", "refunded_cents"))
        found.append((int(row.headers[0].value), columns))
    return found


def test_order_appears_with_its_merchant_and_refunds(tester: StateTester) -> None:
    """Events of the three tables may come in any order; a batch publishes one record per order."""
    assert published(tester.test(1, [refund(5)])) == []
    assert published(tester.test(1, [order(4)])) == []
    assert published(tester.test(1, [merchant(1)])) == [(1, ("Piazza Foods", "paid", 500, 100))]
    assert published(tester.test(1, [refund(6, 30, refund_id=4), order(7, "shipped")])) == [
        (2, ("Piazza Foods", "shipped", 500, 130))
    ]


def test_updates_and_deletes_of_each_table(tester: StateTester) -> None:
    """A change of the merchant concerns all of its orders; a deleted row takes its part away again."""
    tester.test(1, [merchant(1), order(2), order(3, order_id=8), refund(4)])

    assert published(tester.test(1, [refund(5, 60)])) == [(2, ("Piazza Foods", "paid", 500, 60))]
    assert published(tester.test(1, [refund(6, None)])) == [(3, ("Piazza Foods", "paid", 500, 0))]
    assert published(tester.test(1, [merchant(7, "Pizza")])) == [
        (4, ("Pizza", "paid", 500, 0)),
        (2, ("Pizza", "paid", 500, 0)),
    ]
    assert published(tester.test(1, [order(8, None)])) == [(5, None)]
    assert published(tester.test(1, [merchant(9, None)])) == [(3, None)]
    assert published(tester.test(1, [order(10, order_id=8)])) == []
    assert published(tester.test(1, [merchant(11)])) == [(4, ("Piazza Foods", "paid", 500, 0))]


@pytest.mark.parametrize(
    "repeated", [merchant(1, "Old"), merchant(4), order(2), order(5, None), refund(3), refund(6, 1)]
)
def test_event_that_is_not_newer_changes_nothing(tester: StateTester, repeated: Row) -> None:
    """An event that is repeated, or was overtaken, is ignored, and nothing is published for it."""
    rows = [merchant(1, "Old"), order(2, "placed"), refund(3), merchant(4), order(5), refund(6, 90)]
    assert published(tester.test(1, rows)) == [(1, ("Piazza Foods", "paid", 500, 90))]

    assert published(tester.test(1, [repeated])) == []
    assert published(tester.test(1, [order(7)])) == [(2, ("Piazza Foods", "paid", 500, 90))]


def test_deletion_is_remembered_for_a_day(tester: StateTester) -> None:
    """An older event does not bring a deleted order or refund back, until the deletion is forgotten."""
    tester.setProcessingTime(1_000)
    tester.test(1, [merchant(1), order(2), refund(3), refund(6, None), order(7, None)])
    assert published(tester.test(1, [order(2), refund(3)])) == []
    assert tester.peekMapState("orders", 1) == {}

    tester.setProcessingTime(1_000 + REMEMBERED_MS)
    assert tester.peekMapState("gone", 1) == {}
    assert published(tester.test(1, [order(2)])) == [(1, ("Piazza Foods", "paid", 500, 0))]


def test_order_that_comes_back_continues(tester: StateTester) -> None:
    """An order that is inserted again continues its revisions, and is kept in one place."""
    tester.test(1, [merchant(1), order(2)])
    tester.test(1, [order(3, None)])

    assert published(tester.test(1, [order(4)])) == [(3, ("Piazza Foods", "paid", 500, 0))]
    assert tester.peekMapState("gone", 1) == {}


def test_dead_letters_pass_through(tester: StateTester) -> None:
    """A dirty record is published as it came, with its place and reason."""
    row = Row(reason="broken JSON", topic="shop.refunds", partition=1, offset=9, key=None, value=b"\xff")

    [record] = tester.test((None,), [row])

    assert (record.topic, record.key, record.value) == (DEAD_LETTERS, None, b"\xff")
    assert {header.key: header.value for header in record.headers} == {
        "reason": b"broken JSON",
        "topic": b"shop.refunds",
        "partition": b"1",
        "offset": b"9",
    }
