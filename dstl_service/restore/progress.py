"""How far a restore is, and how long it will probably take: counted for metrics, and logged while it is long."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dstl_service.restore.table_id import TableId
from storage.clock import Clock

logger = logging.getLogger("dstl_service")

TOLD_EVERY_MS = 10_000


class RestoreProgress:
    """
    Counts the bytes that a restore has sent. Every ten seconds it says how many are left.

    A restore that ends earlier logs nothing. The time left assumes the speed so far, from the first byte to the last
    one that the table has taken: frames are sent only as fast as the table takes them.

    Args:
        table: The table.
        size_bytes: What the restore will send.
        count: Counts bytes sent for metrics.
        clock: The only source of time.
    """

    def __init__(self, table: TableId, size_bytes: int, count: Callable[[int], None], clock: Clock) -> None:
        self._table = table
        self._size_bytes = size_bytes
        self._count = count
        self._clock = clock
        self._begun_ms = self._told_ms = clock.monotonic_ms()
        self._sent_bytes = 0
        self._is_told = False

    def sent(self, size_bytes: int) -> None:
        """Count bytes that the table has taken."""
        self._count(size_bytes)
        self._sent_bytes += size_bytes
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._told_ms >= TOLD_EVERY_MS:
            self._told_ms, self._is_told = now_ms, True
            left_ms = (now_ms - self._begun_ms) * (self._size_bytes - self._sent_bytes) / self._sent_bytes
            self._tell("restore under way", now_ms, {"left_s": max(0, round(left_ms / 1000))})

    def ended(self) -> None:
        """Log the end of a restore whose progress was logged."""
        if self._is_told:
            self._tell("restore done", self._clock.monotonic_ms(), {})

    def _tell(self, event: str, now_ms: int, more: dict[str, int]) -> None:
        logger.info(
            event,
            extra={
                **self._table.names,
                "sent_bytes": self._sent_bytes,
                "size_bytes": self._size_bytes,
                "elapsed_s": (now_ms - self._begun_ms) // 1000,
                **more,
            },
        )
