"""`make bench-tables`, in its short form: everything is recorded, restored, simulated and reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.bench_tables.__main__ import measure
from loadtest.bench_tables.measured import figures_of
from loadtest.bench_tables.page import write_page

pytestmark = pytest.mark.integration


def test_tables_are_measured(tmp_path: Path) -> None:
    """A workload has all its figures, and checkpoints without the changelog upload more and take longer."""
    measured = measure("value-state", short=True)
    figures = figures_of(measured)
    write_page(tmp_path / "page.html", [measured], figures)

    found = {figure.name: figure.value for figure in figures}
    assert all(value is not None for value in found.values())
    assert (found["value-state: checkpointed off/on as recorded"] or 0) > 5
    assert (found["value-state: p99.9 against off, one host"] or 0) > 5
    assert (found["value-state: full size, on/off"] or 9) < 3
    assert len(measured.real) == 2
    assert "value-state" in (tmp_path / "page.html").read_text()
