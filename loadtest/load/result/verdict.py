"""The exit code of a run, from the rows of its report. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from loadtest.load.result.figures import GENERATOR
from loadtest.load.result.usage import GENERATOR_CORES_MAX
from tools.reporting.figures import format_number

FAILED = 1
NOT_STARTED = 2
DOES_NOT_COUNT = 3


def verdict(
    rows: Sequence[Mapping[str, Any]], locust_code: int, limited: Collection[str], *, strict: bool
) -> tuple[int, str]:
    """
    Return the exit code and its reason, empty for 0.

    A failed request is a failure however busy the generator was; its figures are not.

    Args:
        rows: Those of ``reports/load.json``.
        locust_code: Locust's own exit code, not 0 if a request failed.
        limited: Names of the figures with a threshold.
        strict: Whether every goal must hold.
    """
    missed = {row["name"]: row["value"] for row in rows if row["holds"] is False}
    if locust_code:
        return FAILED, "requests failed"
    if GENERATOR in missed:
        used = format_number(missed[GENERATOR])
        return DOES_NOT_COUNT, (
            f"the load generator took {used} of a core, more than {GENERATOR_CORES_MAX}: "
            "this run measures the generator and does not count"
        )
    fatal = [name for name in missed if strict or name in limited]
    return (FAILED, f"missed: {', '.join(fatal)}") if fatal else (0, "")
