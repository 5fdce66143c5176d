"""
The follower's client of the sidecar: reads what copies lack, and gives way while a whole copy is being made.

A step between two checkpoints is not interrupted: a task that waits for the table would have to do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from backend_client.service.client import ServiceClient
from dstl_service.wire import PlanFrame
from storage.key_groups import KeyGroupRange


class WantedError(Exception):
    """A task waits for the table."""


class NoRoomError(Exception):
    """There is no room for another copy."""


class CopyClient(ServiceClient):
    """Like its parent, for copies of tables."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.read_bytes = 0
        """Bytes of snapshots and change sets that came so far."""
        self.before_copy: Callable[[int], None] = lambda _: None
        """Called with its size in bytes before a whole copy is made; may raise."""
        self.before_part: Callable[[], None] = lambda: None
        """Called before each part of a whole copy; may raise."""

    @contextmanager
    def restore(
        self,
        job: str,
        operator: str,
        key_groups: KeyGroupRange,
        from_checkpoint: str | None,
        to_checkpoint: str,
        *,
        is_output: bool = False,
        only: int | None = None,
        is_copy: bool = True,
        patience_s: float | None = None,
    ) -> Iterator[Iterator[tuple[dict[str, Any], bytes]]]:
        """Open the stream of frames as the parent does, with the calls above in between."""
        with super().restore(
            job,
            operator,
            key_groups,
            from_checkpoint,
            to_checkpoint,
            is_output=is_output,
            only=only,
            is_copy=is_copy,
            patience_s=patience_s,
        ) as frames:
            yield self._watched(frames)

    def _watched(self, frames: Iterator[tuple[dict[str, Any], bytes]]) -> Iterator[tuple[dict[str, Any], bytes]]:
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
