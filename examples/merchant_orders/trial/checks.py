"""Compares the pipeline's output with the database, the dirty records, and the page."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias

import psycopg

from examples.merchant_orders.trial.reader import Record
from tools.reporting.figures import Figure, Goal

Orders: TypeAlias = Mapping[str, Any]
"""Merchant, status, time and amounts of each order, by ``merchant/order``."""

Totals: TypeAlias = Mapping[tuple[int, datetime], tuple[Any, ...]]
"""By merchant and minute: number of orders, their amount, their refunds, in cents."""

_ORDERS = """
select o.merchant_id || '/' || o.order_id, m.name, m.category, o.status, o.ordered_at, o.amount_cents,
    coalesce((select sum(r.amount_cents) from refunds r where r.order_id = o.order_id), 0)::bigint
from orders o join merchants m using (merchant_id)
"""
_TOTALS = """
select o.merchant_id, date_trunc('minute', o.ordered_at), count(*), sum(o.amount_cents)::bigint,
    coalesce(sum((select sum(r.amount_cents) from refunds r where r.order_id = o.order_id)), 0)::bigint
from orders o where o.status <> 'cancelled' group by 1, 2
"""
_CELL = re.compile(r'data-row="(\d+)" data-column="([^"]+)" data-value="(-?\d+)"')


class Expected(NamedTuple):
    """What the database says."""

    orders: Orders
    totals: Totals


def read_database(connection: psycopg.Connection) -> Expected:
    """Read orders and totals in one transaction."""
    connection.execute("set timezone = 'UTC'")
    orders = {key: tuple(columns) for key, *columns in connection.execute(_ORDERS)}
    totals = {(merchant, minute): tuple(columns) for merchant, minute, *columns in connection.execute(_TOTALS)}
    return Expected(orders, totals)


def orders_of(records: Iterable[Record]) -> Orders:
    """Return the orders that exist according to the result's topic."""
    latest = {record.key: record.value for record in records}
    return {key.decode(): _order(json.loads(value)) for key, value in latest.items() if key and value}


def _order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    moment = datetime.fromisoformat(row["ordered_at"])
    return row["merchant"], row["category"], row["status"], moment, row["amount_cents"], row["refunded_cents"]


def totals_of(orders: Orders) -> Totals:
    """Add up orders as the database does."""
    found: dict[tuple[int, datetime], Counter[str]] = defaultdict(Counter)
    for key, (_, _, status, moment, amount_cents, refunded_cents) in orders.items():
        if status != "cancelled":
            place = int(key.partition("/")[0]), moment.replace(second=0, microsecond=0)
            found[place].update(orders=1, amount=amount_cents, refunded=refunded_cents)
    return {place: (sums["orders"], sums["amount"], sums["refunded"]) for place, sums in found.items()}


def read_chart(page: str) -> dict[tuple[int, datetime], int]:
    """Return the cells of a page's chart: cents by merchant and minute."""
    return {(int(row), datetime.fromisoformat(column)): int(value) for row, column, value in _CELL.findall(page)}


def differences(expected: Mapping[Any, Any], found: Mapping[Any, Any]) -> list[str]:
    """Return where two mappings differ."""
    keys = sorted(expected.keys() | found.keys(), key=str)
    return [f"{key}: {expected.get(key)} != {found.get(key)}" for key in keys if expected.get(key) != found.get(key)]


def broken_revisions(records: Sequence[Record]) -> int:
    """Return how many records do not follow the one before them: one is missing, twice there, or out of order."""
    last: Counter[bytes | None] = Counter()
    broken = 0
    for record in records:
        revision = int(record.headers["revision"])
        broken += revision != last[record.key] + 1
        last[record.key] = revision
    return broken


def repeated_events(records: Iterable[Record]) -> int:
    """Return how many of the connector's change events, which have keys, are in their topic for a second time."""
    seen: Counter[tuple[bytes, int]] = Counter()
    for record in records:
        if record.key is not None and record.value is not None:
            event = json.loads(record.value)
            seen[record.key, event.get("source", event)["lsn"]] += 1
    return seen.total() - len(seen)


def dead_letter_figures(sent: Mapping[tuple[str, int, int], str], records: Sequence[Record]) -> list[Figure]:
    """Compare dead letters with the dirty records that were sent: place and reason."""
    places = [
        (record.headers["topic"], int(record.headers["partition"]), int(record.headers["offset"])) for record in records
    ]
    found = Counter(places)
    other = sum(
        sent.get(place) not in (None, record.headers["reason"].partition(":")[0])
        for place, record in zip(places, records, strict=True)
    )
    none = Goal("==", 0)
    return [
        Figure("dirty records sent", len(sent), "records", Goal(">=", 1)),
        Figure("dirty records not among the dead letters", len(sent.keys() - found.keys()), "records", none),
        Figure("dirty records twice among the dead letters", found.total() - len(found), "records", none),
        Figure("clean records among the dead letters", len(found.keys() - sent.keys()), "records", none),
        Figure("dead letters with another reason", other, "records", none),
    ]


def result_figures(
    expected: Expected, records: Sequence[Record], parquet: Totals, chart: Mapping[tuple[int, datetime], int]
) -> tuple[list[Figure], list[str]]:
    """Compare topic, Parquet files and chart with the database; return figures, and what differs as text."""
    orders = orders_of(records)
    in_topic = differences(expected.orders, orders)
    in_totals = differences(expected.totals, totals_of(orders))
    in_parquet = differences(expected.totals, parquet)
    net = {place: amount - refunded for place, (_, amount, refunded) in expected.totals.items()}
    in_chart = differences(net, chart)
    none = Goal("==", 0)
    figures = [
        Figure("orders in the database", len(expected.orders), "orders", Goal(">=", 1)),
        Figure("orders that differ in the topic", len(in_topic), "orders", none),
        Figure("records in the topic", len(records), "records", Goal(">=", 1)),
        Figure("records missing, twice or out of order", broken_revisions(records), "records", none),
        Figure("totals in the database", len(expected.totals), "totals", Goal(">=", 1)),
        Figure("totals that differ in the topic", len(in_totals), "totals", none),
        Figure("totals that differ in the Parquet files", len(in_parquet), "totals", none),
        Figure("totals that differ in the chart", len(in_chart), "totals", none),
    ]
    return figures, [*in_topic, *in_totals, *in_parquet, *in_chart]
