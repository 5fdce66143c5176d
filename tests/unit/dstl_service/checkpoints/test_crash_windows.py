"""
Overlapping requests within one service: repeated, late, and in the middle of each other.

A failure means that a checkpoint could name another set than the one that its driver accepted, or that a driver is
told something that did not happen.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest

from dstl_service.collection.garbage_collector import collect_garbage
from dstl_service.composition import Parts, compose
from dstl_service.formats.checkpoint_record import read_record
from dstl_service.formats.manifest import ManifestKind
from dstl_service.peers.client import PeerClient
from dstl_service.settings import GcSettings, PeerSettings, ServiceSettings
from dstl_service.wire import ChangeSetRef, CompleteRequest, CompleteResponse, OpenJob
from storage.errors import FencedError, InvalidInputError, LostChangesError
from storage.key_groups import KeyGroupRange
from storage.memory_store import MemoryStore
from storage.model import ChangeSetId, Segment, SegmentHandle, Writer
from storage.object_store import ObjectData, ObjectStore
from storage.testing import FakeClock, FakeIds, Fault, FaultKind, FaultyStore, RecordingStore
from tests.unit.dstl_service.job_history import JobHistory
from tests.unit.dstl_service.samples import handles_of, manifest, opened

GROUPS = KeyGroupRange(0, 127)
MANIFESTS = "job/checkpoints/*"


def segment(payload: bytes = b"payload", epoch: int = 1, checkpoint_id: int = 0, attempt: int = 1) -> Segment:
    """Return a change set of the job's only partition."""
    set_id = ChangeSetId("job", "op", checkpoint_id, Writer(epoch, attempt), 0, 0)
    return Segment.of(set_id, GROUPS, 1, payload)


def request(*refs: ChangeSetRef, uid: str = "uid", epoch: int = 1) -> CompleteRequest:
    """Ask for checkpoint 0."""
    return CompleteRequest(epoch, uid, None, list(refs), [])


def run(store: ObjectStore, story: Callable[[Parts], Awaitable[None]], peers: PeerClient | None = None) -> None:
    """Run a story against a service that has opened the job, and stop the service."""

    async def tell() -> None:
        settings = ServiceSettings(
            "memory://x",
            host_id="host",
            gc=GcSettings(interval_s=0),
            shutdown_timeout_s=1,
            peers=PeerSettings(allowed="http://other,http://here"),
        )
        parts = compose(settings, store, FakeClock(), FakeIds(1), peers or PeerClient(lambda: None, 1))
        try:
            await parts.opener.open("job", OpenJob("test"))
            await asyncio.wait_for(story(parts), 30)
        finally:
            await parts.close()

    asyncio.run(tell())


async def reached(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    while not condition():  # noqa: ASYNC110 - a thread brings it about
        await asyncio.sleep(0.001)


def uids(store: ObjectStore) -> list[str]:
    """Return the uids of all checkpoints of the job."""
    return [manifest.uid for manifest in opened(store).completed()]


class Gate(FaultyStore):
    """A store whose next put of a manifest, or of other chosen objects, waits until it is released."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.arrived = 0
        self._pattern = "*"

    def close_gate(self, pattern: str = MANIFESTS) -> None:
        """Let the next matching put wait; count matching puts from now on."""
        self._pattern = pattern
        self.inject(Fault("put", FaultKind.DELAY, pattern))

    def put(self, key: str, data: ObjectData, *, if_absent: bool = False) -> None:
        """Count the matching puts that arrive."""
        self.arrived += fnmatchcase(key, self._pattern)
        super().put(key, data, if_absent=if_absent)


async def late_complete(parts: Parts, store: Gate) -> asyncio.Future[CompleteResponse]:
    """Begin to complete a checkpoint whose sets wait at the closed gate."""
    store.close_gate("job/segments/*")
    late = asyncio.ensure_future(
        parts.checkpointer.complete("job", 0, request(parts.intake.append(segment(), preemptive=False)))
    )
    before = store.arrived
    await reached(lambda: store.arrived > before)
    return late


@pytest.mark.parametrize("end", ["begin", "abort"])
def test_ended_try_does_not_come_to_exist(end: str) -> None:
    """A `complete` that still waits for its sets when its checkpoint is begun again or aborted makes none (I3, I18)."""
    store = Gate()

    async def story(parts: Parts) -> None:
        late = await late_complete(parts, store)
        await getattr(parts.checkpointer, end)("job", 0, 1)
        store.release()
        with pytest.raises(LostChangesError):
            await late
        ref = parts.intake.append(segment(b"again", attempt=2), preemptive=False)
        await parts.checkpointer.complete("job", 0, request(ref, uid="second"))

    run(store, story)
    assert uids(store) == ["second"]


@pytest.mark.parametrize("end", ["begin", "abort"])
def test_ended_try_with_slow_peer_does_not_come_to_exist(end: str) -> None:
    """A `complete` that waits for another host when its checkpoint is begun again or aborted makes none (I3, I18)."""
    store = MemoryStore()

    class SlowPeer(PeerClient):
        """Another host, which answers when it is told to."""

        def __init__(self) -> None:
            super().__init__(lambda: None, 1)
            self.asked, self.released = threading.Event(), threading.Event()

        def persist(
            self, url: str, job: str, refs: Sequence[ChangeSetRef], *, wait: bool, note: str | None = None
        ) -> list[SegmentHandle]:
            """Report the set and the note as durable."""
            self.asked.set()
            self.released.wait(30)
            return handles_of([segment(), *([] if note is None else [read_record(job, note).to_segment()])])

    peer = SlowPeer()

    async def story(parts: Parts) -> None:
        ref = replace(parts.intake.append(segment(), preemptive=False), service_id="other", service_url="http://other")
        late = asyncio.ensure_future(parts.checkpointer.complete("job", 0, request(ref)))
        await reached(peer.asked.is_set)
        await getattr(parts.checkpointer, end)("job", 0, 1)
        peer.released.set()
        with pytest.raises(LostChangesError):
            await late

    run(store, story, peer)
    assert uids(store) == []


def test_successor_of_receiver_is_asked_once() -> None:
    """A set is lost at once if its receiver's successor has the same address: requests do not loop between hosts."""

    class Loop(PeerClient):
        """The route back to the asking service."""

        def __init__(self) -> None:
            super().__init__(lambda: None, 1)
            self.refs: list[ChangeSetRef] = []

        def persist(
            self, url: str, job: str, refs: Sequence[ChangeSetRef], *, wait: bool, note: str | None = None
        ) -> list[SegmentHandle]:
            """Record the request."""
            self.refs += refs
            raise LostChangesError("not here")

    peer = Loop()

    async def story(parts: Parts) -> None:
        ref = replace(parts.intake.append(segment(), preemptive=False), service_id="before", service_url="http://here")
        with pytest.raises(LostChangesError):
            await parts.persister.persist_claimed("job", [ref])
        (asked,) = peer.refs
        with pytest.raises(LostChangesError):
            await parts.persister.persist_claimed("job", [asked])
        assert len(peer.refs) == 1

    run(MemoryStore(), story, peer)


def test_begin_waits_for_manifest_on_its_way() -> None:
    """`begin` waits while its checkpoint's manifest is written: afterwards it is certain whether that exists."""
    store = Gate()
    ended: list[str] = []

    def noted(name: str) -> Callable[[object], None]:
        return lambda _: ended.append(name)

    async def story(parts: Parts) -> None:
        ref = parts.intake.append(segment(), preemptive=False)
        await parts.persister.persist_claimed("job", [ref])
        store.close_gate()
        before = store.arrived
        first = asyncio.ensure_future(parts.checkpointer.complete("job", 0, request(ref)))
        await reached(lambda: store.arrived > before)
        begun = asyncio.ensure_future(parts.checkpointer.begin("job", 0, 1))
        for name, task in (("complete", first), ("begin", begun)):
            task.add_done_callback(noted(name))
        store.release()
        await asyncio.gather(first, begun)

    run(store, story)
    assert ended == ["complete", "begin"]
    assert uids(store) == ["uid"]


def test_concurrent_completes_make_one_checkpoint() -> None:
    """A request that is repeated while the first one still runs gets the same answer (I3, I8)."""
    store = Gate()

    async def story(parts: Parts) -> None:
        ref = parts.intake.append(segment(), preemptive=False)
        answers = await asyncio.gather(*(parts.checkpointer.complete("job", 0, request(ref)) for _ in range(3)))
        assert len({answer.ref for answer in answers}) == 1

    run(store, story)
    assert uids(store) == ["uid"]


def test_new_epoch_ends_running_complete() -> None:
    """A `complete` overtaken by a newer epoch makes no checkpoint (I4)."""
    store = Gate()

    async def story(parts: Parts) -> None:
        late = await late_complete(parts, store)
        await parts.opener.open("job", OpenJob("newer"))
        store.release()
        with pytest.raises(FencedError):
            await late
        with pytest.raises(FencedError):
            await parts.checkpointer.begin("job", 0, 1)

    run(store, story)
    assert uids(store) == []


def test_driver_paused_past_retention_is_fenced() -> None:
    """A driver that paused while its checkpoints were subsumed finds its place taken, not free (I4)."""
    history = JobHistory()
    history.complete(history.object(0), kind=ManifestKind.COMPLETE)
    assert history.newest is not None
    late = manifest(1, history.epoch, history.newest.ref, job_uid=history.jobs.job_uid)
    sleeper = history.jobs
    newer = JobHistory(history.store)
    for _ in range(3):
        newer.complete(kind=ManifestKind.COMPLETE)
    newer.clock.advance(10**9)
    collected = collect_garbage(newer.store, newer.jobs, "job", newer.clock, checkpoints_max=1)
    assert collected.subsumed == 3

    with pytest.raises(FencedError):
        sleeper.create_manifest(late)


def test_subsumed_chain_is_deleted_from_its_end() -> None:
    """A process that dies while it deletes subsumed manifests leaves no broken chain (I3)."""
    history = JobHistory()
    refs = []
    for number in range(3):
        history.complete(history.object(number))
        assert history.newest is not None
        refs.append(history.newest.ref)
    recorded = RecordingStore(history.store)

    opened(recorded).delete_manifests(refs)

    deleted = recorded.keys("delete")
    assert deleted == sorted(deleted, reverse=True)


def test_forgotten_set_ends_wait_at_once() -> None:
    """A request that waits for a set is told at once that the set was forgotten, although the upload hangs."""
    store = Gate()

    async def story(parts: Parts) -> None:
        store.close_gate("job/segments/*")
        waiting = asyncio.ensure_future(
            parts.persister.persist_claimed("job", [parts.intake.append(segment(), preemptive=False)])
        )
        before = store.arrived
        await reached(lambda: store.arrived > before)
        await parts.checkpointer.begin("job", 0, 1)
        with pytest.raises(LostChangesError):
            await waiting
        store.release()

    run(store, story)


def test_late_persist_of_forgotten_set_is_lost() -> None:
    """A `persist` that arrives after its checkpoint was given up returns no handle, although the set was durable."""

    async def story(parts: Parts) -> None:
        ref = parts.intake.append(segment(), preemptive=False)
        await parts.persister.persist_claimed("job", [ref])
        await parts.checkpointer.abort("job", 0, 1)
        with pytest.raises(LostChangesError):
            await parts.persister.persist_claimed("job", [ref])

    run(MemoryStore(), story)


def test_repeated_open_leaves_last_epoch_highest() -> None:
    """If requests for a new epoch overlap, as after a lost connection, the last to arrive gets the highest."""

    async def story(parts: Parts) -> None:
        opening = [parts.opener.open("job", OpenJob(f"try {number}")) for number in range(5)]
        epochs = [answer.epoch for answer in await asyncio.gather(*opening)]
        assert epochs == sorted(epochs)
        await parts.checkpointer.begin("job", 0, epochs[-1])

    run(MemoryStore(), story)


@pytest.mark.parametrize("strange", ["other set", "other job's object", "twice"])
def test_strange_references_are_refused(strange: str) -> None:
    """A checkpoint names no set under another set's name, no object outside its job, and no set twice."""
    store = MemoryStore()

    async def story(parts: Parts) -> None:
        ref = parts.intake.append(segment(), preemptive=False)
        (handle,) = (await parts.persister.persist_claimed("job", [ref])).handles
        refs: Iterable[ChangeSetRef] = {
            "other set": [replace(ref, sqn=1, handle=handle.to_dict())],
            "other job's object": [replace(ref, handle={**handle.to_dict(), "object": "other/segments/host/1.seg"})],
            "twice": [ref, replace(ref, handle=handle.to_dict())],
        }[strange]
        with pytest.raises(InvalidInputError):
            await parts.checkpointer.complete("job", 0, request(*refs))

    run(store, story)
    assert uids(store) == []
