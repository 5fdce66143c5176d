"""
Actors that take turns at their calls to the store, and the store that makes them.

An actor is blocking code of the project in a greenlet. It stops before each call to the store until the scheduler
resumes it, so a schedule - which actor makes the next call - decides everything that happens. There is one thread and
no real time: the same schedule gives the same run, to the last byte.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from greenlet import GreenletExit, getcurrent, greenlet

from storage.clock import Clock
from storage.errors import DstlError, UnavailableError
from storage.memory_store import MemoryStore
from storage.model import ObjectInfo
from storage.object_store import ObjectData, joined

ON, DEATH, REFUSED, LOST, LATE = ":", "!", "~", "?", "&"
"""
A schedule's decision about an actor: it continues; its process dies; or its call fails without effect, after its
effect, or before an effect that comes at any later time, as that of a request which stood still on its way.
"""
FAULTS = (REFUSED, LOST, LATE)
_CHANGES = ("put ", "delete ")
_CALLS = (*_CHANGES, "get ", "head ", "list ")
UNSEEN = "probe/"
"""Objects that only their writer reads: calls to them take no turn."""


class ViolationError(AssertionError):
    """An invariant does not hold."""


@dataclass(eq=False)
class Actor:
    """
    One of the actors that take turns.

    Args:
        name: Its name, as schedules give it.
        process: Actors of one process share memory.
        run: Its code.
    """

    name: str
    process: str
    run: Callable[[], object]
    waits_for: Callable[[], bool] | None = None
    call: str = "begins"
    is_dead: bool = False
    error: DstlError | None = None
    greenlet: greenlet = field(init=False)

    @property
    def faults(self) -> tuple[str, ...]:
        """The ways in which its next call may fail."""
        return FAULTS if self.call.startswith(_CHANGES) else (REFUSED,) if self.call.startswith(_CALLS) else ()

    @property
    def is_enabled(self) -> bool:
        """Return whether it can continue."""
        return not self.is_dead and not self.greenlet.dead and (self.waits_for is None or self.waits_for())


@dataclass(frozen=True, slots=True)
class Choice:
    """A departure from running each actor to its end: at this step, do with this actor what the sign says."""

    step: int
    actor: str
    sign: str = ON

    def __str__(self) -> str:
        return f"{self.step}{self.sign}{self.actor}"

    @classmethod
    def parse(cls, text: str) -> Choice:
        """Parse the form that `str` returns."""
        step, sign, actor = re.split("([:!~?&])", text, maxsplit=1)
        return cls(int(step), actor, sign)


class Scheduler:
    """Lets actors take turns; the store calls it before each operation."""

    def __init__(self) -> None:
        self.actors: list[Actor] = []
        self.current: Actor | None = None
        self.violation: BaseException | None = None
        self.trace: list[str] = []
        self.seen_by: dict[str, int] = {}
        self.faults = 0
        self._fault = ""
        self._hub = getcurrent()
        self._is_over = False

    def add(self, name: str, run: Callable[[], object], process: str = "") -> Actor:
        """Add an actor; it begins when it gets its first turn."""
        actor = Actor(name, process or name, run)
        actor.greenlet = greenlet(lambda: self._live(actor), self._hub)
        self.actors.append(actor)
        self.seen_by.setdefault(actor.process, 0)
        return actor

    def add_late(self, call: Callable[[], object], *what: Any) -> None:
        """Add a call that takes effect at any time from now on, whatever becomes of the process that made it."""
        name = f"late-{self.faults}"
        self.seen_by[name] = hash(what)
        self.add(name, call).call = "what comes late takes effect"

    def yield_before(self, call: str) -> str:
        """Stop the running actor before a call; it continues with its next turn. Return how the call fails, or ""."""
        if self._is_over:
            raise GreenletExit
        actor = self.current
        if actor is None:  # preparation before the actors start, or checks after them
            return ""
        actor.call = call
        self._switch(actor)
        fault, self._fault = self._fault, ""
        self.faults += bool(fault)
        return fault

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Stop the running actor until something has happened, possibly forever."""
        actor = self.current
        assert actor is not None
        actor.waits_for, actor.call = condition, what
        self._switch(actor)
        actor.waits_for = None

    def observe(self, *seen: Any) -> None:
        """Record what the running actor has learned: its state and its place in the code follow from that."""
        if self.current is not None:
            process = self.current.process
            self.seen_by[process] = hash((self.seen_by[process], self.current.name, seen))

    def fail(self, violation: BaseException) -> None:
        """End the run with a violated invariant."""
        self.violation = self.violation or violation
        if self.current is not None:
            self._switch(self.current)

    def step(self, actor: Actor, fault: str = "") -> None:
        """Let an actor make its pending call, which may fail, and continue until the next one."""
        self.trace.append(f"{len(self.trace):3} {actor.name}: {actor.call}{f' fails ({fault})' if fault else ''}")
        self.current, self._fault = actor, fault
        actor.greenlet.switch()
        self.current = None

    def kill(self, actor: Actor) -> None:
        """Never resume an actor's process."""
        self.trace.append(f"{len(self.trace):3} {actor.name} dies before: {actor.call}")
        for other in self.actors:
            if other.process == actor.process:
                other.is_dead = True

    def close(self) -> None:
        """End all actors that have not ended."""
        self._is_over = True
        for actor in self.actors:
            if actor.greenlet:
                actor.greenlet.throw(GreenletExit)

    def _live(self, actor: Actor) -> None:
        try:
            actor.run()
        except DstlError as error:  # a refusal is not a violation; its consequences may be
            actor.error = error
            self.trace.append(f"    {actor.name} ends: {error}")
        except GreenletExit:
            pass
        except BaseException as error:  # noqa: BLE001 - the schedule's caller raises it
            self.violation = self.violation or error

    def _switch(self, actor: Actor) -> None:
        loop = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        try:
            self._hub.switch()
        finally:
            asyncio._set_running_loop(loop)
        if self.current is not actor:  # discarded
            raise GreenletExit


class TurnsStore(MemoryStore):
    """A store in memory whose every call is a turn of the running actor. A listing shows one moment, like one page."""

    def __init__(self, scheduler: Scheduler, clock: Clock) -> None:
        super().__init__("model", clock=clock)
        self._scheduler = scheduler
        self.on_put: Callable[[str, bytes], None] = lambda key, data: None
        self.on_delete: Callable[[str], None] = lambda key: None
        self.fingerprint = 0

    def objects(self) -> dict[str, tuple[bytes, int]]:
        """Return all objects: bytes and time of modification by key."""
        return dict(self._objects)

    def load(self, objects: Mapping[str, tuple[bytes, int]]) -> None:
        """Replace the content by these objects."""
        for key, (data, modified_ms) in objects.items():
            self._objects[key] = data, modified_ms
            self.fingerprint ^= hash((key, data, modified_ms))

    def put(self, key: str, data: ObjectData, *, if_absent: bool = False) -> None:
        """Put, in a turn."""
        content = joined(data)

        def put() -> None:
            self._put(key, content, if_absent=if_absent)

        self._change("put", key, put, content, if_absent)

    def _change(self, operation: str, key: str, change: Callable[[], None], *what: Any) -> None:
        """Carry out a change in a turn, or let it fail."""
        fault = self._turn(operation, key)
        if fault == LATE:
            self._scheduler.add_late(change, operation, key, *what)
        elif fault != REFUSED:
            try:
                change()
            except DstlError:
                if not fault:
                    raise
        if fault:
            self._fail(operation, key)

    def _fail(self, operation: str, key: str) -> None:
        self._scheduler.observe(operation, key, "no answer")
        raise UnavailableError(f"cannot {operation} {key}: there is no answer", key=key)

    def _put(self, key: str, content: bytes, *, if_absent: bool) -> None:
        found = self._objects.get(key)
        try:
            super().put(key, content, if_absent=if_absent)
        except DstlError as error:
            self._scheduler.observe("put", key, error.kind)
            raise
        self._scheduler.observe("put", key, content)
        if (stored := self._objects[key]) is not found:
            self.fingerprint ^= hash((key, *found)) if found else 0
            self.fingerprint ^= hash((key, *stored))
            self.on_put(key, content)

    def get(self, key: str) -> bytes:
        """Get, in a turn."""
        self._read("get", key)
        data = self._objects.get(key, (b"", 0))
        self._scheduler.observe("get", key, data)
        return super().get(key)

    def get_range(self, key: str, offset: int, size: int) -> bytes:
        """Get a range, in a turn."""
        self._read("get", key)
        self._scheduler.observe("get", key, self._objects.get(key))
        return super().get_range(key, offset, size)

    def head(self, key: str) -> ObjectInfo:
        """Describe an object, in a turn."""
        self._read("head", key)
        self._scheduler.observe("head", key, self._objects.get(key))
        return super().head(key)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """List the objects that exist at this turn."""
        self._read("list", prefix)
        found = [*super().list(prefix, start_after=start_after)]
        self._scheduler.observe("list", prefix, *found)
        return iter(found)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete, each in a turn."""
        for key in keys:
            self._change("delete", key, partial(self._delete, key))

    def _delete(self, key: str) -> None:
        found = self._objects.get(key)
        super().delete([key])
        self._scheduler.observe("delete", key)
        if found:
            self.fingerprint ^= hash((key, *found))
            self.on_delete(key)

    def _read(self, operation: str, key: str) -> None:
        if self._turn(operation, key):
            self._fail(operation, key)

    def _turn(self, operation: str, key: str) -> str:
        return "" if key.startswith(UNSEEN) else self._scheduler.yield_before(f"{operation} {key}")


class WaitingClock(Protocol):
    """A process's clock, and the time for which the process has waited for timers."""

    waited_ms: int

    def monotonic_ms(self) -> int:
        """Return the time, waiting included."""
        ...


class ActorLoop(asyncio.BaseEventLoop):
    """
    A process's event loop inside an actor: calls into threads run at once, in the actor's turns.

    Its time jumps to the next timer when nothing is left to do, so that delays cost nothing.
    """

    def __init__(self, clock: WaitingClock) -> None:
        super().__init__()
        self._clock = clock
        self._selector = self
        self.set_exception_handler(lambda loop, context: None)

    def time(self) -> float:
        """Return the process's time."""
        return self._clock.monotonic_ms() / 1000

    def select(self, timeout: float | None) -> tuple[()]:
        """Stand for a selector: let the time pass until the next timer."""
        if timeout is None:
            raise RuntimeError("everybody waits for somebody else")
        self._clock.waited_ms += math.ceil(timeout * 1000)
        return ()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Run a call now."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - the waiting caller raises it
            future.set_exception(error)
        return future

    def __del__(self) -> None:
        """Have nothing to close."""

    def _process_events(self, event_list: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        pass
