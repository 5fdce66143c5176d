"""The comparisons find what is wrong, each of its kind."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from examples.merchant_orders.trial.checks import (
    Expected,
    broken_revisions,
    dead_letter_figures,
    orders_of,
    read_chart,
    repeated_events,
    result_figures,
    totals_of,
)
from examples.merchant_orders.trial.page import Story, Total, write_page
from examples.merchant_orders.trial.reader import Record
from tools.reporting.figures import Figure, Goal

NOON = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)
ROW = {
    "merchant": "Piazza <Foods>",
    "category": "food",
    "status": "paid",
    "ordered_at": "2026-03-02T12:00:59+00:00",
    "amount_cents": 500,
    "refunded_cents": 100,
}
DIRTY = {("shop.refunds", 1, 9): "broken JSON", ("shop.refunds", 1, 10): "missing key"}


def record(key: str, revision: int, **row: Any) -> Record:
    return Record(0, 0, key.encode(), json.dumps(row).encode() if row else None, {"revision": str(revision)})


def letter(offset: int, reason: str) -> Record:
    headers = {"topic": "shop.refunds", "partition": "1", "offset": str(offset), "reason": reason}
    return Record(0, 0, None, b"", headers)


def missed(figures: list[Figure]) -> set[str]:
    return {figure.name for figure in figures if figure.holds is False}


def test_orders_are_those_of_the_last_records() -> None:
    """The last record of a key counts; a tombstone removes it, and a cancelled order is in no total."""
    records = [record("1/7", 1, **ROW), record("1/8", 1, **ROW), record("1/8", 2), record("1/9", 1, **ROW)]
    records.append(record("1/9", 2, **{**ROW, "status": "cancelled"}))

    orders = orders_of(records)

    assert set(orders) == {"1/7", "1/9"}
    assert totals_of(orders) == {(1, NOON): (1, 500, 100)}


@pytest.mark.parametrize(
    ("revisions", "broken"), [((1, 2, 3), 0), ((1, 3), 1), ((1, 1, 2), 1), ((2,), 1), ((1, 3, 2), 2)]
)
def test_revisions_show_what_is_missing_twice_or_out_of_order(revisions: tuple[int, ...], broken: int) -> None:
    """Each key's revisions are 1, 2, 3 and so on."""
    records = [item for number in revisions for item in (record("1/7", number), record(f"2/{number}", 1))]

    assert broken_revisions(records) == broken + len(revisions) - len(set(revisions))


def test_repeated_events_are_those_of_one_position_and_key() -> None:
    """One statement may change several rows at one position; dirty records have no key."""

    def event(key: bytes | None, **value: Any) -> Record:
        return Record(0, 0, key, json.dumps(value).encode(), {})

    records = [event(b"1", source={"lsn": 5}), event(b"2", source={"lsn": 5}), event(b"1", lsn=6), event(None, lsn=5)]
    records += [event(b"1", source={"lsn": 5}), Record(0, 0, b"1", None, {})]

    assert repeated_events(records) == 1


@pytest.mark.parametrize(
    ("letters", "expected"),
    [
        ([letter(9, "broken JSON"), letter(10, "missing key: x is 'y'")], set()),
        ([letter(9, "broken JSON")], {"dirty records not among the dead letters"}),
        (
            [letter(9, "broken JSON"), letter(10, "missing key"), letter(10, "missing key")],
            {"dirty records twice among the dead letters"},
        ),
        (
            [letter(9, "broken JSON"), letter(10, "missing key"), letter(11, "missing key")],
            {"clean records among the dead letters"},
        ),
        ([letter(9, "missing key"), letter(10, "missing key")], {"dead letters with another reason"}),
    ],
)
def test_dead_letters_are_compared_with_what_was_sent(letters: list[Record], expected: set[str]) -> None:
    """Each dirty record is among the dead letters once, with its reason, and nothing else is."""
    assert missed(dead_letter_figures(DIRTY, letters)) == expected


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("", set()),
        ("records", {"orders that differ in the topic", "totals that differ in the topic"}),
        ("parquet", {"totals that differ in the Parquet files"}),
        ("chart", {"totals that differ in the chart"}),
    ],
)
def test_each_part_is_compared_with_the_database(part: str, expected: set[str]) -> None:
    """A cent too much is found wherever it is."""
    wrong = record("1/7", 1, **{**ROW, "amount_cents": 501})
    orders = orders_of([record("1/7", 1, **ROW)])
    found: dict[str, Any] = {
        "records": [wrong if part == "records" else record("1/7", 1, **ROW)],
        "parquet": {(1, NOON): (1, 501 if part == "parquet" else 500, 100)},
        "chart": {(1, NOON): 401 if part == "chart" else 400},
    }

    figures, texts = result_figures(Expected(orders, {(1, NOON): (1, 500, 100)}), **found)

    assert missed(figures) == expected
    assert len(texts) == len(expected)


def test_chart_is_read_from_the_page(tmp_path: Path) -> None:
    """The page shows each total in the chart, and escapes names; what is shown can be read back."""
    totals = [
        Total(1, "Piazza <Foods>", NOON, 2, 500, 100),
        Total(1, "Piazza <Foods>", NOON.replace(minute=1), 1, 5, 9),
    ]
    story = Story([(3.2, "something was killed")], [Figure("wrong", 1, "orders", Goal("==", 0))])

    write_page(tmp_path / "page.html", totals, ["missing key: a", "missing key: b", "broken JSON"], story)

    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert read_chart(page) == {(1, NOON): 400, (1, NOON.replace(minute=1)): -4}
    assert "Piazza &lt;Foods&gt;" in page
    assert "<Foods>" not in page
    assert "1 check does not hold." in page


def test_page_of_nothing(tmp_path: Path) -> None:
    """A run whose totals are empty has a page, too."""
    write_page(tmp_path / "page.html", [], [])

    assert read_chart((tmp_path / "page.html").read_text(encoding="utf-8")) == {}
