"""
The join of a merchant with its orders and their refunds, from change events in any order and any number of times.

Each row in the state has the position (LSN) of the change that it comes from. An event that is not newer is ignored:
it is repeated, or was overtaken on its way through another topic. A deleted row leaves its position behind, or an older
event would bring it back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

from examples.merchant_orders.topics import DEAD_LETTERS, RESULT

RECORD = "topic string, key binary, value binary, headers array<struct<key: string, value: binary>>"
"""A Kafka record, in the columns of Spark's Kafka sink."""

REMEMBERED_MS = 24 * 3_600_000
"""How long a deletion is remembered: longer than an older event may take to arrive."""

_MERCHANT = "lsn bigint, name string, category string"
_REFUNDS = "refunds array<struct<refund_id: bigint, lsn: bigint, amount_cents: bigint>>"
_ORDER = (
    f"lsn bigint, amount_cents bigint, status string, ordered_at string, {_REFUNDS}, revision bigint, shown boolean"
)


class Merchant(NamedTuple):
    """A merchant's row; without a name if it does not exist, or no longer."""

    lsn: int = 0
    name: str | None = None
    category: str | None = None

    def after(self, change: Any) -> Merchant:
        """Return the row after a change."""
        if change.lsn <= self.lsn:
            return self
        return Merchant(change.lsn) if change.deleted else Merchant(change.lsn, change.name, change.category)


class Refund(NamedTuple):
    """A refund; without an amount if it no longer exists."""

    refund_id: int
    lsn: int
    amount_cents: int | None


class Order(NamedTuple):
    """An order's row (without a status if it does not exist yet, or no longer), its refunds, and what was published."""

    lsn: int = 0
    amount_cents: int | None = None
    status: str | None = None
    ordered_at: str | None = None
    refunds: tuple[Refund, ...] = ()
    revision: int = 0
    """Number of records that were published for it."""
    shown: bool = False
    """Whether the last of them says that it exists."""

    @classmethod
    def of(cls, stored: Any) -> Self:
        """Return a stored order."""
        order = cls._make(stored)
        return order._replace(refunds=tuple(Refund._make(refund) for refund in order.refunds))

    @property
    def is_live(self) -> bool:
        """Whether a row of it exists."""
        return self.status is not None or any(refund.amount_cents is not None for refund in self.refunds)

    @property
    def refunded_cents(self) -> int:
        """The sum of its refunds."""
        return sum(refund.amount_cents or 0 for refund in self.refunds)

    def after(self, change: Any) -> Order:
        """Return the order after a change of its own row or of a refund; the same object if the change is not newer."""
        if change.table == "refunds":
            return self._after_refund(change)
        if change.lsn <= self.lsn:
            return self
        if change.deleted:
            return self._replace(lsn=change.lsn, amount_cents=None, status=None, ordered_at=None)
        return self._replace(
            lsn=change.lsn, amount_cents=change.amount_cents, status=change.status, ordered_at=change.ordered_at
        )

    def _after_refund(self, change: Any) -> Order:
        others = tuple(refund for refund in self.refunds if refund.refund_id != change.refund_id)
        if any(refund.lsn >= change.lsn for refund in self.refunds if refund not in others):
            return self
        refund = Refund(change.refund_id, change.lsn, None if change.deleted else change.amount_cents)
        return self._replace(refunds=(*others, refund))


class OrdersOfMerchant(StatefulProcessor):
    """
    The state of a merchant: its row, and its orders with their refunds.

    An order is in the result while its row and its merchant's exist. Each batch publishes one record for each order
    that it has changed, and a tombstone for one that left. Dead letters, which have no merchant, pass through: so the
    same checkpoint decides about both topics.
    """

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the states."""
        self._merchant = handle.getValueState("merchant", _MERCHANT)
        self._orders = handle.getMapState("orders", "order_id bigint", _ORDER)
        self._gone = handle.getMapState("gone", "order_id bigint", _ORDER, REMEMBERED_MS)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any = None) -> Iterator[Row]:  # noqa: N802, N803
        """Apply the changes, and yield what they change in the result."""
        if key[0] is None:
            yield from map(_dead_letter, rows)
            return
        stored = merchant = Merchant(*(self._merchant.get() or ()))
        changed: dict[int, Order] = {}
        for row in rows:
            if row.table == "merchants":
                merchant = merchant.after(row)
                continue
            order = changed.get(row.order_id) or self._load(row.order_id)
            if (newer := order.after(row)) is not order:
                changed[row.order_id] = newer
        if merchant != stored:
            self._merchant.update(merchant)
            for (order_id,), value in list(self._orders.iterator()):
                changed.setdefault(order_id, Order.of(value))
        for order_id, order in changed.items():
            shown = merchant.name is not None and order.status is not None
            if shown or order.shown:
                published = order._replace(revision=order.revision + 1, shown=shown)
                yield _record(key[0], merchant, order_id, published)
                self._store(order_id, published)
            else:
                self._store(order_id, order)

    def close(self) -> None:
        """Do nothing: there are no resources."""

    def _load(self, order_id: int) -> Order:
        stored = self._orders.getValue((order_id,)) or self._gone.getValue((order_id,))
        return Order() if stored is None else Order.of(stored)

    def _store(self, order_id: int, order: Order) -> None:
        place, other = (self._orders, self._gone) if order.is_live else (self._gone, self._orders)
        place.updateValue((order_id,), order)
        if other.containsKey((order_id,)):
            other.removeKey((order_id,))


def _record(merchant_id: int, merchant: Merchant, order_id: int, order: Order) -> Row:
    """Return the record of an order; a reader sees by its revision that it has missed none and has none twice."""
    value = {
        "merchant_id": merchant_id,
        "merchant": merchant.name,
        "category": merchant.category,
        "order_id": order_id,
        "ordered_at": order.ordered_at,
        "status": order.status,
        "amount_cents": order.amount_cents,
        "refunded_cents": order.refunded_cents,
    }
    return Row(
        topic=RESULT,
        key=f"{merchant_id}/{order_id}".encode(),
        value=json.dumps(value).encode() if order.shown else None,
        headers=[Row(key="revision", value=str(order.revision).encode())],
    )


def _dead_letter(row: Any) -> Row:
    where = {"reason": row.reason, "topic": row.topic, "partition": row.partition, "offset": row.offset}
    headers = [Row(key=name, value=str(value).encode()) for name, value in where.items()]
    return Row(topic=DEAD_LETTERS, key=row.key, value=row.value, headers=headers)
