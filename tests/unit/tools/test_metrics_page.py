"""The reference page of all metrics."""

from __future__ import annotations

import re

from storage.memory_store import MemoryStore
from tests.unit.dstl_service.http_life import service
from tools import metrics_page


def test_page_is_in_step_with_code() -> None:
    """docs/metrics.md is the current output of `make metrics-page`."""
    assert metrics_page.PAGE.read_text(encoding="utf-8") == metrics_page.page()


def test_page_has_every_metric_of_a_service() -> None:
    """Every metric of a running service has a row with its kind."""
    with service(MemoryStore()) as life:
        shown = re.findall(r"^# TYPE (\w+) (\w+)$", life.client.get("/metrics").text, re.MULTILINE)
    rows = {(name, kind) for name, kind, _, _ in metrics_page.rows(metrics_page.registry())}

    assert {(name, kind) for name, kind in shown if not name.endswith("_created")} == rows
