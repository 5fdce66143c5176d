"""The differences that make a run wrong, whether it is strict or not."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest

from examples.merchant_orders import demo
from examples.merchant_orders.topics import DEAD_LETTERS, RESULT
from examples.merchant_orders.trial.checks import Expected
from examples.merchant_orders.trial.reader import Record
from examples.merchant_orders.trial.run import Run

PLACE = ("shop.refunds", 1, 9)
LETTER = Record(0, 0, None, b"", {"topic": PLACE[0], "partition": "1", "offset": "9", "reason": "broken JSON: ?"})


@pytest.mark.parametrize(
    ("letters", "wrong"),
    [
        ([], "dirty records not among the dead letters: 1"),
        ([LETTER, LETTER], "dirty records twice among the dead letters: 1"),
        ([LETTER], None),
    ],
)
def test_lost_and_doubled_records_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, letters: list[Record], wrong: str | None
) -> None:
    """They fail a run, like a total that differs: a goal that is missed does so only with STRICT=1."""
    of_order: dict[str, Any] = {"headers": {"revision": "1"}, "partition": 0, "offset": 0, "key": b"1/7", "value": None}
    topics = {RESULT: [Record(**of_order)], DEAD_LETTERS: letters}
    monkeypatch.setattr(demo, "read_topic", lambda _, topic: topics.get(topic, []))
    monkeypatch.setattr(demo, "read_totals", lambda _: [])
    monkeypatch.setattr(demo, "read_database", lambda _: Expected({}, {}))
    monkeypatch.setattr(psycopg, "connect", nullcontext)
    run = SimpleNamespace(
        parquet=tmp_path,
        dirty=SimpleNamespace(sent={PLACE: "broken JSON"}),
        shop=SimpleNamespace(last_line=lambda: '{"committed": 1}'),
        kills=4,
        restarts=0,
        figures=[],
        events=[],
    )
    _, found = demo.evaluate(cast("Run", run), "servers", tmp_path / "page.html")
    expected = ["orders in the database: 0", "totals in the database: 0", *filter(None, [wrong])]
    assert found == expected
