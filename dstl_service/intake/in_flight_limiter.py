"""
How much may be taken in: bodies that are still arriving count like sets that wait for their upload (I9).

A body has room for what has come of it and for as much again, and at first for a usual change set, so that who claims
much and sends little holds little. Who does not fit waits a while before more is read from it; then it is refused and
comes again. Of those who wait, bodies that have begun go first, then those of the job that holds least.

Jobs share the room by the rule of `dstl_service.process.shares`, so that none of them keeps others out: one job may
hold two thirds, and a quarter is for jobs that hold nothing. Two thirds are what one job needs at full speed: of 100
MiB the five batches of 10 MiB that it uploads at a time, and 16 MiB that arrive meanwhile. What a job was promised and
has not sent is at most half. The only body of a job may take all that is free, so that the largest set is taken in.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from dstl_service.process.shares import shares_of
from storage.errors import OverloadedError

WAIT_S = 0.5
"""How long a request waits for room. Uploads mostly make some in less, and a client asks again after this time."""

HELD_WEIGHT = 2
"""So many times what stays free a job may hold."""

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
        if self.room is not None:
            self.room.arrived(self.job, size_bytes)
        wanted_bytes = min(self.size_bytes, 2 * self.arrived_bytes)
        if self.room is not None and wanted_bytes > self.kept_bytes:
            await self.room.keep(self, wanted_bytes - self.kept_bytes)


@dataclass(slots=True)
class _Sums:
    """What all bodies of a job that arrive have together."""

    places: int = 0
    kept_bytes: int = 0
    arrived_bytes: int = 0

    @property
    def promised_bytes(self) -> int:
        """How much is kept for what has not come."""
        return max(0, self.kept_bytes - self.arrived_bytes)


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
        self._held_shares = shares_of(bytes_max, HELD_WEIGHT)
        self._promised_shares = shares_of(bytes_max)
        self._in_flight_bytes = in_flight_bytes
        self._on_full = on_full
        self._on_refused = on_refused
        self._kept_bytes = 0
        self._arriving: dict[str, _Sums] = {}
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
        self._arriving.setdefault(job, _Sums()).places += 1
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
        # Of bodies that fill the room, or their job's share, and wait for each other all but one give up, so that one
        # goes on.
        is_first = place.kept_bytes > 0 and not any(self._are_rivals(turn, other) for other in self._waiting)
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
                    f"of {self._bytes_max}, or what job {place.job!r} may hold or announce of it"
                ) from None
        finally:
            if turn in self._waiting:
                self._waiting.remove(turn)
                self.freed()

    def arrived(self, job: str, size_bytes: int) -> None:
        """Note that so much of a job's bodies came; called by its place."""
        self._arriving[job].arrived_bytes += size_bytes

    def freed(self) -> None:
        """Let those who wait look again; called when bytes are held no more."""
        while (turn := self._next()) is not None and self._is_room_for(turn):
            self._waiting.remove(turn)
            self._give(turn)

    def _next(self) -> _Turn | None:
        """Return whose turn it is. While it does not fit nobody overtakes it, or small bodies would keep it out."""
        begun: dict[str, _Turn] = {}  # of each job the first one: of one job none overtakes another
        first: dict[str, _Turn] = {}
        for turn in self._waiting:
            if not turn.given.done():
                (begun if turn.place.kept_bytes else first).setdefault(turn.place.job, turn)
        # A job that has its share waits for itself, and no other one waits for it.
        for turn in begun.values():
            if self._is_share(turn):
                return turn
        others = [turn for turn in first.values() if turn.place.job not in begun]
        able = [turn for turn in others if self._is_share(turn) and self._may_promise(turn)]
        return min(able, key=lambda turn: self._used_by(turn.place.job), default=None)

    def _fits(self, turn: _Turn) -> bool:
        return self._is_room_for(turn) and self._is_share(turn) and self._may_promise(turn)

    def _is_room_for(self, turn: _Turn) -> bool:
        return self.used_bytes + turn.size_bytes <= self._bytes_max

    def _is_share(self, turn: _Turn) -> bool:
        """Say whether the job's other sets and bodies leave it so much more; they always do if there are none."""
        own_bytes = turn.place.kept_bytes
        held_bytes = self._used_by(turn.place.job) - own_bytes
        free_bytes = self._bytes_max - self.used_bytes + own_bytes
        return held_bytes <= 0 or self._held_shares.admits(held_bytes, own_bytes + turn.size_bytes, free_bytes)

    def _may_promise(self, turn: _Turn) -> bool:
        """Say whether a job that has announced so much may announce more; one body always may, and may go on."""
        if turn.place.kept_bytes:
            return True
        promised_bytes = self._arriving[turn.place.job].promised_bytes
        if promised_bytes <= 0:
            return True
        free_bytes = self._bytes_max - sum(sums.promised_bytes for sums in self._arriving.values())
        return self._promised_shares.admits(promised_bytes, turn.size_bytes, free_bytes)

    def _are_rivals(self, turn: _Turn, other: _Turn) -> bool:
        """Say whether another body that has begun waits for the same: for its job's share, or for room as such."""
        is_same_job = turn.place.job == other.place.job
        return other.place.kept_bytes > 0 and (is_same_job or (self._is_share(turn) and self._is_share(other)))

    def _used_by(self, job: str) -> int:
        return self._in_flight_bytes(job) + self._arriving[job].kept_bytes

    def _give(self, turn: _Turn) -> None:
        turn.place.kept_bytes += turn.size_bytes
        self._arriving[turn.place.job].kept_bytes += turn.size_bytes
        self._kept_bytes += turn.size_bytes
        if not turn.given.done():
            turn.given.set_result(None)

    def _leave(self, place: Place) -> None:
        sums = self._arriving[place.job]
        sums.places -= 1
        sums.kept_bytes -= place.kept_bytes
        sums.arrived_bytes -= place.arrived_bytes
        if not sums.places:
            del self._arriving[place.job]
        self._kept_bytes -= place.kept_bytes
        self.freed()
