"""
Bound on bytes in flight: arriving bodies count like sets that wait for their upload (I9).

A body reserves room for twice its received bytes, and at first for a usual change set, so a client that announces much
and sends little holds little. A request that does not fit waits up to 0.5 s, in some cases 1 s, before more of its body
is read, then gets 429. Bodies that have begun go first, then those of the job that holds least.

Jobs share the room by the rule of `dstl_service.process.shares`, so that none keeps others out: one job may hold two
thirds, and a quarter is reserved for jobs that hold nothing. One job at full speed needs two thirds: of 100 MiB, the
five batches of 10 MiB that it uploads at a time, and 16 MiB that arrive meanwhile. Room that a job has reserved and
not yet filled is at most half. The only body of a job may take all free room, so that the largest set fits.
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
"""How long a request waits for room. Uploads usually free some sooner, and the client retries after a refusal."""

HELD_WEIGHT = 2
"""A job may hold this many times the room that stays free."""

FIRST_BYTES_MAX = 1 << 20
"""Most room reserved for a body before its first byte."""


@dataclass(slots=True, eq=False)
class Place:
    """
    The reservation of an arriving body.

    Args:
        room: The limiter; None if the body needs no room.
        job: Name of the body's job.
        size_bytes: Announced length of the body.
    """

    room: InFlightLimiter | None
    job: str
    size_bytes: int
    kept_bytes: int = field(default=0, init=False)
    arrived_bytes: int = field(default=0, init=False)

    async def arrived(self, size_bytes: int) -> None:
        """
        Note received bytes; return when there is room for more of the body.

        Raises:
            OverloadedError: No room became free in time.
        """
        self.arrived_bytes += size_bytes
        if self.room is not None:
            self.room.arrived(self.job, size_bytes)
        wanted_bytes = min(self.size_bytes, 2 * self.arrived_bytes)
        if self.room is not None and wanted_bytes > self.kept_bytes:
            await self.room.keep(self, wanted_bytes - self.kept_bytes)


@dataclass(slots=True)
class _Sums:
    """Sums over a job's arriving bodies."""

    places: int = 0
    kept_bytes: int = 0
    arrived_bytes: int = 0

    @property
    def promised_bytes(self) -> int:
        """Reserved bytes that have not arrived."""
        return max(0, self.kept_bytes - self.arrived_bytes)


@dataclass(slots=True, eq=False)
class _Turn:
    """A waiting reservation."""

    place: Place
    size_bytes: int
    given: asyncio.Future[None]


class InFlightLimiter:
    """
    Room for `bytes_max` bytes. Owned by the event loop.

    Args:
        bytes_max: The limit, at least as large as any request.
        in_flight_bytes: Returns the bytes of sets in flight, of a job or, for None, of all jobs.
        on_full: Called when a request does not fit; may start uploads.
        on_refused: Called when a request is refused after its wait.
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
        """Bytes in flight plus bytes reserved for arriving bodies; only notes, which need no room, exceed the limit."""
        return self._in_flight_bytes(None) + self._kept_bytes

    @asynccontextmanager
    async def reserved(self, job: str, size_bytes: int) -> AsyncIterator[Place]:
        """
        Reserve room for an arriving body, until it is taken in or given up.

        Raises:
            OverloadedError: No room became free in time.
        """
        place = Place(self, job, size_bytes)
        self._arriving.setdefault(job, _Sums()).places += 1
        try:
            await self.keep(place, min(size_bytes, FIRST_BYTES_MAX))
            yield place
        finally:
            self._leave(place)

    async def keep(self, place: Place, size_bytes: int) -> None:
        """Reserve more room for a body; see `reserved`."""
        turn = _Turn(place, size_bytes, asyncio.get_running_loop().create_future())
        if not self._waiting and self._fits(turn):
            self._give(turn)
            return
        # Begun bodies that fill the room, or their job's share, wait for each other. The first waits twice as long: the
        # others give up, and it goes on.
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
            if turn.given.cancelled():  # by the time-out; room may be given in the same moment
                self._on_refused()
                raise OverloadedError(
                    f"{self.used_bytes} bytes are in flight; {size_bytes} more would exceed the limit of "
                    f"{self._bytes_max}, or the share of job {place.job!r}; send the change set again later"
                ) from None
        finally:
            if turn in self._waiting:
                self._waiting.remove(turn)
                self.freed()

    def arrived(self, job: str, size_bytes: int) -> None:
        """Note received bytes of a job's body; called by its `Place`."""
        self._arriving[job].arrived_bytes += size_bytes

    def freed(self) -> None:
        """Give freed room to waiting requests; called when bytes are released."""
        while (turn := self._next()) is not None and self._is_room_for(turn):
            self._waiting.remove(turn)
            self._give(turn)

    def _next(self) -> _Turn | None:
        """Return the next turn. While it does not fit, no other overtakes it: small bodies would keep it out."""
        begun: dict[str, _Turn] = {}  # each job's first one: within a job none overtakes another
        first: dict[str, _Turn] = {}
        for turn in self._waiting:
            if not turn.given.done():
                (begun if turn.place.kept_bytes else first).setdefault(turn.place.job, turn)
        # A job that holds its share waits for its own bytes, and no other job waits for it.
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
        """Say whether the job's share admits this turn; always if the job holds nothing else."""
        own_bytes = turn.place.kept_bytes
        held_bytes = self._used_by(turn.place.job) - own_bytes
        free_bytes = self._bytes_max - self.used_bytes + own_bytes
        return held_bytes <= 0 or self._held_shares.admits(held_bytes, own_bytes + turn.size_bytes, free_bytes)

    def _may_promise(self, turn: _Turn) -> bool:
        """Say whether the job may reserve more unfilled room; a begun body, or a job without any, always may."""
        if turn.place.kept_bytes:
            return True
        promised_bytes = self._arriving[turn.place.job].promised_bytes
        if promised_bytes <= 0:
            return True
        free_bytes = self._bytes_max - sum(sums.promised_bytes for sums in self._arriving.values())
        return self._promised_shares.admits(promised_bytes, turn.size_bytes, free_bytes)

    def _are_rivals(self, turn: _Turn, other: _Turn) -> bool:
        """Say whether another begun body waits for the same room: its job's share, or what is free."""
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
