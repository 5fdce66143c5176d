"""The calls of a query's end to its output."""

from __future__ import annotations

from typing import Any

import pytest

from backend_client.spark.output.end_of_query import await_end


class Query:
    """Ends in the state that a test names; awaiting it without a limit raises its error, if it has one."""

    def __init__(self, looks: int, error: Exception | None = None) -> None:
        self._looks = looks
        self._error = error
        self.calls: list[str] = []

    @property
    def isActive(self) -> bool:
        """Whether nobody has stopped it."""
        return len(self.calls) < self._looks

    def awaitTermination(self, timeout: int | None = None) -> bool:
        """Return whether it has ended."""
        self.calls.append("end" if timeout is None else "look")
        if timeout is None and self._error is not None:
            raise self._error
        return False


@pytest.mark.parametrize("error", [None, RuntimeError("the batch failed")])
def test_batches_stop_waiting_when_somebody_stops_the_query(error: Exception | None) -> None:
    """Spark waits for the batch before the query ends, so the batch is told before."""
    query: Any = Query(3, error)
    await_end(query, lambda: query.calls.append("stopping"))
    assert query.calls == ["look", "look", "look", "stopping", "end"]
