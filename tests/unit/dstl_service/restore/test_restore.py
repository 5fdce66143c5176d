"""The part of the log that a table lacks, and how it is read."""

from __future__ import annotations

import pytest

from dstl_service.checkpoints.rewind import rewind
from dstl_service.formats.manifest import Manifest, ManifestKind, is_complete_due, state_up_to
from dstl_service.registry.job_store import JobStore
from dstl_service.restore import plan
from dstl_service.restore.plan import RestorePlan, plan_restore, read_handles
from dstl_service.restore.read_ahead import SMALL_EACH, ReadAhead
from dstl_service.restore.segment_cache import PLACE_BYTES, SegmentCache
from dstl_service.wire import CheckpointRef
from storage.errors import CorruptDataError, NotFoundError
from storage.key_groups import KeyGroupRange
from storage.memory_store import MemoryStore
from storage.model import SegmentHandle
from storage.object_store import ObjectStore
from storage.testing import FakeIds, RecordingStore
from tests.unit.dstl_service.samples import manifest, opened, segment, stored
from tests.waiting import wait_until

GROUPS = KeyGroupRange(0, 9)


class History:
    """A job with checkpoints, each of which added one set for partition 0 and one for partition 1."""

    def __init__(self, count: int) -> None:
        self.store = RecordingStore(MemoryStore())
        self.jobs: JobStore = opened(self.store)
        self.epoch, _ = self.jobs.claim("owner")
        self.made: list[Manifest] = []
        for checkpoint_id in range(count):
            self.made.append(self.add(checkpoint_id, self.made[-1] if self.made else None))

    def add(self, checkpoint_id: int, base: Manifest | None, uid: str = "") -> Manifest:
        """Complete a checkpoint on `base`, as the service does."""
        sets = [
            segment(
                payload=f"{uid}{checkpoint_id}/{partition}".encode(), checkpoint_id=checkpoint_id, partition=partition
            )
            for partition in (0, 1)
        ]
        handles = stored(self.store, sets, f"job/segments/host/{uid}{checkpoint_id}.seg")
        complete, earlier = is_complete_due(checkpoint_id), []
        if complete and base is not None:
            chain = list(self.jobs.chain(base.ref))
            length = next((n for n, step in enumerate(chain, 1) if step.kind is ManifestKind.COMPLETE), len(chain))
            earlier = state_up_to(chain[:length]).log
        created, _ = self.jobs.create_manifest(
            manifest(
                checkpoint_id,
                self.epoch,
                base.ref if base else None,
                uid=f"{uid}u{checkpoint_id}",
                job_uid=self.jobs.job_uid,
                segments=handles,
                earlier=earlier,
                kind=ManifestKind.COMPLETE if complete else ManifestKind.DELTA,
            )
        )
        return created

    def plan(self, have: CheckpointRef | None, want: CheckpointRef, key_groups: KeyGroupRange = GROUPS) -> RestorePlan:
        """Plan with a new process."""
        return plan_restore(opened(self.store, host=9), "op", key_groups, have, want)


def ids_of(plan: RestorePlan) -> list[int]:
    """Return the checkpoints of a plan's handles."""
    return [handle.entry.id.checkpoint_id for handle in plan.handles]


@pytest.mark.parametrize("count", [1, 2, 20, 21, 45])
def test_empty_table_gets_whole_log(count: int) -> None:
    """A table without a version gets the whole log, each set once and oldest first, across complete manifests too."""
    history = History(count)
    plan = history.plan(None, history.made[-1].ref)

    assert plan.is_full
    assert ids_of(plan) == list(range(count))


@pytest.mark.parametrize(("have", "want"), [(0, 1), (3, 9), (18, 22), (5, 44), (20, 21), (19, 20)])
def test_older_table_gets_difference(have: int, want: int) -> None:
    """A table at an ancestor gets only the log since then, across complete manifests too."""
    history = History(45)
    plan = history.plan(history.made[have].ref, history.made[want].ref)

    assert not plan.is_full
    assert ids_of(plan) == list(range(have + 1, want + 1))


def test_current_table_gets_nothing() -> None:
    """A table that is already at the checkpoint needs no set and must not be emptied."""
    history = History(3)

    assert history.plan(history.made[2].ref, history.made[2].ref) == RestorePlan(False, GROUPS, [])


@pytest.mark.parametrize("have", [CheckpointRef(1, 7, "x"), CheckpointRef(1, 0, "x"), CheckpointRef(40, 0, "x")])
@pytest.mark.parametrize("count", [3, 25])
def test_foreign_table_gets_whole_log(have: CheckpointRef, count: int) -> None:
    """I14: a table whose version is not on the chain is emptied and gets the whole log."""
    history = History(count)
    plan = history.plan(have, history.made[-1].ref)

    assert plan.is_full
    assert ids_of(plan) == list(range(count))


def test_other_generation_gets_whole_log() -> None:
    """I2: a table at a checkpoint that a rewind discarded is emptied for the new checkpoint of this id."""
    history = History(2)
    replaced = history.made[1]
    rewind(history.jobs, "job", FakeIds(9), checkpoint_id=0, write=True)
    history.epoch, latest = history.jobs.claim("next")
    repeated = history.add(1, latest, uid="again")
    plan = history.plan(replaced.ref, repeated.ref)

    assert plan.is_full
    assert [handle.object_key for handle in plan.handles] == ["job/segments/host/0.seg", "job/segments/host/again1.seg"]


def test_table_ahead_gets_whole_log() -> None:
    """A table that is ahead of the checkpoint cannot go back, so it is emptied."""
    history = History(30)
    plan = history.plan(history.made[29].ref, history.made[25].ref)

    assert plan.is_full
    assert ids_of(plan) == list(range(26))


def test_missing_checkpoint_is_not_found() -> None:
    """A restore to a checkpoint that does not exist is refused."""
    with pytest.raises(NotFoundError):
        History(2).plan(None, CheckpointRef(1, 0, "nobody"))


def test_full_plan_reads_few_manifests() -> None:
    """A plan for an empty table reads manifests back to the last complete one only."""
    history = History(45)
    fresh = opened(history.store, host=9)
    history.store.clear()
    plan_restore(fresh, "op", GROUPS, None, history.made[44].ref)

    assert history.store.count("get", "job/checkpoints/*") == 5


def test_lost_ancestor_falls_back_to_whole_log() -> None:
    """A table whose next manifests are deleted gets the whole log from the last complete manifest."""
    history = History(45)
    history.store.delete([f"job/checkpoints/{0:020d}.000001.json", f"job/checkpoints/{3:020d}.000000.json"])
    plan = history.plan(history.made[1].ref, history.made[44].ref)

    assert plan.is_full
    assert ids_of(plan) == list(range(45))


def test_rescaled_table_gets_all_overlaps() -> None:
    """I14: a table of other key groups gets the sets of all partitions that owned some of them."""
    history = History(2)
    plan = history.plan(None, history.made[1].ref, KeyGroupRange(5, 14))

    assert [(handle.entry.id.checkpoint_id, handle.entry.id.partition) for handle in plan.handles] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]


def payloads_of(history: History, plan: RestorePlan, cache: SegmentCache) -> list[tuple[SegmentHandle, bytes]]:
    """Read a plan with an empty or given cache."""
    return [(handle, bytes(payload)) for handle, payload in read_handles(plan.handles, history.store, cache)]


def test_payloads_come_in_order() -> None:
    """The payloads of a plan are yielded with their handles, in the order of the plan."""
    history = History(3)
    plan = history.plan(None, history.made[2].ref)

    assert payloads_of(history, plan, SegmentCache(10_000)) == [
        (handle, f"{number}/0".encode()) for number, handle in enumerate(plan.handles)
    ]
    assert plan.size_bytes == 9


def test_only_named_objects_are_read() -> None:
    """I2: objects that the checkpoint does not name are never read, whatever they hold."""
    history = History(2)
    history.store.put("job/segments/host/zombie.seg", b"nonsense")
    history.store.clear()
    plan = history.plan(None, history.made[1].ref)
    payloads_of(history, plan, SegmentCache(10_000))

    assert set(history.store.keys("get", "job/segments/*")) == {"job/segments/host/0.seg", "job/segments/host/1.seg"}


def test_cached_payloads_are_not_read() -> None:
    """A cached payload costs no request; only the other payloads are read."""
    history = History(2)
    plan = history.plan(None, history.made[1].ref)
    cache = SegmentCache(10_000)
    cache.put(plan.handles[1], b"1/0")
    history.store.clear()

    assert [payload for _, payload in payloads_of(history, plan, cache)] == [b"0/0", b"1/0"]
    assert list(history.store.keys("get", "job/segments/*")) == ["job/segments/host/0.seg"]


def one_checkpoint(store: ObjectStore, objects: int) -> list[SegmentHandle]:
    """Return the handles of one checkpoint's sets, each in a separate object."""
    return [
        stored(store, [segment(payload=b"%d" % number, partition=number)], f"job/segments/host/{number}.seg")[0]
        for number in range(objects)
    ]


def test_objects_of_a_large_checkpoint_are_read_when_they_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory holds only the part of a large checkpoint that is being sent, even if it is all of one group."""
    monkeypatch.setattr(plan, "PART_BYTES_MAX", 0)
    store = RecordingStore(MemoryStore())
    handles = one_checkpoint(store, 3)

    seen = []
    for _, payload in read_handles(handles, store, SegmentCache(10_000)):
        seen.append((bytes(payload), store.count("get", "*.seg")))

    assert seen == [(b"0", 1), (b"1", 2), (b"2", 3)]


def test_log_is_read_ahead() -> None:
    """The objects of the next checkpoints are on their way while one is sent; each is read once, in any case."""
    store = RecordingStore(MemoryStore())
    handles = [
        stored(store, [segment(payload=b"%d" % number, checkpoint_id=number)], f"job/segments/host/{number}.seg")[0]
        for number in range(SMALL_EACH + 2)
    ]
    payloads = read_handles(handles, store, SegmentCache(10_000), ReadAhead(8))

    found = [next(payloads)]
    wait_until(lambda: store.count("get", "*.seg") >= SMALL_EACH, what="the requests of the next checkpoints")
    assert store.count("get", "*.seg") <= SMALL_EACH + 1
    found += payloads

    assert [bytes(payload) for _, payload in found] == [b"%d" % number for number in range(len(handles))]
    assert sorted(store.keys("get", "*.seg")) == sorted(handle.object_key for handle in handles)


def test_payload_that_memory_dropped_is_read() -> None:
    """A payload that is in memory when a restore begins, and evicted before its turn, is read from the store once."""
    store = RecordingStore(MemoryStore())
    handles = one_checkpoint(store, 3)
    cache = SegmentCache(10_000)
    for number in (1, 2):
        cache.put(handles[number], b"%d" % number)
    payloads = read_handles(handles, store, cache)

    found = [next(payloads)]
    cache.leave_room(10_000 - 1 - PLACE_BYTES)  # the most recently used one stays
    found += payloads

    assert [(handle, bytes(payload)) for handle, payload in found] == [
        (handle, b"%d" % number) for number, handle in enumerate(handles)
    ]
    assert list(store.keys("get", "*.seg")) == [handles[0].object_key, handles[1].object_key]
    assert (cache.hits, cache.misses) == (2, 1)


@pytest.mark.parametrize("damage", ["missing", "flipped", "cut"])
def test_damaged_object_is_reported(damage: str) -> None:
    """I10: a missing, damaged or truncated object is an error with its name, never a shorter or different log."""
    history = History(2)
    plan = history.plan(None, history.made[1].ref)
    key = "job/segments/host/1.seg"
    data = bytearray(history.store.get(key))
    data[plan.handles[1].entry.offset_bytes] ^= 1
    history.store.delete([key])
    if damage != "missing":
        history.store.put(key, bytes(data) if damage == "flipped" else bytes(data[:-1]))

    with pytest.raises(CorruptDataError, match=r"1\.seg"):
        payloads_of(history, plan, SegmentCache(10_000))
