"""
How many clients there are, and how slow they may be: nobody holds a connection, or half a request, for ever.

Once a second all connections are looked at, so that a request that is sent as usual costs nothing here. A client is
waited for only while it is its turn: not while its request is answered, nor while the service reads nothing more from
it. Connections that are idle are the server's to close, and the first to go when there are too many. Owned by the event
loop.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import resource
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from dstl_service.logs import Throttle

TICK_S = 1.0
UNREAD_S = 600.0
"""How long a client may read nothing of an answer. A table that applies what it restores reads on much sooner."""
_FILES_MAX = 1 << 20

logger = logging.getLogger("dstl_service")


class Phase(enum.Enum):
    """What a client has to send next."""

    HEAD = "head"
    """The first request of its connection, or the rest of a request's head."""
    BODY = "body"
    NOTHING = "nothing"
    """Another request, if it wants to."""


class Connection(Protocol):
    """What is asked of a connection."""

    @property
    def phase(self) -> Phase:
        """What its client has to send next."""
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

    def end(self) -> None:
        """Close it without a word."""
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
    How long a client was waited for in its phase, in which it had sent `body_bytes` when that was last said.

    And how long it has read nothing of an answer, of which `unread_bytes` were left.
    """

    phase: Phase
    seconds: float = 0.0
    body_bytes: int = 0
    unread_bytes: int = 0
    unread_s: float = 0.0


class Connections:
    """
    The connections of one server.

    Args:
        bounds: How many, and how slow.
        refusals: Lets a line through now and then.
    """

    def __init__(self, bounds: Bounds, refusals: Throttle) -> None:
        self._bounds = bounds
        self._refusals = refusals
        self._waited: dict[Connection, _Waited] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waited)

    def admit(self, connection: Connection) -> bool:
        """Take a connection in, in the place of the one that is idle for longest if there is none; or return False."""
        if len(self._waited) >= self._bounds.connections_max and not self._end_an_idle_one():
            self.log("too many connections", connection, f"at most {self._bounds.connections_max} are taken")
            return False
        self._waited[connection] = _Waited(Phase.HEAD)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        return True

    def forget(self, connection: Connection) -> None:
        """Note that a connection has ended."""
        self._waited.pop(connection, None)

    def look(self, seconds: float) -> None:
        """Note that time has passed, and end the connections whose client is too slow."""
        for connection, waited in list(self._waited.items()):
            message = self._judge(connection, waited, seconds)
            if message is not None:
                del self._waited[connection]
                self.log("slow client", connection, message)
                connection.refuse(408, message)

    def log(self, event: str, connection: Connection, reason: str) -> None:
        """Write a line about a client, at most one a second: it may come by the thousand, and strangers may send it."""
        if count := self._refusals.count():
            client = (getattr(connection, "client", None) or ("",))[0]
            logger.warning(event, extra={"client": client, "reason": reason, "connections": count, "open": len(self)})

    def _tick(self) -> None:
        self._timer = None
        self.look(TICK_S)
        if self._waited:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _judge(self, connection: Connection, waited: _Waited, seconds: float) -> str | None:
        """Return why a connection is to be ended, or None."""
        bounds, phase = self._bounds, connection.phase
        if phase is not waited.phase or connection.body_bytes < waited.body_bytes:
            waited.phase, waited.seconds = phase, 0.0  # it has sent something whole since
        waited.body_bytes = connection.body_bytes if phase is Phase.BODY else 0
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
        if phase is Phase.BODY and waited.body_bytes < due_bytes:
            return f"The body of a request comes slower than {bounds.body_bytes_per_s_min} bytes per second."
        return None

    def _end_an_idle_one(self) -> bool:
        idle = [
            (waited.seconds, number, connection)
            for number, (connection, waited) in enumerate(self._waited.items())
            if connection.phase is Phase.NOTHING and not connection.is_answering
        ]
        if not idle:
            return False
        _, _, longest = max(idle, key=lambda item: (item[0], -item[1]))
        del self._waited[longest]
        longest.end()
        return True
