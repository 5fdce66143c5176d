"""Figures and report of the flights demo, from the records of a run; starts and kills no processes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from examples.flights.answer import ROUTE, plain_rows
from examples.flights.files import read_lines
from tools.reporting.figures import Figure, Goal, percentile
from tools.reporting.page import HtmlReport
from tools.reporting.plots import Marker, Series, histogram, line_plot


@dataclass(slots=True)
class DemoRun:
    """The records of a run; moments are seconds since the epoch, as in `examples.flights.files.ProgressLog`."""

    engine: str
    rows: int
    batches: int
    started_s: float
    ended_s: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    unplanned_restarts: int = 0
    differences: list[str] = field(default_factory=list)
    output: pd.DataFrame = field(default_factory=pd.DataFrame)


@dataclass(slots=True)
class Kill:
    """One SIGKILL in the middle of a batch."""

    what: str
    batch_id: int
    """The batch that was running."""
    killed_s: float
    resumed_s: float | None = None
    """When that batch, or a later one, had finished; None if none did."""

    @property
    def resume_s(self) -> float | None:
        """Seconds from the kill to the next finished batch."""
        return None if self.resumed_s is None else self.resumed_s - self.killed_s


def read_checkpoint_figures(path: Path) -> list[dict[str, Any]]:
    """
    Return one entry per checkpoint, in the order of batches; for a repeated batch, the last one.

    Entries have ``batch_id``, ``checkpoint_ms`` (what the checkpoint added to the batch), ``bytes`` and ``objects``
    written, and ``rows``.
    """
    by_batch = {line["batch_id"]: line for line in read_lines(path)}
    return [by_batch[batch_id] for batch_id in sorted(by_batch)]


def figures_of(run: DemoRun) -> list[Figure]:
    """Return the figures of a run, with their goals."""
    batch_s = sum(event["duration_ms"] for event in run.events) / 1000
    rows_in_batches = run.rows / run.batches * len(run.events)
    wall_s = run.ended_s - run.started_s
    figures = [
        Figure("output rows that differ", len(run.differences), "rows", Goal("==", 0)),
        Figure("output rows compared", len(run.output), "rows", Goal(">=", 1)),
        Figure("input rows", run.rows, "rows"),
        Figure("throughput in batches", rows_in_batches / batch_s if batch_s else None, "rows/s"),
        Figure("throughput with start and kills", run.rows / wall_s, "rows/s"),
        Figure("run time", wall_s, "s", Goal("<=", 240)),
        Figure("unplanned driver restarts", run.unplanned_restarts, "", Goal("==", 0)),
    ]
    for what in ("driver", *(["sidecar"] if run.engine == "changelog" else [])):
        kills = [kill for kill in run.kills if kill.what == what]
        survived = [kill.resume_s for kill in kills if kill.resume_s is not None]
        figures.append(Figure(f"{what} kills survived", len(survived), "", Goal(">=", 1)))
        figures.append(Figure(f"time to resume after {what} kill", max(survived, default=None), "s"))
    interrupted = {kill.batch_id for kill in run.kills if kill.what == "sidecar"}
    return figures + (_checkpoint_figures(run.checkpoints, interrupted) if run.engine == "changelog" else [])


def _checkpoint_figures(checkpoints: Sequence[dict[str, Any]], interrupted: Collection[int]) -> list[Figure]:
    latencies, sizes = [line["checkpoint_ms"] for line in checkpoints], [line["bytes"] for line in checkpoints]
    # Tasks that meet another sidecar than their batch began with store their changes alone.
    alone = [line["objects"] for line in checkpoints if line["batch_id"] in interrupted]
    objects = [line["objects"] for line in checkpoints if line["batch_id"] not in interrupted]
    return [
        Figure("checkpoints", len(checkpoints), "", Goal(">=", 1)),
        Figure("checkpoint latency p50", percentile(latencies, 50), "ms"),
        Figure("checkpoint latency p99", percentile(latencies, 99), "ms"),
        Figure("checkpoint latency max", max(latencies, default=None), "ms"),
        Figure("bytes per checkpoint p50", percentile(sizes, 50), "B"),
        Figure("bytes per checkpoint max", max(sizes, default=None), "B"),
        Figure("objects per checkpoint max", max(objects, default=None), "", Goal("<=", 3)),
        Figure("objects of the checkpoint whose sidecar was killed", max(alone, default=None), ""),
    ]


def write_html(path: Path, run: DemoRun, figures: Sequence[Figure]) -> None:
    """Write the report of a run."""
    verdict = "differs from" if run.differences else "is identical, row for row, to"
    state = "the changelog state backend" if run.engine == "changelog" else "Spark's own transformWithState"
    summary = f"336,776 flights and 26,115 hours of weather on {state}; the output {verdict} the batch answer."
    report = HtmlReport("Flights demo", summary)
    report.add_figures(figures)
    report.add_heading("The run")
    done = [(0.0, 0.0)] + [(event["recorded_s"] - run.started_s, event["batch_id"] + 1) for event in run.events]
    report.add_plot(
        line_plot("Finished batches", "seconds since the start", "batches", [Series("batches", done)], _markers(run))
    )
    durations = [(event["batch_id"], event["duration_ms"]) for event in run.events]
    report.add_plot(line_plot("Time per batch", "batch", "ms", [Series("batch", durations)]))
    if run.checkpoints:
        _add_checkpoints(report, run.checkpoints)
    if run.differences:
        report.add_heading("Differences")
        for text in run.differences[:20]:
            report.add_text(text)
    if len(run.output):
        report.add_heading("The twelve busiest routes")
        report.add_table(*_busiest(run.output, 12))
    report.write(path)


def _markers(run: DemoRun) -> list[Marker]:
    markers = []
    for kill in run.kills:
        markers.append(Marker(kill.killed_s - run.started_s, f"{kill.what} killed in batch {kill.batch_id}"))
        if kill.resumed_s is not None and kill.resume_s is not None:
            markers.append(Marker(kill.resumed_s - run.started_s, f"resumed after {kill.resume_s:.1f} s"))
    return markers


def _add_checkpoints(report: HtmlReport, checkpoints: Sequence[dict[str, Any]]) -> None:
    def series(name: str) -> list[Series]:
        return [Series(name, [(line["batch_id"], line[name]) for line in checkpoints])]

    report.add_heading("Checkpoints")
    report.add_plot(line_plot("Latency", "batch", "ms", series("checkpoint_ms")))
    report.add_plot(histogram("Distribution of latencies", "ms", [line["checkpoint_ms"] for line in checkpoints]))
    report.add_plot(line_plot("Size", "batch", "bytes", series("bytes")))
    report.add_plot(line_plot("Objects written", "batch", "objects", series("objects")))


def _busiest(output: pd.DataFrame, count: int) -> tuple[list[str], list[list[object]]]:
    names = {
        "flights": "Flights",
        "cancelled": "Cancelled",
        "mean_delay": "Mean delay, min",
        "p95_delay": "p95, min",
        "mean_delay_clear": "Clear",
        "mean_delay_rain": "Rain",
        "mean_delay_wind": "Wind",
        "mean_delay_low_visibility": "Low visibility",
    }
    top = output.sort_values("flights", ascending=False).head(count)
    rows = [[f"{origin} → {dest}", *values] for origin, dest, *values in plain_rows(top[[*ROUTE, *names]])]
    return ["Route", *names.values()], rows
