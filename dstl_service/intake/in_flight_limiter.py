"""
How much may be taken in: bodies that are still arriving count like sets that wait for their upload (I9).

A body has room for what has come of it and for as much again, and at first for a usual change set, so that who claims
much and sends little holds little. Who does not fit waits a while before more is read from it; then it is refused and
comes again. Of those who wait, bodies that have begun go first, then those of the job that holds least: one job cannot
keep others out. What one job was promised and has not sent is at most half of all.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from storage.errors import OverloadedError

WAIT_S = 0.5
"""How long a request waits for room. Uploads mostly make some in less, and a client asks again after this time."""

FIRST_BYTES_MAX = 1 << 20
"""The most that is kept for a body of which nothing has come."""


@dataclass(slots=True, eq=False)
class Place:
    """
    What a body that arrives has of the room.

    Args:
        room: Whose it is, or None if the body needs none.
        job: Whose body it is.
        size_bytes: How long the body is said to be.
    """

    room: InFlightLimiter | None
    job: str
    size_bytes: int
    kept_bytes: int = field(default=0, init=False)
    arrived_bytes: int = field(default=0, init=False)

    async def arrived(self, size_bytes: int) -> None:
        """
        Note that so much of the body came; return when there is room for more of it.

        Raises:
            OverloadedError: There was none in time.
        """
        self.arrived_bytes += size_bytes
        wanted_bytes = min(self.size_bytes, 2 * self.arrived_bytes)
        if self.room is not None and wanted_bytes > self.kept_bytes:
            await self.room.keep(self, wanted_bytes - self.kept_bytes)

    @property
    def promised_bytes(self) -> int:
        """How much is kept for what has not come."""
        return self.kept_bytes - self.arrived_bytes


@dataclass(slots=True, eq=False)
class _Turn:
    """Somebody who waits."""

    place: Place
    size_bytes: int
    given: asyncio.Future[None]


class InFlightLimiter:
    """
    Room for `bytes_max` bytes. Owned by the event loop.

    Args:
        bytes_max: The limit, larger than any request.
        in_flight_bytes: Tells how many were taken in, of a job or, for None, of all, and are held still.
        on_full: Called when somebody does not fit; may hurry uploads.
        on_refused: Called when somebody waited in vain.
    """

    def __init__(
        self,
        bytes_max: int,
        in_flight_bytes: Callable[[str | None], int],
        on_full: Callable[[], None],
        on_refused: Callable[[], None],
    ) -> None:
        self._bytes_max = bytes_max
        self._in_flight_bytes = in_flight_bytes
        self._on_full = on_full
        self._on_refused = on_refused
        self._kept_bytes = 0
        self._places: dict[str, set[Place]] = {}
        self._waiting: deque[_Turn] = deque()

    @property
    def used_bytes(self) -> int:
        """Bytes that are held, or kept for bodies that arrive; never more than the limit."""
        return self._in_flight_bytes(None) + self._kept_bytes

    @asynccontextmanager
    async def reserved(self, job: str, size_bytes: int) -> AsyncIterator[Place]:
        """
        Have room for a body that arrives, until it is taken in or given up.

        Raises:
            OverloadedError: There was none in time.
        """
        place = Place(self, job, size_bytes)
        self._places.setdefault(job, set()).add(place)
        try:
            await self.keep(place, min(size_bytes, FIRST_BYTES_MAX))
            yield place
        finally:
            self._leave(place)

    async def keep(self, place: Place, size_bytes: int) -> None:
        """Have more room for a body; see `reserved`."""
        turn = _Turn(place, size_bytes, asyncio.get_running_loop().create_future())
        if not self._waiting and self._fits(turn):
            self._give(turn)
            return
        # Of bodies that fill the room and wait for each other all but one give up, so that one goes on.
        is_first = place.kept_bytes > 0 and not any(other.place.kept_bytes for other in self._waiting)
        self._waiting.append(turn)
        self.freed()
        if turn.given.done():
            return
        self._on_full()
        try:
            async with asyncio.timeout(2 * WAIT_S if is_first else WAIT_S):
                await turn.given
        except TimeoutError:
            if turn.given.cancelled():  # by the time-out, and not given in the same moment
                self._on_refused()
                raise OverloadedError(
                    f"{self.used_bytes} bytes arrive or wait for their upload; {size_bytes} more would pass the limit "
                    f"of {self._bytes_max}, or what one job may announce and not send"
                ) from None
        finally:
            if turn in self._waiting:
                self._waiting.remove(turn)
                self.freed()

    def freed(self) -> None:
        """Let those who wait look again; called when bytes are held no more."""
        while (turn := self._next()) is not None and self._is_room_for(turn):
            self._waiting.remove(turn)
            self._give(turn)

    def _next(self) -> _Turn | None:
        """Return whose turn it is. While it does not fit nobody overtakes it, or small bodies would keep it out."""
        begun = next((turn for turn in self._waiting if turn.place.kept_bytes), None)
        if begun is not None:
            return begun
        first_of_jobs: dict[str, _Turn] = {}
        for turn in self._waiting:
            if not turn.given.done() and self._may_promise(turn):
                first_of_jobs.setdefault(turn.place.job, turn)
        return min(first_of_jobs.values(), key=lambda turn: self._used_by(turn.place.job), default=None)

    def _fits(self, turn: _Turn) -> bool:
        return self._is_room_for(turn) and (turn.place.kept_bytes > 0 or self._may_promise(turn))

    def _is_room_for(self, turn: _Turn) -> bool:
        return self.used_bytes + turn.size_bytes <= self._bytes_max

    def _may_promise(self, turn: _Turn) -> bool:
        """Say whether a job that has announced so much may announce more; one body always may."""
        if self._kept_bytes + turn.size_bytes <= self._bytes_max // 2:
            return True
        promised_bytes = sum(place.promised_bytes for place in self._places[turn.place.job])
        return promised_bytes <= 0 or promised_bytes + turn.size_bytes <= self._bytes_max // 2

    def _used_by(self, job: str) -> int:
        return self._in_flight_bytes(job) + sum(place.kept_bytes for place in self._places[job])

    def _give(self, turn: _Turn) -> None:
        turn.place.kept_bytes += turn.size_bytes
        self._kept_bytes += turn.size_bytes
        if not turn.given.done():
            turn.given.set_result(None)

    def _leave(self, place: Place) -> None:
        places = self._places[place.job]
        places.remove(place)
        if not places:
            del self._places[place.job]
        self._kept_bytes -= place.kept_bytes
        self.freed()
