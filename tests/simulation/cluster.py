"""
A simulated cluster: an object store that fails, two hosts whose processes crash, and drivers that compete for one job.

The store's calls take effect after a delay and answer after another. A crash in between leaves a call without effect,
interrupts a sequence of calls, or leaves a call whose effect comes late. `SimulatedCluster.contents` is the model: the
state at every checkpoint that was ever requested.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from dstl_service.collection.retention import RetentionSettings
from dstl_service.compaction.plan import CompactionSettings
from dstl_service.composition import Parts, compose
from dstl_service.intake.change_sets import BatchSettings
from dstl_service.peers.client import PeerClient
from dstl_service.settings import CacheSettings, GcSettings, ServiceSettings
from dstl_service.wire import ChangeSetRef, CheckpointRef
from storage.errors import ClosedError, LostChangesError, OverloadedError, UnavailableError
from storage.memory_store import MemoryStore
from storage.model import ObjectInfo, SegmentHandle
from storage.object_store import ObjectData, joined
from storage.testing import FakeIds
from tools.virtual_time import LoopClock, VirtualLoop

T = TypeVar("T")
Table = dict[bytes, bytes]
State = dict[str, Table]

CHECKPOINTS_RETAINED = 2
HOSTS = ("http://a:7071", "http://b:7071")
_NOT_NOW = (UnavailableError, OverloadedError, ClosedError)


class _Cut(BaseException):
    """A process died between two calls to the store."""


class SimulatedStore(MemoryStore):
    """Fails at random: before the effect, after it, or with half an object; and at once if its caller is dead."""

    def __init__(self, chance: random.Random, clock: LoopClock) -> None:
        super().__init__(clock=clock, ids=FakeIds(0xFFFF))
        self._chance = chance
        self.healthy = True
        self.calls_left: int | None = None

    def put(self, key: str, data: ObjectData, *, if_absent: bool = False) -> None:
        """Put, or fail."""
        self._before()
        if not self.healthy and key not in self._objects and not if_absent and self._chance.random() < 0.02:
            super().put(key, joined(data)[: self._chance.randrange(50)])
            raise UnavailableError("half of it was written")
        super().put(key, data, if_absent=if_absent)
        self._after()

    def get(self, key: str) -> bytes:
        """Get, or fail."""
        self._before()
        return super().get(key)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """List, or fail."""
        self._before()
        return super().list(prefix, start_after=start_after)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete some or all, and fail or not."""
        for key in keys:
            self._before()
            super().delete([key])
        self._after()

    def _before(self) -> None:
        if self.calls_left is not None:
            if self.calls_left == 0:
                raise _Cut
            self.calls_left -= 1
        if not self.healthy and self._chance.random() < 0.02:
            raise UnavailableError("the store failed")

    def _after(self) -> None:
        if not self.healthy and self._chance.random() < 0.03:
            raise UnavailableError("the response was lost")


class Process:
    """A service process on one host."""

    def __init__(self, cluster: SimulatedCluster, host: int) -> None:
        self.cluster = cluster
        self.host = host
        self.died: asyncio.Future[None] = cluster.loop.create_future()
        self.context = contextvars.copy_context()
        self.context.run(_PROCESS.set, self)
        cluster.processes += 1
        settings = ServiceSettings(
            "memory://simulated",
            host_id=f"host-{host}",
            advertised_url=HOSTS[host],
            checkpoint_timeout_s=10,
            cache=CacheSettings(parts_ahead=0),  # the simulation has no threads
            batch=BatchSettings(size_bytes=3_000, in_flight_bytes_max=30_000),
            compaction=CompactionSettings(floor_bytes=1),
            retention=RetentionSettings(checkpoints_max=CHECKPOINTS_RETAINED, delay_s=30),
            gc=GcSettings(interval_s=30, age_min_s=31),
        )
        ids, peers = FakeIds(cluster.processes), _Peers(cluster)
        self.parts: Parts = self.context.run(compose, settings, cluster.store, cluster.clock, ids, peers)

    def start(self, work: Awaitable[T]) -> asyncio.Task[T]:
        """Run something in this process."""
        return self.cluster.loop.create_task(_await(work), context=self.context)

    def crash(self) -> None:
        """Die: its pending requests are never answered, and another process replaces it."""
        self.died.set_result(None)
        self.cluster.hosts[self.host] = Process(self.cluster, self.host)


class SimulatedCluster:
    """Store, hosts and model of one run."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.clock = LoopClock()
        self.loop = VirtualLoop(self._call)
        self.clock.loop = self.loop
        self.store = SimulatedStore(self.chance, self.clock)
        self.processes = 0
        self.crashes = 0
        self.hosts = [Process(self, host) for host in range(len(HOSTS))]
        self.contents: dict[str, State] = {}
        self.parents: dict[str, str | None] = {}
        self.reported: list[CheckpointRef] = []
        self._unanswered: list[asyncio.Future[Any]] = []

    def run(self, story: Awaitable[None]) -> None:
        """Run a coroutine to its end."""
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(_await(story))
        finally:
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            asyncio.set_event_loop(None)
            self.loop.close()

    async def ask(self, host: int, request: Callable[[Parts], Awaitable[T]]) -> T:
        """Send a request like a client: again after a lost connection, a crash, or an overload."""
        while True:
            process = self.hosts[host]
            await asyncio.sleep(self.chance.uniform(0, 0.005))
            task = process.start(request(process.parts))
            waiting: set[asyncio.Future[Any]] = {task, process.died}
            if self.chance.random() < 0.02:  # the connection breaks, and the request continues without its client
                await asyncio.wait(waiting, timeout=self.chance.uniform(0, 0.05))
                continue
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if process.died.done():
                await asyncio.sleep(self.chance.uniform(0.1, 1))
                continue
            try:
                return task.result()
            except _NOT_NOW:
                await asyncio.sleep(self.chance.uniform(0.1, 1))

    async def crash_now_and_then(self, mean_s: float, times: int) -> None:
        """Kill processes, one after the other."""
        for _ in range(times):
            await asyncio.sleep(self.chance.expovariate(1 / mean_s))
            self.chance.choice(self.hosts).crash()
            self.crashes += 1

    def ancestors(self, uid: str | None) -> set[str]:
        """Return the uids of a checkpoint and of all its ancestors."""
        found = set()
        while uid is not None:
            found.add(uid)
            uid = self.parents[uid]
        return found

    def _call(self, function: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        """Let a call to the store take effect later, and answer later still."""
        process = _PROCESS.get()
        request = _request_of_peer(function)
        if request is not None:
            task = self.loop.create_task(_await(request))
            task.add_done_callback(partial(self._hand_on, process, future))
            return
        self.loop.call_later(self._delay_s(), self._take_effect, process, function, future)

    def _take_effect(self, process: Process, function: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        if process.died.done():
            self._unanswered.append(future)  # its waiters wait forever, instead of being collected
            # Pending calls may still arrive, all of them or only the first ones; no caller learns of it.
            self.store.calls_left = self.chance.choice((0, 0, 1, 2, 4, 8, 1000))
            try:
                function()
            except (_Cut, Exception):  # noqa: BLE001 - the process is dead
                pass
            finally:
                self.store.calls_left = None
            return
        try:
            result, error = function(), None
        except Exception as raised:  # noqa: BLE001 - the waiting caller raises it
            result, error = None, raised
        self.loop.call_later(self._delay_s() / 4, self._answer, process, future, result, error)

    def _answer(self, process: Process, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        if process.died.done():
            self._unanswered.append(future)
        elif future.done():
            return
        elif error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def _hand_on(self, process: Process, future: asyncio.Future[Any], task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            error = task.exception()
            self._answer(process, future, None if error else task.result(), error)

    def _delay_s(self) -> float:
        kind = self.chance.random()
        if self.store.healthy or kind < 0.93:
            return self.chance.uniform(0.001, 0.02)
        return self.chance.uniform(0.2, 3) if kind < 0.99 else self.chance.uniform(3, 25)


class _Peers(PeerClient):
    """The connection from one host to the other; `persist` is awaited where a real one blocks a thread."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster  # sufficient: no connection is ever opened

    def persist(
        self, url: str, job: str, refs: Sequence[ChangeSetRef], *, wait: bool, note: str | None = None
    ) -> list[SegmentHandle]:
        """Never called: see `VirtualLoop`."""
        raise NotImplementedError

    async def ask(
        self, url: str, job: str, refs: Sequence[ChangeSetRef], *, wait: bool, note: str | None = None
    ) -> list[SegmentHandle]:
        """Call the current process of the host; a process that dies meanwhile is unreachable."""
        process = self._cluster.hosts[HOSTS.index(url)]
        task = process.start(process.parts.persister.persist_claimed(job, refs, wait=wait, note=note))
        waiting: set[asyncio.Future[Any]] = {task, process.died}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if process.died.done() or self._cluster.chance.random() < 0.02:
            raise LostChangesError(f"{url} cannot be reached")
        return task.result().all_handles


_PROCESS: contextvars.ContextVar[Process] = contextvars.ContextVar("process")


async def _await(work: Awaitable[T]) -> T:
    return await work


def _request_of_peer(function: Any) -> Awaitable[Any] | None:
    """Return the awaitable that replaces a blocking call to another host, or None for any other call."""
    peers = getattr(function.func, "__self__", None) if isinstance(function, partial) else None
    return peers.ask(*function.args, **function.keywords) if isinstance(peers, _Peers) else None
