"""The totals as a web page; everything on it comes from the Parquet files and the topics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from tools.reporting.figures import Figure
from tools.reporting.heat_map import heat_map
from tools.reporting.page import HtmlReport
from tools.reporting.plots import Series, line_plot


class Total(NamedTuple):
    """A merchant's orders of one minute; amounts in cents."""

    merchant_id: int
    merchant: str
    minute: datetime
    orders: int
    amount_cents: int
    refunded_cents: int

    @property
    def net_cents(self) -> int:
        """What is left after refunds."""
        return self.amount_cents - self.refunded_cents


@dataclass(frozen=True, slots=True)
class Story:
    """What happened during a run, and whether the result is right."""

    events: Sequence[tuple[float, str]]
    """Each with the seconds since the start."""
    figures: Sequence[Figure]

    @property
    def verdict(self) -> str:
        """The result in a few words."""
        missed = sum(figure.holds is False for figure in self.figures)
        if missed == 1:
            return "1 check does not hold."
        return f"{missed} checks do not hold." if missed else "Database, topic, Parquet files and chart agree."


def read_totals(folder: Path) -> list[Total]:
    """Return the totals that `examples.merchant_orders.totals` has written, with times in UTC."""
    rows: list[dict[str, Any]] = pq.read_table(folder).to_pylist()
    return [Total(**{**row, "minute": row["minute"].replace(tzinfo=UTC)}) for row in rows]


def write_page(path: Path, totals: Sequence[Total], reasons: Iterable[str], story: Story | None = None) -> None:
    """
    Write the page.

    Args:
        path: The file.
        totals: In the order of minutes within a merchant.
        reasons: The reason of each dead letter.
        story: What happened; None before the result is checked.
    """
    merchants = {str(total.merchant_id): total.merchant for total in totals}
    net_cents = sum(total.net_cents for total in totals)
    orders = sum(total.orders for total in totals)
    report = HtmlReport(
        "Merchants and their orders",
        f"{orders:,} orders of {len(merchants)} merchants, {_euros(net_cents)} after refunds, from change events of a "
        f"PostgreSQL database. {story.verdict if story else ''}",
    )
    report.add_plot(_map(totals, merchants))
    report.add_plot(_lines(totals))
    report.add_heading("Merchants")
    report.add_table(["Merchant", "Orders", "Sold, €", "Refunded, €", "Refunded, %", "Net, €"], _merchants(totals))
    report.add_heading("Dead letters")
    report.add_table(["Reason", "Records"], [list(row) for row in Counter(map(_kind, reasons)).most_common()])
    if story is not None:
        report.add_heading("The run")
        report.add_table(["Second", "What happened"], [[round(second), text] for second, text in story.events])
        report.add_heading("Checks")
        report.add_figures(story.figures)
    report.write(path)


def _map(totals: Sequence[Total], merchants: dict[str, str]) -> str:
    minutes = sorted({total.minute for total in totals})
    columns = {minute.isoformat(): f"{minute:%H:%M}" for minute in minutes}
    values = {(str(total.merchant_id), total.minute.isoformat()): total.net_cents for total in totals}
    return heat_map("Net sales per merchant and minute", merchants, columns, values, _euros)


def _lines(totals: Sequence[Total]) -> str:
    sold, refunded = Counter[datetime](), Counter[datetime]()
    for total in totals:
        sold[total.minute] += total.amount_cents
        refunded[total.minute] += total.refunded_cents
    first = min(sold, default=None)

    def points(cents: Counter[datetime]) -> list[tuple[float, float]]:
        return [((minute - first).total_seconds() / 60, cents[minute] / 100) for minute in sorted(sold) if first]

    label = f"minutes since {first:%H:%M}" if first else "minutes"
    series = [Series("sold", points(sold)), Series("refunded later", points(refunded))]
    return line_plot("All merchants, by the minute of the order", label, "€", series)


def _merchants(totals: Sequence[Total]) -> list[list[object]]:
    sums: dict[int, Counter[str]] = {}
    for total in totals:
        found = sums.setdefault(total.merchant_id, Counter())
        found.update(orders=total.orders, sold=total.amount_cents, refunded=total.refunded_cents)
    names = {total.merchant_id: total.merchant for total in totals}
    rows: list[list[object]] = [
        [
            names[merchant_id],
            found["orders"],
            round(found["sold"] / 100),
            round(found["refunded"] / 100),
            round(100 * found["refunded"] / found["sold"]),
            round((found["sold"] - found["refunded"]) / 100),
        ]
        for merchant_id, found in sums.items()
    ]
    return rows


def _kind(reason: str) -> str:
    return reason.partition(":")[0]


def _euros(cents: int) -> str:
    return f"{cents / 100:,.0f} €"
