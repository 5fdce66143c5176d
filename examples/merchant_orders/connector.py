"""
Writes the committed changes of the shop's tables to Kafka, each at least once and those of a row in order.

``python -m examples.merchant_orders.connector`` runs until SIGTERM or Ctrl-C; then it sends what is committed and ends.
It reads a replication slot with SQL functions, as a client of any kind can. The slot is advanced once in a while, and
only over what Kafka has acknowledged; so after a crash, events are sent again. (Debezium does this, too, and calls the
interval ``offset.flush.interval.ms``.) Readers recognise repeated events by their position in the log.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from confluent_kafka import KafkaException, Producer

from examples.merchant_orders.events.envelopes import Envelope, canal, debezium
from examples.merchant_orders.events.pgoutput import Commit, Decoder, RowChange
from examples.merchant_orders.shop import PUBLICATION, SLOT
from examples.merchant_orders.topics import MERCHANTS, ORDERS, REFUNDS

ADVANCE_EVERY_S = 2.0
_MESSAGES_MAX = 5_000
_POLL_S = 0.1
_SEND_TIMEOUT_S = 60.0
_SLOT_TIMEOUT_S = 10.0

# Reads whole transactions, in the order of their commits, and leaves them in the slot.
_PEEK = """select (lsn - '0/0')::bigint, data from pg_logical_slot_peek_binary_changes(
    %s, null, %s, 'proto_version', '1', 'publication_names', %s)"""
_ADVANCE = "select pg_replication_slot_advance(%s, '0/0'::pg_lsn + %s)"


@dataclass(frozen=True, slots=True)
class Captured:
    """Where a table's changes go."""

    topic: str
    key: str
    envelope: Envelope


TABLES = {
    "merchants": Captured(MERCHANTS, "merchant_id", debezium),
    "orders": Captured(ORDERS, "order_id", debezium),
    "refunds": Captured(REFUNDS, "refund_id", canal),
}


class Connector:
    """
    Moves changes from the slot to Kafka.

    Args:
        database: A connection whose sessions write times in UTC.
        producer: An idempotent producer, which keeps the order of what it sends.
        advance_every_s: How often the slot is advanced.
    """

    def __init__(self, database: psycopg.Connection, producer: Producer, advance_every_s: float) -> None:
        self._database = database
        self._producer = producer
        self._advance_every_s = advance_every_s
        self._advanced_s = time.monotonic()
        self._sent = self._advanced = 0

    def run(self, ending: threading.Event) -> None:
        """Move changes until the event; then those that are committed by then."""
        is_last = False
        while not is_last:
            is_last = ending.wait(_POLL_S)
            while self._send():
                self._advance()
            if is_last or time.monotonic() > self._advanced_s + self._advance_every_s:
                self._advance()

    def _send(self) -> bool:
        """Send what is new in the slot, and wait until Kafka has it; return whether there may be more after it."""
        decoder, changes, end = Decoder(), list[RowChange](), self._sent
        messages = self._database.execute(_PEEK, (SLOT, _MESSAGES_MAX, PUBLICATION)).fetchall()
        for lsn, message in messages:
            item = decoder.decode(lsn, message)
            if isinstance(item, RowChange):
                changes.append(item)
            elif isinstance(item, Commit):
                if item.end_lsn > self._sent:
                    self._produce(changes)
                    end = item.end_lsn
                changes = []
        self._flush()
        self._sent = end
        return len(messages) >= _MESSAGES_MAX

    def _produce(self, changes: Sequence[RowChange]) -> None:
        for change in changes:
            captured = TABLES[change.table]
            for record in captured.envelope(change, captured.key, time.time_ns() // 1_000_000):
                self._producer.produce(captured.topic, record.value, record.key, on_delivery=_check)
                self._producer.poll(0)

    def _flush(self) -> None:
        if left := self._producer.flush(_SEND_TIMEOUT_S):
            raise TimeoutError(f"Kafka has not acknowledged {left} events after {_SEND_TIMEOUT_S:g} s")

    def _advance(self) -> None:
        if self._sent > self._advanced:
            self._database.execute(_ADVANCE, (SLOT, self._sent))
            self._advanced = self._sent
        self._advanced_s = time.monotonic()


def _check(error: Any, _: object) -> None:
    if error is not None:
        raise KafkaException(error)  # out of poll or flush: the slot is not advanced over it


def connect() -> psycopg.Connection:
    """Connect to the database that libpq's variables name, with times in UTC."""
    return psycopg.connect(autocommit=True, options="-c timezone=UTC -c datestyle=ISO")


def wait_for_slot(database: psycopg.Connection) -> None:
    """Wait until no session uses the slot: that of a connector which was killed ends when the server notices."""
    deadline = time.monotonic() + _SLOT_TIMEOUT_S
    while database.execute("select active from pg_replication_slots where slot_name = %s", (SLOT,)).fetchone() != (
        False,
    ):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the replication slot {SLOT!r} is not there or in use by another connector")
        time.sleep(_POLL_S)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the shop's committed changes to Kafka until SIGTERM."""
    parser = argparse.ArgumentParser(prog="merchant_orders.connector", description=main.__doc__)
    parser.add_argument("--servers", default=os.environ.get("KAFKA_SERVERS", "localhost:9092"))
    parser.add_argument("--advance-every-s", type=float, default=ADVANCE_EVERY_S, help="(default %(default)s)")
    options = parser.parse_args(arguments)
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    producer = Producer(
        {"bootstrap.servers": options.servers, "enable.idempotence": True, "partitioner": "murmur2_random"}
    )
    with connect() as database:
        wait_for_slot(database)
        Connector(database, producer, options.advance_every_s).run(ending)
    return 0


if __name__ == "__main__":
    sys.exit(main())
