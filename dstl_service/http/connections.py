"""
Bounds on the number of clients and on how slow they may be: no client holds a connection or half a request for ever.

All connections are checked once a second, so a normal request costs nothing here. Time counts against a client only
while the service waits for it: not while its request is answered, nor while the service has paused reading. A
connection counts from its accept, handshake included, until its file descriptor is free. When all places are taken, a
connection is evicted, in this order: one that is ending, a silent one of a crowd, an idle one. Silent are handshakes,
incomplete request heads, and incomplete bodies of answered requests; the host with most of them loses first, the
longest silent first. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import resource
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeVar

from dstl_service.process.logs import LogLimiter
from dstl_service.settings import HttpSettings

TICK_S = 1.0
UNREAD_S = 600.0
"""Longest time in which a client may read nothing of an answer. A restoring table reads on much sooner."""
ENDING_S = 5.0
"""Longest time for a refused connection to close by itself, so that its client can read the refusal."""
_FILES_MAX = 1 << 20
_FOUND_PART = 64
"""One search for connections to evict finds at most this part (1/64) of all."""

logger = logging.getLogger("dstl_service")

_Kept = TypeVar("_Kept")
_About = TypeVar("_About")


class Phase(enum.Enum):
    """The next message that a client sends."""

    HEAD = "head"
    """The connection's first request, or the rest of a request's head."""
    BODY = "body"
    NOTHING = "nothing"
    """Nothing is due; the client may send another request."""


class Endable(Protocol):
    """A connection, or one whose handshake has not ended, that can be aborted."""

    def end(self) -> None:
        """Abort it at once, so that its file descriptor is free."""


class Connection(Endable, Protocol):
    """A connection as `Connections` sees it."""

    phase: Phase
    """The next message of its client."""
    heads: int
    """Number of request heads received in full."""
    body_bytes: int
    """Received bytes of the current body."""

    @property
    def is_held_back(self) -> bool:
        """Whether the service has paused reading."""

    @property
    def is_answering(self) -> bool:
        """Whether a request is being answered."""

    @property
    def unread_bytes(self) -> int:
        """Unsent bytes of answers while writing is paused; else 0."""

    def refuse(self, status: int, message: str, headers: str = "") -> None:
        """Answer if that is still possible, and close."""


def open_files_max() -> int:
    """Raise the limit of open files as far as the user may; return it, or 2^20 if there is none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # the system may enforce a lower bound
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return _FILES_MAX if soft == resource.RLIM_INFINITY else soft


def connections_within(connections_max: int) -> int:
    """Return a number of connections, lowered to half of the files that the process may open."""
    return min(connections_max, max(1, open_files_max() // 2))


@dataclass(slots=True)
class _Waited:
    """
    How long the service has waited for a client in its phase, after `heads` request heads.

    And how long the client has read nothing while `unread_bytes` of an answer were left.
    """

    phase: Phase
    heads: int = 0
    seconds: float = 0.0
    unread_bytes: int = 0
    unread_s: float = 0.0


class Connections:
    """
    The connections of one server.

    Args:
        bounds: Limits of number and speed.
        refusals: Limits log lines about clients.
    """

    def __init__(self, bounds: HttpSettings, refusals: LogLimiter) -> None:
        self._bounds = bounds
        self._refusals = refusals
        self._waited: dict[Connection, _Waited] = {}
        # Age in seconds; the oldest first.
        self._handshakes: dict[Endable, float] = {}
        self._ending: dict[Endable, float] = {}
        self._spared: deque[Endable] = deque()  # candidates for eviction, from the last search
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waited) + len(self._handshakes) + len(self._ending)

    @property
    def handshake_timeout_s(self) -> float:
        """Longest time of a handshake."""
        return self._bounds.head_timeout_s

    def begin_handshake(self, handshake: Endable) -> bool:
        """Admit a connection whose handshake begins; see `admit`."""
        return self._has_room_for(handshake) and self._keep(self._handshakes, handshake, 0.0)

    def admit(self, connection: Connection, handshake: Endable | None = None) -> bool:
        """
        Admit a connection, evicting another one if all places are taken; return False if none can be evicted.

        Args:
            connection: The connection.
            handshake: Its handshake, whose place it takes over; None without TLS.
        """
        had_place = handshake is not None and self._handshakes.pop(handshake, None) is not None
        return (had_place or self._has_room_for(connection)) and self._keep(
            self._waited, connection, _Waited(Phase.HEAD)
        )

    def forget(self, connection: Endable) -> None:
        """Note that a connection has ended."""
        kinds: tuple[dict[Any, Any], ...] = (self._waited, self._handshakes, self._ending)
        for kept in kinds:
            kept.pop(connection, None)

    def look(self, seconds: float) -> None:
        """Account for elapsed time, and end connections whose client is too slow."""
        self._spared.clear()
        for connection in _late(self._ending, seconds, ENDING_S):
            self._break_off(connection)
        for handshake in _late(self._handshakes, seconds, self.handshake_timeout_s):
            self._break_off(handshake)
            self.log("slow client", handshake, f"The handshake did not end within {self.handshake_timeout_s:g} s.")
        for connection, waited in list(self._waited.items()):
            message = self._judge(connection, waited, seconds)
            if message is not None:
                del self._waited[connection]
                self._ending[connection] = 0.0
                self.log("slow client", connection, message)
                connection.refuse(408, message)

    def log(self, event: str, connection: object, reason: str) -> None:
        """Log an event of a client, at most one line a second: strangers can cause thousands."""
        if count := self._refusals.count():
            client = _host_of(connection)
            logger.warning(event, extra={"client": client, "reason": reason, "connections": count, "open": len(self)})

    def _tick(self) -> None:
        self._timer = None
        self.look(TICK_S)
        if len(self):
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _judge(self, connection: Connection, waited: _Waited, seconds: float) -> str | None:
        """Return why a connection must be ended, or None."""
        bounds, phase = self._bounds, connection.phase
        if not _is_same_wait(connection, waited):
            waited.phase, waited.heads, waited.seconds = phase, connection.heads, 0.0
        if phase is Phase.NOTHING and connection.is_answering:
            waited.seconds = 0.0
        elif not connection.is_held_back:
            waited.seconds += seconds
        is_stuck = 0 < connection.unread_bytes == waited.unread_bytes
        waited.unread_s = waited.unread_s + seconds if is_stuck else 0.0
        waited.unread_bytes = connection.unread_bytes
        if waited.unread_s > UNREAD_S:
            return f"The client read nothing of an answer for {UNREAD_S:g} s."
        if phase is Phase.HEAD and waited.seconds > bounds.head_timeout_s:
            return f"The head of the request did not arrive within {bounds.head_timeout_s:g} s."
        due_bytes = (waited.seconds - bounds.body_grace_s) * bounds.body_bytes_per_s_min
        if phase is Phase.BODY and connection.body_bytes < due_bytes:
            return f"The body of the request arrives slower than {bounds.body_bytes_per_s_min} bytes per second."
        return None

    def _keep(self, kept: dict[_Kept, _About], connection: _Kept, about: _About) -> bool:
        kept[connection] = about
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        return True

    def _has_room_for(self, connection: Endable) -> bool:
        """Say whether a place is free, after evicting a connection if none was."""
        if len(self) < self._bounds.connections_max:
            return True
        spared = self._missed_least()
        if spared is not None:
            if self._is_silent(spared):
                self.log("too many connections", spared, "a silent connection was evicted for a newer one")
            self._break_off(spared)
            return True
        self.log("too many connections", connection, f"all {self._bounds.connections_max} places are taken")
        return False

    def _missed_least(self) -> Endable | None:
        if self._ending:
            return next(iter(self._ending))
        if not self._spared:
            self._spared.extend(self._find_spared())
        while self._spared:
            connection = self._spared.popleft()
            if self._is_silent(connection) or self._is_idle(connection):  # it may have sent a request meanwhile
                return connection
        return None

    def _find_spared(self) -> list[Endable]:
        """
        Return some candidates for eviction, the first to go first.

        A search of all connections for each new one would let a crowd of new ones overload the service.
        """
        count = max(1, self._bounds.connections_max // _FOUND_PART)
        silent: dict[Endable, float] = dict(self._handshakes)
        silent |= {found: self._silent_s(found) for found in self._waited if self._is_silent(found)}
        crowd = islice(_of_largest_host(silent), count)
        if 2 * len(silent) > self._bounds.connections_max:  # a crowd evicts its own, not idle clients
            return list(crowd)
        idle: dict[Endable, float] = {found: self._silent_s(found) for found in self._waited if self._is_idle(found)}
        return sorted(idle, key=idle.__getitem__, reverse=True)[:count] or list(crowd)

    def _is_silent(self, connection: Any) -> bool:
        """Say whether a handshake, a request head, or the body of an answered request is incomplete."""
        is_waited = connection in self._waited and connection.phase is not Phase.NOTHING
        return (is_waited and not connection.is_answering) or connection in self._handshakes

    def _is_idle(self, connection: Any) -> bool:
        return connection in self._waited and connection.phase is Phase.NOTHING and not connection.is_answering

    def _silent_s(self, connection: Connection) -> float:
        waited = self._waited[connection]
        return waited.seconds if _is_same_wait(connection, waited) else 0.0

    def _break_off(self, connection: Endable) -> None:
        self.forget(connection)
        connection.end()


def _late(kept: dict[Endable, float], seconds: float, limit_s: float) -> list[Endable]:
    """Account for elapsed time; return the connections above the limit."""
    for connection in kept:
        kept[connection] += seconds
    return [connection for connection, taken_s in kept.items() if taken_s > limit_s]


def _is_same_wait(connection: Connection, waited: _Waited) -> bool:
    """Say whether a client has completed neither a head nor a body since the last check."""
    return (connection.phase, connection.heads) == (waited.phase, waited.heads)


def _of_largest_host(silent: Mapping[Endable, float]) -> Iterator[Endable]:
    """Yield connections: each time the longest silent one of the host with most connections left."""
    of_hosts: dict[object, deque[Endable]] = defaultdict(deque)
    for connection in sorted(silent, key=silent.__getitem__, reverse=True):
        of_hosts[_host_of(connection)].append(connection)
    while of_hosts:
        host = max(of_hosts, key=lambda host: len(of_hosts[host]))
        yield of_hosts[host].popleft()
        if not of_hosts[host]:
            del of_hosts[host]


def _host_of(connection: object) -> object:
    """Return a client's address; all clients of a Unix socket count as one host."""
    return (getattr(connection, "client", None) or ("",))[0]
