"""The page of `make bench-tables`: the measurements beside the values that Flink publishes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from loadtest.bench_tables.cells import STORE, WAYS
from loadtest.bench_tables.measured import Measured
from loadtest.bench_tables.published import PERCENTS, TABLES
from loadtest.bench_tables.simulation import FLINKS, ONE_HOST
from tools.reporting.figures import Figure, percentile
from tools.reporting.page import HtmlReport
from tools.servers.faults.store_profiles import PROFILES

_HEADER = ["", *(f"p{percent:g}" for percent in PERCENTS)]


def write_page(path: Path, measured: Sequence[Measured], figures: Sequence[Figure]) -> None:
    """Write the page."""
    page = HtmlReport("Flink's tables again", f"Checkpoints with the changelog on and off, at the store {STORE}.")
    for found in measured:
        _add(page, found)
    page.add_heading("What is assumed")
    for assumption in PROFILES[STORE].assumptions:
        page.add_text(assumption)
    page.add_text("Flink's store was another one, so the ratios compare, not the times.")
    page.add_heading("All figures")
    page.add_figures(figures)
    page.write(path)


def _add(page: HtmlReport, found: Measured) -> None:
    published = TABLES[found.name]
    page.add_heading(found.name)
    page.add_text("Duration of a checkpoint in ms")
    rows: list[list[object]] = [["Flink, on", *published.duration_ms.on], ["Flink, off", *published.duration_ms.off]]
    for layout in (ONE_HOST, FLINKS):
        for way in WAYS:
            one = found.of(way, layout.name)
            rows.append([one.name, *(one.at(percent) for percent in PERCENTS)])
    page.add_table(_HEADER, rows)
    page.add_text("Checkpointed size in MB; off has Flink's ratio to on")
    on, off = (found.of(way, ONE_HOST.name).cell.sizes_mb() for way in ("on", "off"))
    sizes: list[list[object]] = [
        ["Flink, on", *published.checkpointed_mb.on],
        ["Flink, off", *published.checkpointed_mb.off],
        ["on", *(percentile(on, percent) for percent in PERCENTS)],
        ["off", *(percentile(off, percent) for percent in PERCENTS)],
    ]
    page.add_table(_HEADER, sizes)
    full_on, full_off = found.full_mb()
    page.add_text("Full size and recovery")
    page.add_table(
        ["", "on", "off", "on/off"],
        [
            ["full size in MB", mean(full_on), mean(full_off), mean(full_on) / mean(full_off)],
            ["Flink's", published.full_mb.on[0], published.full_mb.off[0], 1 / published.full_mb.ratio(0)],
            ["recovery in s", *found.recovery_s, found.recovery_s[0] / found.recovery_s[1]],
            ["Flink's", *published.recovery_s, "1.7 to 3.3" if published.recovery_s[0] != "-" else "-"],
        ],
    )
