"""Dirty records, as a program with a defect would send them to the topics of change events."""

from __future__ import annotations

import json
import random
import threading
from typing import Any, NamedTuple, Self

from confluent_kafka import Producer

from examples.merchant_orders.topics import MERCHANTS, ORDERS, REFUNDS

_EVERY_S = 0.05
_LSN = 1 << 60  # newer than all others: if it were taken for a change, it would stay


class DirtyRecord(NamedTuple):
    """A record that must not become part of the result, and what is wrong with it."""

    topic: str
    value: bytes
    reason: str


def dirty_record(chance: random.Random) -> DirtyRecord:
    """Return a record with one fault; without that, it would be a change of a row that may exist."""
    order_id, merchant_id = chance.randrange(1, 2000), chance.randrange(1, 9)
    order = {
        "order_id": order_id,
        "merchant_id": merchant_id,
        "amount_cents": 999,
        "status": "paid",
        "ordered_at": "2026-03-02T09:10:00Z",
    }
    refund = {"refund_id": str(chance.randrange(1, 200)), "merchant_id": str(merchant_id), "order_id": str(order_id)}
    return chance.choice(
        [
            DirtyRecord(ORDERS, _debezium(order)[:-20], "broken JSON"),
            DirtyRecord(REFUNDS, b"\xff\xfe<refund/>", "broken JSON"),
            DirtyRecord(ORDERS, b"[]", "not a change event"),
            DirtyRecord(ORDERS, _debezium(order, table="orders_old"), "unknown table"),
            DirtyRecord(ORDERS, _debezium(order, op="x"), "unknown operation"),
            DirtyRecord(ORDERS, _debezium(order, lsn=None), "no position"),
            DirtyRecord(ORDERS, _debezium({**order, "order_id": None}), "missing key"),
            DirtyRecord(ORDERS, _debezium({**order, "amount_cents": -order_id}), "impossible amount"),
            DirtyRecord(ORDERS, _debezium({**order, "status": "lost"}), "impossible status"),
            DirtyRecord(ORDERS, _debezium({**order, "ordered_at": "yesterday"}), "impossible time"),
            DirtyRecord(MERCHANTS, _debezium({"merchant_id": merchant_id}, table="merchants"), "impossible text"),
            DirtyRecord(REFUNDS, _canal({**refund, "amount_cents": "12.50"}), "impossible amount"),
            DirtyRecord(REFUNDS, _canal({"amount_cents": "1250"}), "missing key"),
        ]
    )


def _debezium(after: dict[str, Any], table: str = "orders", op: str = "u", lsn: int | None = _LSN) -> bytes:
    event = {"before": None, "after": after, "source": {"table": table, "lsn": lsn}, "op": op, "ts_ms": 0}
    return json.dumps(event).encode()


def _canal(row: dict[str, str]) -> bytes:
    event = {"data": [row], "old": None, "table": "refunds", "type": "INSERT", "lsn": _LSN}
    return json.dumps(event).encode()


class DirtyWriter:
    """Sends dirty records while the context is open; remembers topic, partition and offset of each, and its reason."""

    def __init__(self, servers: str, seed: int) -> None:
        self.sent: dict[tuple[str, int, int], str] = {}
        self._producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True, "log_level": 3})
        self._chance = random.Random(seed)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Send no more; return when all are acknowledged."""
        self._ending.set()
        self._thread.join()
        self._producer.flush()

    def _run(self) -> None:
        while not self._ending.wait(_EVERY_S):
            self._send(dirty_record(self._chance))
            self._producer.poll(0)

    def _send(self, record: DirtyRecord) -> None:
        def remember(error: Any, message: Any) -> None:
            if error is None:
                self.sent[message.topic(), message.partition(), message.offset()] = record.reason

        self._producer.produce(record.topic, record.value, on_delivery=remember)
