"""
How many clients there are, and how slow they may be: nobody holds a connection, or half a request, for ever.

Once a second all connections are looked at, so that a request that is sent as usual costs nothing here. A client is
waited for only while it is its turn: not while its request is answered, nor while the service reads nothing more from
it. A connection counts from its first moment, its handshake included, until its file is free again. When there are too
many, those go that are missed least: what ends anyway, who crowds in and asks for nothing, who is idle. Who asks for
nothing are handshakes, and requests whose head is not whole; of them the host goes first that has most, with what is
silent for longest. Owned by the event loop.
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

TICK_S = 1.0
UNREAD_S = 600.0
"""How long a client may read nothing of an answer. A table that applies what it restores reads on much sooner."""
ENDING_S = 5.0
"""How long a connection that was refused may take to end by itself: its last words are to be read."""
_FILES_MAX = 1 << 20
_FOUND_PART = 64
"""So large a part of all connections, and not more, is found at one look for those that make room."""

logger = logging.getLogger("dstl_service")

_Kept = TypeVar("_Kept")
_About = TypeVar("_About")


class Phase(enum.Enum):
    """What a client has to send next."""

    HEAD = "head"
    """The first request of its connection, or the rest of a request's head."""
    BODY = "body"
    NOTHING = "nothing"
    """Another request, if it wants to."""


class Endable(Protocol):
    """What is asked of a connection whose handshake has not ended."""

    def end(self) -> None:
        """Break it off at once, so that its file is free."""
        ...


class Connection(Endable, Protocol):
    """What is asked of a connection."""

    @property
    def phase(self) -> Phase:
        """What its client has to send next."""
        ...

    @property
    def heads(self) -> int:
        """How many requests have begun on it whose head is whole."""
        ...

    @property
    def body_bytes(self) -> int:
        """How much has come of the body that is being sent."""
        ...

    @property
    def is_held_back(self) -> bool:
        """Whether nothing is read from it for now."""
        ...

    @property
    def is_answering(self) -> bool:
        """Whether a request is being answered."""
        ...

    @property
    def unread_bytes(self) -> int:
        """How much of an answer waits for its client, as more than is usual does; else 0."""
        ...

    def refuse(self, status: int, message: str, headers: str = "") -> None:
        """Answer if that is possible still, and close it."""
        ...


def open_files_max() -> int:
    """Return how many files this process may open, after the limit was raised as far as its user may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # a system may have a bound of its own below
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return _FILES_MAX if soft == resource.RLIM_INFINITY else soft


@dataclass(frozen=True, slots=True)
class Bounds:
    """See `dstl_service.settings.HttpSettings`."""

    connections_max: int
    head_timeout_s: float
    body_grace_s: float
    body_bytes_per_s_min: int


@dataclass(slots=True)
class _Waited:
    """
    How long a client was waited for in its phase, behind so many `heads`.

    And how long it has read nothing of an answer, of which `unread_bytes` were left.
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
        bounds: How many, and how slow.
        refusals: Lets a line through now and then.
    """

    def __init__(self, bounds: Bounds, refusals: LogLimiter) -> None:
        self._bounds = bounds
        self._refusals = refusals
        self._waited: dict[Connection, _Waited] = {}
        # For how long; the oldest first.
        self._handshakes: dict[Endable, float] = {}
        self._ending: dict[Endable, float] = {}
        self._spared: deque[Endable] = deque()  # found at the last look at all, and missed least
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waited) + len(self._handshakes) + len(self._ending)

    @property
    def handshake_timeout_s(self) -> float:
        """How long a handshake may take."""
        return self._bounds.head_timeout_s

    def begin_handshake(self, handshake: Endable) -> bool:
        """Take in what has yet to show that it is a client; see `admit`."""
        return self._has_room_for(handshake) and self._keep(self._handshakes, handshake, 0.0)

    def admit(self, connection: Connection, handshake: Endable | None = None) -> bool:
        """
        Take a connection in, in the place of one that is missed less if there is none; or return False.

        Args:
            connection: It.
            handshake: What stood for it until now.
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
        """Note that time has passed, and end the connections whose client is too slow."""
        self._spared.clear()
        for connection in _late(self._ending, seconds, ENDING_S):
            self._break_off(connection)
        for handshake in _late(self._handshakes, seconds, self.handshake_timeout_s):
            self._break_off(handshake)
            self.log("slow client", handshake, f"A handshake did not end within {self.handshake_timeout_s:g} s.")
        for connection, waited in list(self._waited.items()):
            message = self._judge(connection, waited, seconds)
            if message is not None:
                del self._waited[connection]
                self._ending[connection] = 0.0
                self.log("slow client", connection, message)
                connection.refuse(408, message)

    def log(self, event: str, connection: object, reason: str) -> None:
        """Write a line about a client, at most one a second: it may come by the thousand, and strangers may send it."""
        if count := self._refusals.count():
            client = _host_of(connection)
            logger.warning(event, extra={"client": client, "reason": reason, "connections": count, "open": len(self)})

    def _tick(self) -> None:
        self._timer = None
        self.look(TICK_S)
        if len(self):
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _judge(self, connection: Connection, waited: _Waited, seconds: float) -> str | None:
        """Return why a connection is to be ended, or None."""
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
            return f"Nothing of an answer was read for {UNREAD_S:g} s."
        if phase is Phase.HEAD and waited.seconds > bounds.head_timeout_s:
            return f"The head of a request did not come within {bounds.head_timeout_s:g} s."
        due_bytes = (waited.seconds - bounds.body_grace_s) * bounds.body_bytes_per_s_min
        if phase is Phase.BODY and connection.body_bytes < due_bytes:
            return f"The body of a request comes slower than {bounds.body_bytes_per_s_min} bytes per second."
        return None

    def _keep(self, kept: dict[_Kept, _About], connection: _Kept, about: _About) -> bool:
        kept[connection] = about
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        return True

    def _has_room_for(self, connection: Endable) -> bool:
        """Say whether there is a place, after the connection that is missed least was broken off if there was none."""
        if len(self) < self._bounds.connections_max:
            return True
        spared = self._missed_least()
        if spared is not None:
            if self._is_silent(spared):
                self.log("too many connections", spared, "one that asks for nothing gave its place to a newer one")
            self._break_off(spared)
            return True
        self.log("too many connections", connection, f"at most {self._bounds.connections_max} are taken")
        return False

    def _missed_least(self) -> Endable | None:
        if self._ending:
            return next(iter(self._ending))
        if not self._spared:
            self._spared.extend(self._find_spared())
        while self._spared:
            connection = self._spared.popleft()
            if self._is_silent(connection) or self._is_idle(connection):  # it may have asked for something meanwhile
                return connection
        return None

    def _find_spared(self) -> list[Endable]:
        """
        Return some connections that may make room, those first that are missed least.

        A look at all of them for each new one would be what a crowd of new ones wants.
        """
        count = max(1, self._bounds.connections_max // _FOUND_PART)
        silent: dict[Endable, float] = dict(self._handshakes)
        silent |= {found: self._silent_s(found) for found in self._waited if self._is_silent(found)}
        crowd = islice(_of_largest_host(silent), count)
        if 2 * len(silent) > self._bounds.connections_max:  # who is served does not make room for a crowd
            return list(crowd)
        idle: dict[Endable, float] = {found: self._silent_s(found) for found in self._waited if self._is_idle(found)}
        return sorted(idle, key=idle.__getitem__, reverse=True)[:count] or list(crowd)

    def _is_silent(self, connection: Any) -> bool:
        """Say whether a connection has asked for nothing: it has not ended its handshake, or its next head."""
        is_head = connection in self._waited and connection.phase is Phase.HEAD and not connection.is_answering
        return is_head or connection in self._handshakes

    def _is_idle(self, connection: Any) -> bool:
        return connection in self._waited and connection.phase is Phase.NOTHING and not connection.is_answering

    def _silent_s(self, connection: Connection) -> float:
        waited = self._waited[connection]
        return waited.seconds if _is_same_wait(connection, waited) else 0.0

    def _break_off(self, connection: Endable) -> None:
        self.forget(connection)
        connection.end()


def _late(kept: dict[Endable, float], seconds: float, limit_s: float) -> list[Endable]:
    """Note that time has passed; return what has taken longer than the limit."""
    for connection in kept:
        kept[connection] += seconds
    return [connection for connection, taken_s in kept.items() if taken_s > limit_s]


def _is_same_wait(connection: Connection, waited: _Waited) -> bool:
    """Say whether a client has sent nothing whole since it was last looked at."""
    return (connection.phase, connection.heads) == (waited.phase, waited.heads)


def _of_largest_host(silent: Mapping[Endable, float]) -> Iterator[Endable]:
    """Yield connections, each of the host that has most of those left, and of it the one that is silent for longest."""
    of_hosts: dict[object, deque[Endable]] = defaultdict(deque)
    for connection in sorted(silent, key=silent.__getitem__, reverse=True):
        of_hosts[_host_of(connection)].append(connection)
    while of_hosts:
        host = max(of_hosts, key=lambda host: len(of_hosts[host]))
        yield of_hosts[host].popleft()
        if not of_hosts[host]:
            del of_hosts[host]


def _host_of(connection: object) -> object:
    """Return a client's address; over a Unix socket all are of one host."""
    return (getattr(connection, "client", None) or ("",))[0]
