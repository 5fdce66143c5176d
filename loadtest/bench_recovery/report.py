"""The figures of the benchmark, with their goals, and its page."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from loadtest.bench_recovery.event_log import parts_ms
from loadtest.bench_recovery.observed import missing_rows
from loadtest.bench_recovery.plan import HOST, RESTART, Size
from loadtest.bench_recovery.running import ColumnRun, Loss, sides
from tools.reporting.figures import Figure, Goal, percentile
from tools.reporting.history import History
from tools.reporting.page import HtmlReport
from tools.reporting.plots import Marker, Series

CALM_MAX = 0.7
"""Gaps count where the 95th percentile of undisturbed batches is at most this share of the trigger."""
_BEFORE_S, _AFTER_S = 5.0, 25.0


def calm_ms(run: ColumnRun) -> list[float]:
    """Return the durations of the batches that no loss has disturbed."""
    return [ms for at_s, ms in run.observed.batches if any(first < at_s <= last for first, last in run.calm_s)]


def gaps_count(run: ColumnRun) -> bool:
    """Say whether the run was calm enough for its gaps to count."""
    p95 = percentile(calm_ms(run), 95)
    return p95 is not None and p95 <= CALM_MAX * run.size.trigger_s * 1000


def gaps_s(run: ColumnRun, way: str) -> tuple[list[float], list[float]]:
    """Return the gaps of the affected partitions and of the others, one for each loss."""
    affected: list[float] = []
    others: list[float] = []
    for loss in _of(run, way):
        for found, partitions in zip((affected, others), sides(run, loss), strict=True):
            gap = run.observed.gap_s(partitions, run.size.trigger_s, loss.moment_s, loss.over_s)
            found.extend([] if gap is None else [gap])
    return affected, others


def figures_of(run: ColumnRun, wrong: int, *, is_short: bool) -> list[Figure]:
    """
    Return a column's figures.

    Args:
        run: The column.
        wrong: Output rows that are not the next of their key.
        is_short: Whether only what must hold at any size has a goal.
    """
    name, calm = run.column.name, calm_ms(run)
    came = run.size.rows * len({output.batch for output in run.observed.outputs})
    missing = missing_rows(run.observed.outputs, run.size.rows)
    listed = sum(int(one["rows_lost"]) for one in run.observed.progress)
    figures = [
        Figure(f"{name}: undisturbed batch, median", statistics.median(calm) if calm else None, "ms"),
        Figure(f"{name}: undisturbed batch, p95 / trigger", _share(run, calm), "ratio"),
        Figure(f"{name}: rows that are not the next of their key", wrong, "rows", Goal("==", 0)),
        Figure(f"{name}: rows missing and not listed", missing - listed, "rows", Goal("==", 0)),
        Figure(f"{name}: rows missing", 100 * missing / came if came else None, "%"),
    ]
    for way in dict.fromkeys(loss.way for loss in run.losses):
        figures += _of_way(run, way, is_short=is_short)
    return figures


def _of_way(run: ColumnRun, way: str, *, is_short: bool) -> list[Figure]:
    name, losses = f"{run.column.name}, {way}", _of(run, way)
    affected, others = gaps_s(run, way)
    has_goals = run.column.is_ours and gaps_count(run) and not is_short
    standby = Goal("<=", 3.5 if way == HOST else 2.0) if run.column.replicas and has_goals else None
    calm = calm_ms(run)
    on_time = None
    if run.column.failover in ("deferred", "bounded-loss") and has_goals and way != RESTART:
        on_time = Goal("<=", 1.0 + statistics.median(calm) / 1000)
    whole = [loss.whole_s - loss.moment_s for loss in losses]
    copied = [loss.copied_s - loss.moment_s for loss in losses if loss.copied_s is not None]
    return [
        Figure(f"{name}: gap of the affected, median", _median(affected), "s"),
        Figure(f"{name}: gap of the affected, longest", max(affected, default=None), "s", standby),
        Figure(f"{name}: gap of the others, longest", max(others, default=None), "s", on_time),
        Figure(f"{name}: until the state is whole, median", _median(whole), "s"),
        *(Figure(f"{name}: {part}, median", _median(values), "s") for part, values in _parts_s(run, losses).items()),
        *([Figure(f"{name}: until copies are complete, median", _median(copied), "s")] if copied else []),
        *(
            [Figure(f"{name}: read by tables, most", max(one.read_bytes for one in losses) / 1e6, "MB")]
            if run.column.is_ours
            else []
        ),
    ]


def compared(runs: Sequence[ColumnRun], *, is_short: bool) -> list[Figure]:
    """Return how the gaps compare with Spark's own operator and with a stop and start, where those were measured."""
    by_name = {run.column.name: run for run in runs}
    spark, restart = by_name.get("spark"), by_name.get("restart")
    stopped = None if restart is None else _median(gaps_s(restart, RESTART)[0])
    figures = []
    for run in runs:
        if run in (spark, restart):
            continue
        for way in dict.fromkeys(loss.way for loss in run.losses):
            affected, others = (_median(gaps) for gaps in gaps_s(run, way))
            theirs = None if spark is None else _median(gaps_s(spark, way)[0])
            name, has_goal = f"{run.column.name}, {way}: gap", not is_short
            on_time = has_goal and run.column.failover != "exact"
            figures += _ratio(f"{name} of the affected / Spark's", affected, theirs, 1.0 if has_goal else None)
            bound = 0.1 if has_goal and run.column.replicas else None
            figures += _ratio(f"{name} of the affected / stop and start", affected, stopped, bound)
            figures += _ratio(f"{name} of the others / stop and start", others, stopped, 0.05 if on_time else None)
    return figures


def _ratio(name: str, gap: float | None, base: float | None, bound: float | None) -> list[Figure]:
    if gap is None or not base:
        return []
    return [Figure(name, gap / base, "ratio", None if bound is None else Goal("<=", bound))]


def histories(runs: Sequence[ColumnRun]) -> list[History]:
    """Return the rows that came out around the first loss of each column and way, which is at 0."""
    found: list[History] = []
    for run in runs:
        for way in dict.fromkeys(loss.way for loss in run.losses):
            loss = _of(run, way)[0]
            bins = run.observed.rows_per_bin(loss.moment_s - _BEFORE_S, loss.moment_s + _AFTER_S)
            line = Series("rows", [(at_s - _BEFORE_S, rows) for at_s, rows in bins])
            title, markers = f"{run.column.name}: {way}", (Marker(0.0, way),)
            found.append(History(title, "s", "rows per 100 ms", (line,), markers))
    return found


def write_page(plots: Sequence[History], figures: Sequence[Figure], size: Size, path: Path) -> None:
    """Write the page: the plots of `histories`, and all figures."""
    batches = f"a batch of {size.rows} rows each {size.trigger_s:g} s"
    summary = f"{size.keys:,} keys of 1 KB, {size.partitions} partitions, {batches}."
    page = HtmlReport("An executor is lost", f"Rows out per 100 ms; 0 is the moment of the loss. {summary}")
    for plot in plots:
        page.add_plot(plot.svg())
    page.add_figures(figures)
    page.write(path)


def _of(run: ColumnRun, way: str) -> list[Loss]:
    return [loss for loss in run.losses if loss.way == way]


def _share(run: ColumnRun, calm: Sequence[float]) -> float | None:
    p95 = percentile(calm, 95)
    return None if p95 is None else p95 / run.size.trigger_s / 1000


def _parts_s(run: ColumnRun, losses: Sequence[Loss]) -> dict[str, list[float]]:
    """Return the parts of the pauses after these losses, see `event_log`; of a whole query's there is no log."""
    found: dict[str, list[float]] = {}
    to_epoch_s = time.time() - time.monotonic()
    for loss in losses:
        if loss.way == RESTART:
            continue
        times_ms = ((at_s + to_epoch_s) * 1000 for at_s in (loss.moment_s, loss.whole_s))
        for part, spent_ms in parts_ms(run.events, *times_ms).items():
            found.setdefault(part, []).append(spent_ms / 1000)
    return found


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
