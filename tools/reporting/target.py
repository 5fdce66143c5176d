"""
The result of a make target that measures: ``reports/TARGET.json``, and an exit code.

The file is a list of objects with name, value, unit, goal and whether it holds. It belongs to the newest run: a run
deletes the earlier file when it begins. With STRICT=1 a missed goal fails the run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from tools.reporting.figures import Figure, strict_exit_code, write_report_json

TARGETS = (
    "attack",
    "bench",
    "bench-growth",
    "bench-native",
    "bench-recovery",
    "bench-rescale",
    "bench-restart",
    "bench-scale",
    "bench-service",
    "bench-sinks",
    "bench-smoke",
    "bench-tails",
    "chaos",
    "chaos-blocks",
    "chaos-service",
    "chaos-sinks",
    "demo",
    "demo-cdc",
    "differential",
    "load",
    "mutants",
    "test-versions",
)
"""The targets of the Makefile that measure."""

REPORTS = Path("reports")


class TargetReport:
    """
    The report of one run.

    Args:
        target: One of `TARGETS`.
        folder: Folder of the reports.
        strict: Whether a missed goal fails the run; None for the value of STRICT.
    """

    def __init__(self, target: str, folder: Path = REPORTS, *, strict: bool | None = None) -> None:
        if target not in TARGETS:
            raise ValueError(f"target {target!r} does not measure; choose one of {', '.join(TARGETS)}")
        self.path = folder / f"{target}.json"
        self._strict = is_set("STRICT") if strict is None else strict
        self.path.unlink(missing_ok=True)

    def write(self, figures: Sequence[Figure]) -> int:
        """Write all figures known so far, replacing earlier ones; return the run's exit code."""
        write_report_json(self.path, figures)
        return strict_exit_code(figures) if self._strict else 0


def chosen_options(
    description: str, names: Sequence[str], arguments: Sequence[str] | None, short: str
) -> tuple[list[str], bool, bool]:
    """
    Read ``--only``, ``--short`` and ``--strict`` of a program that measures several things.

    Returns:
        The chosen ones of `names`, in their order, and whether the run is short and strict; an unknown name ends the
        program.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", metavar="NAMES", help=f"some of {','.join(names)}; without it, all")
    parser.add_argument("--short", action="store_true", default=is_set("SHORT"), help=f"{short} (SHORT=1)")
    parser.add_argument("--strict", action="store_true", default=is_set("STRICT"), help="fail if a goal is missed")
    options = parser.parse_args(arguments)
    wanted = options.only.split(",") if options.only else names
    if unknown := sorted(set(wanted) - set(names)):
        parser.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(names)}")
    return [name for name in names if name in wanted], options.short, options.strict


def is_set(variable: str) -> bool:
    """Return whether an environment variable, such as SHORT or STRICT, is set and neither empty nor 0."""
    return os.environ.get(variable, "") not in ("", "0")
