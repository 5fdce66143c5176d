"""
What a make target that measures leaves behind: ``reports/TARGET.json``, and an exit code.

The file is a list of objects with name, value, unit, goal and whether it holds. It is of the run that ended last: what
an earlier one left is removed when a run begins. With STRICT=1 a goal that does not hold fails the run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tools.reporting.figures import Figure, strict_exit_code, write_report_json

TARGETS = (
    "attack",
    "bench",
    "bench-growth",
    "bench-service",
    "bench-smoke",
    "chaos",
    "chaos-blocks",
    "chaos-service",
    "demo",
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
        folder: Where reports lie.
        strict: Whether a missed goal fails the run; without it, as STRICT says.
    """

    def __init__(self, target: str, folder: Path = REPORTS, *, strict: bool | None = None) -> None:
        if target not in TARGETS:
            raise ValueError(f"there is no target {target!r} that measures; there are {', '.join(TARGETS)}")
        self.path = folder / f"{target}.json"
        self._strict = is_set("STRICT") if strict is None else strict
        self.path.unlink(missing_ok=True)

    def write(self, figures: Sequence[Figure]) -> int:
        """Write all figures that are known, in place of earlier ones; return the exit code that they give the run."""
        write_report_json(self.path, figures)
        return strict_exit_code(figures) if self._strict else 0


def is_set(variable: str) -> bool:
    """Say whether a variable of the environment, such as SHORT or STRICT, is there and neither empty nor 0."""
    return os.environ.get(variable, "") not in ("", "0")
