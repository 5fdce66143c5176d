"""Which modes of an operator a restart may change: none that is stored."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backend_client.operator_modes import check_modes
from dstl_service.wire import OperatorInfo
from storage.errors import InvalidInputError

STORED = OperatorInfo("sessions", 2, "{}", {}, "EventTime", "Append")


def test_same_modes_go_on() -> None:
    """An operator with the modes it was stored with goes on, with any parallelism."""
    check_modes(STORED, replace(STORED, parallelism=7))


@pytest.mark.parametrize("known", ["time_mode", "output_mode", None])
def test_modes_that_were_not_stored_may_be_any(known: str | None) -> None:
    """A job of a program that did not store modes goes on, whatever they are now."""
    before = OperatorInfo("sessions", 2, "{}", {}, **({known: getattr(STORED, known)} if known else {}))

    check_modes(before, STORED)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"time_mode": "ProcessingTime"},
            "'sessions' was started with timeMode 'EventTime', now it has 'ProcessingTime'",
        ),
        ({"time_mode": "None"}, "timeMode 'EventTime', now it has 'None'.*go back to 'EventTime', or begin anew"),
        ({"output_mode": "Update"}, "'sessions' was started with outputMode 'Append', now it has 'Update'"),
    ],
)
def test_other_modes_are_refused(changes: dict[str, str], message: str) -> None:
    """A mode that changes is an error that names the operator, both modes and what to do."""
    with pytest.raises(InvalidInputError, match=message):
        check_modes(STORED, replace(STORED, **changes))
