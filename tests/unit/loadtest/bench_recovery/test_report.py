"""The figures of losses, and when they count."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.bench_recovery.plan import COLUMNS, PROCESS, RESTART, SHORT
from loadtest.bench_recovery.report import compared, figures_of, histories, write_page
from loadtest.bench_recovery.running import ColumnRun, Loss
from tools.reporting.figures import Figure

SIZE = replace(SHORT, rows=2, partitions=2, trigger_s=2.0)


def run_of(column: str, way: str, gap_s: float, batch_ms: float = 500.0, lost: int = 0) -> ColumnRun:
    """Return a column with one loss, at 15 s, after which partition 0 has its next output after this gap."""
    run = ColumnRun(next(one for one in COLUMNS if one.name == column), SIZE)
    late_s = 14.0 + SIZE.trigger_s + gap_s
    for batch, (at_s, partitions) in enumerate([(12.0, (0, 1)), (14.0, (0, 1)), (16.5, (1,)), (late_s, (0, 1))]):
        rows = [[partition, batch + 1, partition, "host"] for partition in partitions]
        run.observed.take(json.dumps({"kind": "output", "at_s": at_s, "batch": batch, "rows": rows}))
        figures = {
            "kind": "progress",
            "at_s": at_s,
            "batch_id": batch,
            "rows_lost": lost * (batch == 2),
            "rows_waiting": 0,
        }
        run.observed.take(json.dumps(figures))
        run.observed.take(json.dumps({"kind": "batch", "at_s": at_s, "batch": batch, "ms": batch_ms}))
    run.calm_s.append((10.0, 14.5))
    run.losses.append(Loss(way, 15.0, frozenset({0}), late_s, None, late_s + 1, 3e6))
    return run


def named(figures: list[Figure]) -> dict[str, Figure]:
    """Return figures by name."""
    return {figure.name: figure for figure in figures}


def test_gaps_of_affected_and_others_have_goals() -> None:
    """With a standby both have one; the row that is missing is listed, so nothing else is."""
    figures = named(figures_of(run_of("bounded-loss+standby", PROCESS, 2.5, lost=1), wrong=0, is_short=False))

    affected = figures["bounded-loss+standby, process killed: gap of the affected, longest"]
    others = figures["bounded-loss+standby, process killed: gap of the others, longest"]
    assert affected.value == pytest.approx(2.5)
    assert affected.holds is False
    assert others.value == pytest.approx(0.5)
    assert others.holds is True
    assert figures["bounded-loss+standby: rows missing and not listed"].holds
    assert figures["bounded-loss+standby: rows missing"].value == pytest.approx(100 / 8)


def test_a_busy_run_has_no_goals_but_exactness() -> None:
    """Gaps count only where undisturbed batches leave a third of the trigger; a missing row always does."""
    figures = named(figures_of(run_of("exact+standby", PROCESS, 2.5, batch_ms=1_900.0), wrong=0, is_short=False))

    assert figures["exact+standby, process killed: gap of the affected, longest"].holds is None
    assert figures["exact+standby: rows missing and not listed"].holds is False


def test_gaps_are_compared_with_spark_and_a_restart(tmp_path: Path) -> None:
    """Each has a ratio where the other side was measured; the page has a plot of each column and way."""
    runs = [run_of("exact+standby", PROCESS, 1.0), run_of("restart", RESTART, 20.0), run_of("spark", PROCESS, 4.0)]

    figures = named(compared(runs, is_short=False))

    assert figures["exact+standby, process killed: gap of the affected / Spark's"].value == pytest.approx(0.25)
    ratio = figures["exact+standby, process killed: gap of the affected / stop and start"]
    assert ratio.value == pytest.approx(0.05)
    assert ratio.holds is True
    assert not any(name.startswith(("spark", "restart")) for name in figures)
    assert named(compared(runs[:1], is_short=False)) == {}
    plots = histories(runs)
    assert len(plots) == 3
    assert all(len(plot.series[0].points) == 300 for plot in plots)
    assert plots[0].markers[0].x == 0
    write_page(plots, [*figures.values()], SIZE, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8").count("<svg") == 3
