"""Processors for tests of what is around them."""

from __future__ import annotations

from typing import Any

from pyspark.sql.streaming import StatefulProcessor


class SilentProcessor(StatefulProcessor):
    """Has no state and no output."""

    def init(self, handle: Any) -> None:
        """Declare nothing."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        """Return no rows."""
        return iter(())

    def close(self) -> None:
        """Do nothing."""
