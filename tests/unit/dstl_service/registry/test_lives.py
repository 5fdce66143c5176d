"""A job created again under the name of a deleted one is safe from processes that served the deleted one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count

import pytest

from dstl_service.collection.garbage_collector import collect_garbage
from dstl_service.collection.job_deletion import delete_job, job_names
from dstl_service.collection.tombstones import Deletions
from dstl_service.formats.keys import EpochRecord, encode_job
from dstl_service.formats.manifest import ManifestKind
from dstl_service.registry.job_store import JobStore
from dstl_service.registry.lives import EPOCHS_OF_LIFE, Lives, first_epoch, life_folder, life_of
from storage.errors import ConflictError, CorruptDataError, FencedError, NotFoundError, UnavailableError
from storage.memory_store import MemoryStore
from storage.model import ObjectInfo
from storage.object_store import ObjectStore
from storage.testing import FakeClock, FakeIds, Fault, FaultKind, FaultyStore, RecordingStore
from tests.unit.dstl_service.http_life import service
from tests.unit.dstl_service.interleaving import Killed, PausingStore, kill
from tests.unit.dstl_service.job_history import JobHistory
from tests.waiting import wait_until

DAY_MS = 86_400_000


@pytest.fixture
def first() -> JobHistory:
    """Return a history whose job has three checkpoints, a savepoint and an orphan."""
    history = JobHistory()
    for number in range(3):
        history.complete(history.object(number))
    history.jobs.make_savepoint("kept", None)
    history.object(1)
    return history


def created_anew(first: JobHistory) -> JobHistory:
    """Return a history in which another job has the name: as many checkpoints, a savepoint of the same name."""
    second = JobHistory(first.store, host=2)
    for number in range(3):
        second.complete(second.object(number), kind=ManifestKind.COMPLETE if number == 2 else ManifestKind.DELTA)
    second.jobs.make_savepoint("kept", None)
    return second


def objects_of(store: ObjectStore) -> dict[str, bytes]:
    """Return all objects below the job's name."""
    return {info.key: store.get(info.key) for info in store.list("job/")}


class BodylessStore(MemoryStore):
    """A store behind a proxy that answers each HEAD below a prefix with 404."""

    def head(self, key: str) -> ObjectInfo:
        """Deny that the object exists."""
        if key.startswith("@"):
            raise NotFoundError(f"object {key} does not exist", key=key)
        return super().head(key)


def test_end_of_a_life_is_read() -> None:
    """I11: a proxy's wrong HEAD does not revive a life that has ended; objects of the next life are not deleted."""
    lives = Lives(BodylessStore(), "job")
    for life in range(3):
        lives.end(life)

    assert lives.current() == 3
    assert lives.has_ended(2)


def paused_everywhere(first: JobHistory, prepare: Callable[[ObjectStore], Callable[[], object]]) -> int:
    """
    Pause the action once at each of its calls, while the job is deleted and created again.

    Whatever the action does afterwards, all objects of the new job stay unchanged.
    """
    before = {info.key: first.store.get(info.key) for info in first.store.list("")}
    call = 0
    while True:
        store = copied(first, before)
        first.store = store
        anew: dict[str, bytes] = {}

        def begin_again(store: MemoryStore = store, anew: dict[str, bytes] = anew) -> None:
            there = Deletions(store, first.clock, FakeIds(7))
            found = there.of("job")
            there.collect(found if found is not None else there.bury("job", "ann", 0))
            created_anew(first)
            first.clock.advance(DAY_MS)
            anew.update(objects_of(store))

        paused = PausingStore(store)
        run = prepare(paused)
        paused.pause_before(paused.calls + call, begin_again)
        with suppress(
            NotFoundError, CorruptDataError, UnavailableError
        ):  # of the deleted job: it is gone, at least in part
            run()
        if not anew:
            return call
        left = objects_of(store)
        assert {key: left.get(key) for key in anew} == anew, f"paused before call {call}"
        assert JobStore(store, "job", first.clock, FakeIds(8)).newest() is not None
        call += 1


@pytest.mark.parametrize("ended", [0, 1, 2, 3, 7, 100, 1000])
def test_current_life_is_found_with_few_requests(ended: int) -> None:
    """However often a name was used, a few requests find its current life."""
    store = RecordingStore(MemoryStore())
    lives = Lives(store, "job")
    for life in range(ended):
        lives.end(life)
    store.clear()

    assert lives.current() == ended
    assert store.count("get") <= 1 + 2 * ended.bit_length()


def test_no_epoch_is_of_two_lives() -> None:
    """I4: epochs of a later life are all newer, and each names its life."""
    for life in (0, 1, 99_999):
        assert life_of(first_epoch(life)) == life_of(first_epoch(life) + EPOCHS_OF_LIFE - 2) == life
        assert first_epoch(life) + EPOCHS_OF_LIFE - 1 < first_epoch(life + 1)


def test_nothing_of_two_lives_has_one_key(first: JobHistory) -> None:
    """I11: no object of a deleted job and of a new one of its name share a folder."""
    before = objects_of(first.store)
    delete_job(first.store, "job", write=True)
    second = created_anew(first)

    assert not before.keys() & objects_of(second.store).keys()
    assert second.epoch == first_epoch(1)
    assert list(job_names(second.store)) == ["job"]


def test_who_deletes_and_slept_deletes_nothing_of_a_new_job(first: JobHistory) -> None:
    """I11: a deletion that was suspended at any call, for any time, leaves a new job of the name unchanged."""

    def prepare(store: ObjectStore) -> Callable[[], object]:
        deletions = Deletions(store, first.clock, FakeIds(5))
        tombstone = deletions.bury("job", "bob", 0)
        return lambda: deletions.collect(tombstone)

    assert paused_everywhere(first, prepare) > 15


def test_no_checkpoint_is_acknowledged_once_its_job_is_being_deleted(first: JobHistory) -> None:
    """
    I4: a query that runs while its job is deleted completes no checkpoint of which a part is gone.

    The process that buried the job died before the query was fenced. After the end of the life no batch begins.
    """
    before = {info.key: first.store.get(info.key) for info in first.store.list("")}
    acknowledged: list[bool] = []
    for call in count():
        store = copied(first, before)
        paused = PausingStore(store)
        deletions = Deletions(paused, first.clock, FakeIds(5))
        tombstone = deletions.bury("job", "bob", 0)
        driver = JobStore(store, "job", first.clock, FakeIds(6))
        driver.open(None)
        paused.pause_before(paused.calls + call, partial(run_on, first, driver, store, acknowledged))
        deletions.collect(tombstone)
        assert list(store.list("job/")) == []
        if len(acknowledged) == call:
            break
    assert set(acknowledged) == {True, False}


def copied(first: JobHistory, objects: dict[str, bytes]) -> MemoryStore:
    """Return a store with these objects."""
    store = MemoryStore(clock=first.clock)
    for key, data in objects.items():
        store.put(key, data)
    return store


def run_on(first: JobHistory, driver: JobStore, store: MemoryStore, acknowledged: list[bool]) -> None:
    """Run another batch of a query; record whether its checkpoint was acknowledged, which must then be whole."""
    acknowledged.append(False)
    if driver.has_ended():
        return
    assert first.newest is not None
    delta = replace(first.newest, id=3, generation=0, uid="late", base=first.newest.ref, segments=())
    with suppress(FencedError):
        driver.create_manifest(delta)
        acknowledged[-1] = True
        named = {handle.object_key for one in driver.chain(delta.ref) for handle in one.segments}
        assert named <= {info.key for info in store.list("job/segments/")}, f"paused before call {len(acknowledged)}"


def test_who_deletes_and_is_killed_leaves_what_the_next_one_deletes(first: JobHistory) -> None:
    """I12: wherever a deletion stops, also after the end of the life, the next one deletes all that is left."""
    before = {info.key: first.store.get(info.key) for info in first.store.list("")}
    for call in count():
        store = copied(first, before)
        paused = PausingStore(store)
        deletions = Deletions(paused, first.clock, FakeIds(5))
        tombstone = deletions.bury("job", "bob", 0)
        paused.pause_before(paused.calls + call, kill)
        try:
            deletions.collect(tombstone)
        except Killed:
            Deletions(store, first.clock, FakeIds(6)).collect_expired()
        else:
            assert call > 15
            break
        assert [info.key for info in store.list("") if not info.key.startswith(("@fates/", "@lives/"))] == []


def test_collector_of_a_deleted_job_deletes_nothing_of_a_new_one(first: JobHistory) -> None:
    """I11: a garbage collector that was suspended at any call treats nothing of a new job as an orphan."""

    def prepare(store: ObjectStore) -> Callable[[], object]:
        jobs = JobStore(store, "job", first.clock, FakeIds(5))
        jobs.open(None)
        first.clock.advance(DAY_MS)
        return lambda: collect_garbage(store, jobs, "job", first.clock, checkpoints_max=1)

    assert paused_everywhere(first, prepare) > 15


def test_collector_is_not_misled_by_what_was_put_late(first: JobHistory) -> None:
    """I11: a late checkpoint by a driver of the deleted job does not orphan objects that the new job names."""
    delete_job(first.store, "job", write=True)
    second = created_anew(first)
    first.complete(first.object(3), kind=ManifestKind.COMPLETE)
    first.clock.advance(DAY_MS)
    before = objects_of(second.store)

    with pytest.raises(NotFoundError, match="was deleted"):
        first.collect(checkpoints_max=1)
    assert objects_of(second.store) == before


def test_who_creates_a_job_and_slept_creates_it_in_the_current_life() -> None:
    """I4: a job that is created while another one of the name is created and deleted is a new one."""
    store = MemoryStore()
    paused = PausingStore(store)

    def come_and_go() -> None:
        JobHistory(store)
        delete_job(store, "job", write=True)

    paused.pause_at("put", "job/job.json", come_and_go)
    jobs = JobStore(paused, "job", FakeClock(), FakeIds(1))
    jobs.open(None)

    assert jobs.claim("late")[0] == first_epoch(1)
    assert [info.key for info in store.list("job/") if info.key.endswith("job.json")] == [
        f"{life_folder('job', 1)}/job.json"
    ]


def test_job_that_was_opened_stays_that_job(first: JobHistory) -> None:
    """A process's memory of a deleted job is never used for another one of its name."""
    delete_job(first.store, "job", write=True)
    created_anew(first)

    assert first.jobs.has_ended()
    with pytest.raises(NotFoundError, match="was deleted"):
        first.jobs.open(None)
    with pytest.raises(NotFoundError, match="was deleted"):
        first.jobs.check_not_ended()


def test_leftovers_are_deleted_of_no_job_that_is_created_meanwhile() -> None:
    """I11: the first process to create the job wins; objects of an existing job stay."""
    store = MemoryStore()
    store.put("job/segments/host/left.seg", b"left")
    paused = PausingStore(store)
    # No job begins beside them in this version; an earlier one did not look.
    paused.pause_at("put", "job/job.json", lambda: store.put("job/job.json", encode_job("f" * 32, 128)))
    deletions = Deletions(paused, FakeClock(), FakeIds(1))

    with pytest.raises(ConflictError, match="was created meanwhile"):
        deletions.clear("job", "ann", 128)
    assert deletions.of("job") is None
    assert list(job_names(store)) == ["job"]
    assert store.get("job/segments/host/left.seg") == b"left"


def test_life_has_only_so_many_epochs(first: JobHistory) -> None:
    """I4: an epoch that would belong to the next life is never begun."""
    last = first_epoch(1) - 2
    key = f"job/epochs/{first.epoch:020d}.json"
    record = replace(EpochRecord.decode(first.store.get(key), key), epoch=last)
    first.store.put(f"job/epochs/{last:020d}.json", record.encode())
    with pytest.raises(UnavailableError, match="another name"):
        JobStore(first.store, "job", FakeClock(), FakeIds(4)).claim("late")


def test_batch_that_begins_after_a_deletion_is_acknowledged_to_nobody() -> None:
    """I3: the query of a deleted job learns of it with its next batch, and completes no checkpoint."""
    store = MemoryStore()
    with service(store) as life:
        life.open()
        base = life.complete(0, None, life.append())
        delete_job(store, "job", write=True)

        life.begin(1)
        refused = life.complete_raw(1, base)
        again = life.append_raw(checkpoint_id=1)

        assert (refused.status_code, again.status_code) == (404, 404)
        assert "was deleted" in again.json()["message"]
        assert list(store.list("job/")) == []


def test_store_that_does_not_tell_of_a_deletion_is_asked_until_it_does() -> None:
    """I3: while the store cannot say whether the job still exists, no checkpoint of it is acknowledged."""
    store = FaultyStore(MemoryStore())
    with service(store) as life:
        life.open()
        base = life.complete(0, None, life.append())
        delete_job(store, "job", write=True)

        store.inject(Fault("get", FaultKind.FAIL_BEFORE, "@lives/*", times=None))
        life.begin(1)
        answers = [life.complete_raw(1, base).status_code for _ in range(2)]
        store.heal()
        answers.append(life.complete_raw(1, base).status_code)

        assert answers == [503, 503, 404]
        assert list(store.list("job/")) == []


def test_sidecar_forgets_the_sets_of_a_deleted_job() -> None:
    """I12: a sidecar that knows the epoch of a deleted job accepts at most one more set of it, and says why."""
    store = MemoryStore()
    with service(store) as coordinator, service(store) as sidecar:
        coordinator.open()
        sidecar.epoch = coordinator.epoch
        sidecar.append()
        delete_job(store, "job", write=True)

        def is_refused() -> bool:
            answer = sidecar.append_raw(checkpoint_id=1)
            return bool(answer.status_code == 404 and "was deleted" in answer.json()["message"])

        wait_until(is_refused, what="the sidecar to look")


@pytest.mark.parametrize("knows_the_job", [False, True])
def test_sidecar_of_a_deleted_job_holds_nothing_of_the_new_one(*, knows_the_job: bool) -> None:
    """I5: a sidecar neither returns nor stores sets of a deleted job for the new one of its name."""
    store = MemoryStore()
    with service(store) as coordinator, service(store) as sidecar:
        coordinator.open()
        sidecar.epoch = coordinator.epoch
        ref = sidecar.append(b"former")
        if knows_the_job:
            sidecar.client.get(sidecar.path)
        delete_job(store, "job", write=True)
        coordinator.open()

        sidecar.epoch = coordinator.epoch
        of_the_new = {**ref, "epoch": coordinator.epoch}
        assert sidecar.persist(of_the_new).json()["kind"] == "lost_changes"
        asked = {"epoch": coordinator.epoch, "refs": [of_the_new]}
        assert sidecar.client.post(f"{sidecar.path}/read", json=asked).json()["kind"] == "lost_changes"
        taken = sidecar.append(b"new")
        (handle,) = sidecar.persist(taken).json()["handles"]
        made = coordinator.complete(0, None, {**taken, "handle": handle})
        assert sidecar.restore(made) == (True, [b"new"])


@pytest.mark.parametrize("how", ["refused", "epoch"])
def test_job_is_opened_anew_where_only_the_life_of_the_former_one_is_known(how: str) -> None:
    """A service that refused to open a job, or only learned an epoch of it, opens the next one of the name."""
    store = MemoryStore()
    with service(store) as coordinator, service(store) as other:
        coordinator.open()
        other.epoch = coordinator.epoch
        wanted = {"owner": "test", "max_parallelism": 7}
        if how == "refused":
            assert other.client.post(f"{other.path}/epochs", json=wanted).json()["kind"] == "invalid_input"
        else:
            other.append()
        delete_job(store, "job", write=True)

        answer = other.client.post(f"{other.path}/epochs", json=wanted)
        assert (answer.status_code, answer.json()["epoch"]) == (200, first_epoch(1))
