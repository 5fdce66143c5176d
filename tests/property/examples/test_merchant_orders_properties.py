"""
The merchants' join under any delivery of change events.

A random history of committed changes is delivered in any order, partly more than once, in batches of any size, with the
state restored from its log in between.

A failure means that the result depends on how events travel, or that a reader misses a record.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Row

from backend_client.testing import StateTester
from examples.merchant_orders.processor import OrdersOfMerchant

KEYS = st.sampled_from(
    [("merchants",), ("orders", 1), ("orders", 2), ("refunds", 1, 1), ("refunds", 1, 2), ("refunds", 2, 3)]
)
HISTORIES = st.lists(st.tuples(KEYS, st.none() | st.integers(1, 9)), min_size=1, max_size=14)
"""The steps in turn: a row's key, and its new value, or none if the row is deleted."""


def event(lsn: int, key: tuple[Any, ...], value: int | None) -> Row:
    order_id, refund_id = (*key[1:], None, None)[:2]
    return Row(
        table=key[0],
        lsn=lsn,
        deleted=value is None,
        order_id=order_id,
        refund_id=refund_id,
        name=f"name {value}",
        category="food",
        amount_cents=value,
        status="paid",
        ordered_at="2026-03-02T09:00:00+00:00",
    )


def expected(history: list[tuple[tuple[Any, ...], int | None]]) -> dict[bytes, tuple[Any, ...]]:
    """Return the orders that exist in the end, with the merchant's name, their amount and their refunds."""
    rows = {key: value for key, value in dict(history).items() if value is not None}
    merchant = rows.get(("merchants",))
    if merchant is None:
        return {}
    return {
        f"1/{key[1]}".encode(): (
            f"name {merchant}",
            amount,
            sum(value or 0 for other, value in rows.items() if other[:2] == ("refunds", key[1])),
        )
        for key, amount in rows.items()
        if key[0] == "orders"
    }


@settings(max_examples=40)
@given(HISTORIES, st.data())
def test_result_depends_on_what_was_committed_alone(
    history: list[tuple[tuple[Any, ...], int | None]], data: st.DataObject
) -> None:
    """In the end the result is that of the newest rows, and the revisions of each order are 1, 2, 3 and so on."""
    events = [event(lsn, key, value) for lsn, (key, value) in enumerate(history, start=1)]
    repeated = data.draw(st.lists(st.sampled_from(events), max_size=6))
    delivered = data.draw(st.permutations([*events, *repeated]))
    size = data.draw(st.integers(1, len(delivered)))
    latest: dict[bytes, Any] = {}
    revisions: Counter[bytes] = Counter()
    with StateTester(OrdersOfMerchant(), timeMode="ProcessingTime", keySchema="merchant_id bigint") as tester:
        for start in range(0, len(delivered), size):
            for record in tester.test(1, delivered[start : start + size]):
                revisions[record.key] += 1
                assert int(record.headers[0].value) == revisions[record.key]
                latest[record.key] = record.value and json.loads(record.value)
            tester.checkpoint()
            if data.draw(st.booleans()):
                tester.restore()

    found = {
        key: (row["merchant"], row["amount_cents"], row["refunded_cents"])
        for key, row in latest.items()
        if row is not None
    }
    assert found == expected(history)
