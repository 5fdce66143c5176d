"""The exit code of a load test."""

from __future__ import annotations

import pytest

from loadtest.load.result.figures import GENERATOR
from loadtest.load.result.verdict import verdict


def row(name: str, value: float | None, *, holds: bool | None) -> dict[str, object]:
    return {"name": name, "value": value, "holds": holds}


GOOD = row("failures", 0, holds=True)
MISSED = row("checkpoints", 3, holds=False)
BUSY = row(GENERATOR, 0.93, holds=False)


@pytest.mark.parametrize(
    ("rows", "locust_code", "limited", "strict", "code"),
    [
        ([GOOD, row("slots", 8, holds=None)], 0, set(), True, 0),
        ([GOOD, MISSED], 0, set(), False, 0),
        ([GOOD, MISSED], 0, set(), True, 1),
        ([GOOD, MISSED], 0, {"checkpoints"}, False, 1),
        ([GOOD, MISSED], 0, {"failures"}, False, 0),
        ([GOOD], 1, set(), False, 1),
        ([GOOD, BUSY], 0, set(), False, 3),
        ([MISSED, BUSY], 0, {"checkpoints"}, True, 3),
        ([GOOD, BUSY], 1, set(), False, 1),
        ([row(GENERATOR, None, holds=False)], 0, set(), False, 3),
    ],
)
def test_code_follows_from_rows(
    rows: list[dict[str, object]], locust_code: int, limited: set[str], strict: bool, code: int
) -> None:
    """Failures, thresholds and strict goals give 1; a busy generator gives 3, whatever its figures, but no failure."""
    found, reason = verdict(rows, locust_code, limited, strict=strict)

    assert found == code
    assert bool(reason) == (code != 0)


def test_reason_names_what_was_missed() -> None:
    """The reason names the figures that count, and for a busy generator how much of a core it took."""
    assert verdict([MISSED, row("slots", 1, holds=False)], 0, {"slots"}, strict=False)[1] == "missed: slots"
    assert "took 0.93 of a core" in verdict([BUSY], 0, set(), strict=False)[1]
