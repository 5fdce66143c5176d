"""
How much may be taken in: bodies that are still arriving count like sets that wait for their upload (I9).

Who does not fit waits a while, in the order of arrival, before its body is read; then it is refused and comes again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from storage.errors import OverloadedError

WAIT_S = 0.5
"""How long a request waits for room. Uploads mostly make some in less, and a client asks again after this time."""


class Room:
    """
    Room for `bytes_max` bytes. Owned by the event loop.

    Args:
        bytes_max: The limit, larger than any request.
        in_flight_bytes: Tells how many were taken in and are held still.
        on_full: Called when somebody does not fit; may hurry uploads.
        on_refused: Called when somebody waited in vain.
    """

    def __init__(
        self,
        bytes_max: int,
        in_flight_bytes: Callable[[], int],
        on_full: Callable[[], None],
        on_refused: Callable[[], None],
    ) -> None:
        self._bytes_max = bytes_max
        self._in_flight_bytes = in_flight_bytes
        self._on_full = on_full
        self._on_refused = on_refused
        self._arriving_bytes = 0
        self._door = asyncio.Lock()
        self._freed = asyncio.Event()

    @property
    def used_bytes(self) -> int:
        """Bytes that are held or arriving; never more than the limit."""
        return self._in_flight_bytes() + self._arriving_bytes

    @asynccontextmanager
    async def reserved(self, size_bytes: int) -> AsyncIterator[None]:
        """
        Have room for a body that arrives, until it is taken in or given up.

        Raises:
            OverloadedError: There was none in time.
        """
        if self._door.locked() or not self._fits(size_bytes):
            await self._enter(size_bytes)
        else:
            self._arriving_bytes += size_bytes
        try:
            yield
        finally:
            self._arriving_bytes -= size_bytes
            self._freed.set()

    def freed(self) -> None:
        """Let those who wait look again; called when bytes are held no more."""
        self._freed.set()

    def _fits(self, size_bytes: int) -> bool:
        return self.used_bytes + size_bytes <= self._bytes_max

    async def _enter(self, size_bytes: int) -> None:
        self._on_full()
        try:
            # Only one waits for room and the others for its turn, so that small bodies do not overtake a large one.
            async with asyncio.timeout(WAIT_S), self._door:
                while not self._fits(size_bytes):
                    self._freed.clear()
                    await self._freed.wait()
                self._arriving_bytes += size_bytes
        except TimeoutError:
            self._on_refused()
            raise OverloadedError(
                f"{self.used_bytes} bytes arrive or wait for their upload; {size_bytes} more would pass the limit of "
                f"{self._bytes_max}"
            ) from None
