"""
The result of a make target that measures: ``reports/TARGET.json``, and an exit code.

The file is a list of objects with name, value, unit, goal and whether it holds. It belongs to the newest run: a run
deletes the earlier file when it begins. With STRICT=1 a missed goal fails the run. Beside it, ``TARGET.about.json``
says what it was made with, and ``TARGET.history.json`` has what the run has recorded over time; `make report` shows
all.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from tools.reporting.about import about
from tools.reporting.figures import Figure, strict_exit_code, write_report_json, write_text
from tools.reporting.history import History

TARGETS = (
    "attack",
    "bench",
    "bench-growth",
    "bench-native",
    "bench-peers",
    "bench-recovery",
    "bench-requests",
    "bench-rescale",
    "bench-restart",
    "bench-scale",
    "bench-service",
    "bench-sinks",
    "bench-smoke",
    "bench-tables",
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
    "soak",
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
        self._about, self._begun_s = about(target), time.monotonic()
        for path in (self.path, self._beside("history")):
            path.unlink(missing_ok=True)
        self._write_about()

    def write(self, figures: Sequence[Figure], histories: Sequence[History] = ()) -> int:
        """Write all figures and histories known so far, replacing earlier ones; return the run's exit code."""
        write_report_json(self.path, figures)
        if histories:
            write_text(self._beside("history"), json.dumps([history.to_dict() for history in histories]) + "\n")
        self._write_about(took_s=time.monotonic() - self._begun_s)
        return strict_exit_code(figures) if self._strict else 0

    def _write_about(self, **more: float) -> None:
        write_text(self._beside("about"), json.dumps({**self._about, **more}, indent=2) + "\n")

    def _beside(self, what: str) -> Path:
        return self.path.with_suffix(f".{what}.json")


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


def positive(text: str) -> int:
    """Return a number of a command line, 1 or more: with none of what a run tries, all of its goals would hold."""
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def is_set(variable: str) -> bool:
    """Return whether an environment variable, such as SHORT or STRICT, is set and neither empty nor 0."""
    return os.environ.get(variable, "") not in ("", "0")
