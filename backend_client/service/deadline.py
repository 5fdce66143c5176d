"""How long a request to a service may take."""

from __future__ import annotations

import time
from collections.abc import Callable


class Deadline:
    """A deadline that excludes the time spent on restarting the service."""

    def __init__(self, patience_s: float) -> None:
        self._at = time.monotonic() + patience_s

    @property
    def left_s(self) -> float:
        """The seconds left; negative after the deadline."""
        return self._at - time.monotonic()

    def look_after(self, ensure: Callable[[], None]) -> None:
        """Check and, if needed, restart the service; this time does not count."""
        begun = time.monotonic()
        ensure()
        self._at += time.monotonic() - begun
