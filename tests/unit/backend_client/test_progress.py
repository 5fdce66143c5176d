"""The figures of a batch: as text, on a terminal, and as reported to the coordinator."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from backend_client.progress import BatchProgress
from backend_client.progress_line import ProgressLine
from backend_client.service.job_session import figures_of
from storage.errors import InvalidInputError

PROGRESS = BatchProgress(
    job="orders",
    batch_id=7,
    rows=200_000,
    keys=20_000,
    changes=20_001,
    state_ms=500.4,
    function_ms=100.0,
    checkpoint_ms=50.6,
    bytes_written=3_000_000,
    objects_written=2,
    tries=2,
    state_reads=19_000,
    log_bytes=1536,
    table_bytes=5 << 30,
    upload_ms=30.0,
    manifest_ms=4.0,
)
TEXT = (
    "orders batch 7: 200,000 rows, 20,000 keys, 19,000 reads, 20,001 writes, log 1.5 KB, tables 5.0 GB; 651 ms "
    "(state 500, function 100, checkpoint 51), executed 2 times"
)


def test_text_has_all_figures() -> None:
    """A batch is one readable line with its phases, and with its tries only if there were several."""
    assert PROGRESS.to_text() == TEXT
    assert replace(PROGRESS, unpublished=3).to_text() == f"{TEXT}, 3 unpublished"


def test_lines_without_a_terminal() -> None:
    """In a log file each batch is a line, whatever the width."""
    out = io.StringIO()
    with ProgressLine(Console(file=out, width=40)) as line:
        line(PROGRESS)
        line(PROGRESS)

    assert out.getvalue() == f"{TEXT}\n{TEXT}\n"


def test_one_line_per_job_on_a_terminal() -> None:
    """A terminal shows the newest batch of each job, and nothing after closing."""
    out = io.StringIO()
    console = Console(file=out, width=250, force_terminal=True)
    line = ProgressLine(console)
    for _ in range(3):
        line(PROGRESS)
    line.close()
    line.close()

    assert TEXT in out.getvalue()
    assert out.getvalue().count("\n") <= 2


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rich the error names the package to install."""
    monkeypatch.setitem(__import__("sys").modules, "rich.console", None)

    with pytest.raises(InvalidInputError, match="pip install rich"):
        ProgressLine()


def test_coordinator_gets_rounded_figures() -> None:
    """The coordinator gets the same figures for the metrics, rounded."""
    figures = figures_of(PROGRESS)

    assert (figures.rows, figures.state_ms, figures.checkpoint_ms, figures.tries) == (200_000, 500, 51, 2)
