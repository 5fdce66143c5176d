"""
The change-data example between a real PostgreSQL server and its result, without Kafka and Spark.

Transactions of two sessions are decoded, written as change events, checked, joined, and compared with the tables.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from pyspark.sql import Row

from backend_client.testing import StateTester
from examples.merchant_orders.changes import Change, changes_of
from examples.merchant_orders.connector import Connector, connect, wait_for_slot
from examples.merchant_orders.processor import OrdersOfMerchant
from examples.merchant_orders.shop import generate, prepare
from examples.merchant_orders.topics import MERCHANTS, ORDERS, REFUNDS
from examples.merchant_orders.trial.checks import broken_revisions, differences, orders_of, read_database, totals_of
from examples.merchant_orders.trial.reader import Record
from tests.waiting import wait_until
from tools.servers.postgres import PostgresServer

pytestmark = pytest.mark.integration


class Sent:
    """A producer that keeps what is sent; `unacknowledged` is what a flush leaves."""

    def __init__(self) -> None:
        self.records: list[tuple[str, bytes | None]] = []
        self.unacknowledged = 0

    def produce(self, topic: str, value: bytes | None, key: bytes, on_delivery: Callable[..., None]) -> None:
        self.records.append((topic, value))

    def poll(self, timeout: float) -> None:
        pass

    def flush(self, timeout: float) -> int:
        return self.unacknowledged


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Iterator[psycopg.Connection]:
    """A connection to a new database with the shop's tables; other clients find it, too."""
    with PostgresServer() as server:
        for name, value in (("HOST", server.address), ("PORT", server.port), ("USER", server.user)):
            monkeypatch.setenv(f"PG{name}", str(value))
        monkeypatch.setenv("PGDATABASE", server.database)
        with psycopg.connect(autocommit=True) as connection:
            prepare(connection)
            yield connection


def trade(shop: psycopg.Connection, orders: int) -> None:
    """Have two sessions commit transactions until there were this many orders."""
    ending = threading.Event()

    def have_traded() -> bool:
        row = shop.execute("select last_value from orders_order_id_seq").fetchone()
        return row is not None and row[0] >= orders

    with ThreadPoolExecutor(2) as pool:
        sessions = [pool.submit(generate, seed, 1000, ending) for seed in (1, 2)]
        wait_until(have_traded, what=f"order {orders}")
        ending.set()
    assert all(session.result()["committed"] for session in sessions)


def move_all(producer: Any) -> None:
    """Run a connector until everything that is committed is sent."""
    ending = threading.Event()
    ending.set()
    with connect() as database:
        wait_for_slot(database)
        Connector(database, producer, advance_every_s=1000).run(ending)


def joined(records: list[tuple[str, bytes | None]], chance: random.Random) -> list[Record]:
    """Join events in any order, in batches, with the state restored between them; return what is published."""
    rows: dict[int, list[Change]] = defaultdict(list)
    for topic, value in records:
        for change in changes_of(topic, value):
            rows[change.merchant_id].append(change)
    published = []
    with StateTester(OrdersOfMerchant(), timeMode="ProcessingTime", keySchema="merchant_id bigint") as tester:
        for merchant, changes in rows.items():
            chance.shuffle(changes)
            for start in range(0, len(changes), 50):
                batch: list[Any] = changes[start : start + 50]  # the processor reads attributes, as of rows
                published += tester.test(merchant, batch)
            tester.checkpoint()
            tester.restore()
    return [_record(row) for row in published]


def _record(row: Row) -> Record:
    return Record(0, 0, row.key, row.value, {header.key: header.value.decode() for header in row.headers})


def test_join_of_all_changes_is_what_the_database_has(shop: psycopg.Connection) -> None:
    """Orders and totals are those of the tables, though every third event comes twice and all of them out of order."""
    trade(shop, orders=400)
    sent = Sent()

    move_all(sent)
    chance = random.Random(3)
    records = joined([*sent.records, *sent.records[::3]], chance)

    expected = read_database(shop)
    assert differences(expected.orders, orders_of(records)) == []
    assert differences(expected.totals, totals_of(orders_of(records))) == []
    assert broken_revisions(records) == 0
    assert {topic for topic, _ in sent.records} == {MERCHANTS, ORDERS, REFUNDS}
    assert any(value is None for _, value in sent.records)


def test_slot_is_advanced_only_over_what_is_acknowledged(shop: psycopg.Connection) -> None:
    """The next connector sends again the events that Kafka has not acknowledged, and no others."""
    trade(shop, orders=20)
    lost, sent, again = Sent(), Sent(), Sent()
    lost.unacknowledged = 1

    with pytest.raises(TimeoutError, match="Kafka has not acknowledged 1 events"):
        move_all(lost)
    move_all(sent)
    move_all(again)

    assert len(lost.records) == len(sent.records) > 20
    assert again.records == []
