"""
Measures the service's figures: ``python -m loadtest.bench_service [--only NAME,NAME]``.

Prints a table and writes ``reports/bench-service.json``. With STRICT=1 a missed goal fails the run. With SHORT=1 every
figure takes seconds and only shows that it can be measured, not how fast the service is.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from tools.reporting.figures import Figure, format_number
from tools.reporting.target import TargetReport, chosen_options

MODULES = ("hedging", "outage", "ingest", "objects", "compaction", "restore")
"""Modules of `loadtest.service_figures`, in the order in which they run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the selected figures; return the exit code."""
    names, short, strict = chosen_options("Measure the service's figures.", MODULES, arguments, "seconds per figure")
    report, exit_code = TargetReport("bench-service", strict=strict), 0
    figures: list[Figure] = []
    for name in names:
        print(f"{name} ...", flush=True)
        found = measure(name, short=short)
        for figure in found:
            print(line_of(figure), flush=True)
        figures += found
        # After each one, so that a later failure keeps the known figures.
        exit_code = report.write(figures)
    return exit_code


def measure(name: str, *, short: bool) -> list[Figure]:
    """Run one module."""
    found: list[Figure] = importlib.import_module(f"loadtest.service_figures.{name}").measure(short=short)
    return found


def line_of(figure: Figure) -> str:
    """Return a figure's line of the table."""
    verdict = {True: "holds", False: "MISSED", None: ""}[figure.holds]
    goal = "" if figure.goal is None else f"{figure.goal}  {verdict}"
    return f"  {figure.name:60} {format_number(figure.value):>12} {figure.unit:8} {goal}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
