"""
The follower's client of the sidecar: reads what copies lack, and gives way while a whole copy is being made.

A step between two checkpoints is not interrupted: a task that waits for the table would have to do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from backend_client.service.client import ServiceClient
from dstl_service.wire import PlanFrame


class WantedError(Exception):
    """A task waits for the table."""


class NoRoomError(Exception):
    """There is no room for another copy."""


class CopyClient(ServiceClient):
    """Like its parent, for copies of tables, with the calls below in between."""

    keeps_copies = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.read_bytes = 0
        """Bytes of snapshots and change sets that came so far."""
        self.before_copy: Callable[[int], None] = lambda _: None
        """Called with its size in bytes before a whole copy is made; may raise."""
        self.before_part: Callable[[], None] = lambda: None
        """Called before each part of a whole copy; may raise."""

    def _restored(self, frames: Iterator[tuple[dict[str, Any], bytes]]) -> Iterator[tuple[dict[str, Any], bytes]]:
        is_whole = False
        for header, payload in frames:
            if header.get("kind") == PlanFrame.KIND:
                plan = PlanFrame.read(header)
                is_whole = plan.is_full
                if is_whole:
                    self.before_copy(plan.size_bytes)
            if is_whole:
                self.before_part()
            self.read_bytes += len(payload)
            yield header, payload
