"""
Savepoints on a mounted file system that serves listings and absent names from a cache.

A failure means that a deletion misses a savepoint made on another host, which then cannot be restored.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from threading import Thread

import pytest

from dstl_service.collection.garbage_collector import ORPHAN_AGE_MIN_MS, collect_garbage
from dstl_service.collection.retention import Deletion
from dstl_service.collection.subsumed_deletion import delete_subsumed
from dstl_service.formats.manifest import Manifest, ManifestKind, object_keys
from dstl_service.registry.hints import write_hint
from dstl_service.registry.job_store import JobStore
from dstl_service.registry.lives import LifeFolder
from dstl_service.registry.savepoint_register import SavepointRegister
from storage.errors import CorruptDataError, NotFoundError, UnavailableError
from storage.memory_store import MemoryStore
from storage.object_store import ObjectStore
from storage.testing import FakeIds, RecordingStore
from tests.unit.dstl_service.interleaving import CachedStore, Killed, PausingStore, kill
from tests.unit.dstl_service.job_history import JobHistory
from tests.unit.dstl_service.samples import opened, registered

Act = Callable[[], object]


def subsumed_history(*, is_begun: bool) -> JobHistory:
    """Return a job whose first checkpoint is subsumed but still stored."""
    history = JobHistory()
    history.complete(history.object(0), kind=ManifestKind.COMPLETE)
    if is_begun:
        history.jobs.make_savepoint("before", None)
        history.jobs.savepoints.delete("before")
    history.compact(history.object(1))
    history.clock.advance(100 * ORPHAN_AGE_MIN_MS)
    return history


def collector(history: JobHistory, view: ObjectStore) -> Act:
    """Return a function that collects the job's garbage as a host with this view does."""
    jobs = JobStore(view, "job", history.clock, FakeIds(5))
    jobs.open(None)
    return lambda: collect_garbage(view, jobs, "job", history.clock, checkpoints_max=1)


def coordinator(history: JobHistory, view: ObjectStore) -> Act:
    """Return a function that deletes the subsumed checkpoint as a coordinator with this view does."""
    jobs = JobStore(view, "job", history.clock, FakeIds(5))
    jobs.open(None)
    first, newest = jobs.completed()
    keys = frozenset(object_keys(first)) - frozenset(object_keys(newest))
    due = [Deletion(0, (first.ref,), keys)]
    return lambda: delete_subsumed(view, jobs, due, [newest.ref], history.epoch)


def run(act: Act) -> bool:
    """Do something that may be refused; return whether it succeeded."""
    try:
        act()
    except (NotFoundError, UnavailableError):
        return False
    return True


def check_kept(history: JobHistory) -> None:
    """Fail if an object that the savepoint names is gone."""
    stored = {info.key for info in history.store.list("job/")}
    assert object_keys(opened(history.store, host=8).savepoints.load("kept")) <= stored


@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize("is_maker_old", [False, True])
@pytest.mark.parametrize("deleter", [collector, coordinator])
@pytest.mark.parametrize("paused_one", ["deleter", "maker"])
def test_savepoint_is_seen_though_listings_are_old(
    paused_one: str, deleter: Callable[[JobHistory, ObjectStore], Act], *, is_maker_old: bool, is_begun: bool
) -> None:
    """I11: with one of the two paused at any call while the other runs, a reported savepoint stays whole."""
    made = 0
    for call in count():
        history = subsumed_history(is_begun=is_begun)
        view = CachedStore(history.store)
        of_maker = CachedStore(history.store) if is_maker_old else PausingStore(history.store)
        delete = deleter(history, view)
        maker, first = opened(of_maker, host=2), next(history.jobs.completed())
        save = partial(maker.keep, "kept", first)
        results: dict[str, bool] = {}

        def other(act: Act, name: str, results: dict[str, bool] = results) -> None:
            results[name] = run(act)

        paused, goes_on, runs = (view, delete, save) if paused_one == "deleter" else (of_maker, save, delete)
        names = ("maker", "deleter") if paused_one == "deleter" else ("deleter", "maker")
        paused.pause_before(paused.calls + call, partial(other, runs, names[0]))
        other(goes_on, names[1])
        if names[0] not in results:
            break
        if results["maker"]:
            made += 1
            check_kept(history)
        # It is collected in the end: after the cache's time, the next collection continues.
        history.collect(checkpoints_max=1)
        if results["maker"]:
            check_kept(history)
    assert call > 5
    assert made or paused_one == "maker"  # otherwise its checkpoint was deleted before its last check


def test_register_knows_what_is_there_now() -> None:
    """Names are added, removed and added again; each process sees the same, wherever it starts to read."""
    store = MemoryStore()
    one, other = (SavepointRegister(store, LifeFolder(store, "job")) for _ in range(2))
    for number in range(5):
        one.add(f"s{number}")
        other.add("again")
        other.remove("again")
    other.remove("s1")
    other.remove("none")

    assert registered(one) == registered(other) == {"s0", "s2", "s3", "s4"}
    assert registered(SavepointRegister(store, LifeFolder(store, "job"))) == registered(one)


def test_entry_of_who_died_is_finished() -> None:
    """A process that dies before any call of an entry does not prevent others from making the next entry."""
    for call in count():
        store = MemoryStore()
        paused = PausingStore(store)
        paused.pause_before(call, kill)
        with suppress(Killed):
            SavepointRegister(paused, LifeFolder(paused, "job")).add("first")
        SavepointRegister(store, LifeFolder(store, "job")).add("second")

        names = registered(SavepointRegister(store, LifeFolder(store, "job")))
        assert "second" in names
        if paused.calls <= call:
            assert names == {"first", "second"}
            break


def test_who_was_paused_takes_nothing_back() -> None:
    """An entry that is put late, before any of its calls, changes nothing of the later entries."""
    for call in count():
        store = MemoryStore()
        paused = PausingStore(store)

        def others(store: MemoryStore = store) -> None:
            register = SavepointRegister(store, LifeFolder(store, "job"))
            for name in ("second", "third"):
                register.add(name)
            register.remove("second")

        paused.pause_before(call, others)
        SavepointRegister(paused, LifeFolder(paused, "job")).add("first")
        if paused.calls <= call:
            break
        assert registered(SavepointRegister(store, LifeFolder(store, "job"))) == {"first", "third"}


def test_threads_make_entries_at_once() -> None:
    """No name is lost when many are put on the register concurrently."""
    store = MemoryStore()
    registers = [SavepointRegister(store, LifeFolder(store, "job")) for _ in range(4)]
    threads = [Thread(target=register.add, args=(f"s{number}",)) for number, register in enumerate(registers * 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert registered(registers[0]) == {f"s{number}" for number in range(16)}


def test_register_costs_a_collection_one_request() -> None:
    """A process that has read the register once reads one object, however many savepoints were made and deleted."""
    store = RecordingStore(MemoryStore())
    history = JobHistory(store)
    history.complete(history.object(0))
    for number in range(20):
        history.jobs.make_savepoint(f"s{number}", None)
        history.jobs.savepoints.delete(f"s{number}")
    jobs = opened(store, host=2)
    registered(jobs.savepoints.register)
    store.clear()

    jobs.savepoints.object_keys()
    assert [call.operation for call in store.calls] == ["list", "get"]


def test_dry_run_begins_no_register() -> None:
    """Reading the register needs no permission to write."""
    history = JobHistory()
    history.complete(history.object(0))
    history.collect(dry_run=True)

    assert list(history.store.list("job/savepoints-made/")) == []


def test_lost_savepoint_is_taken_off_the_register() -> None:
    """A savepoint that was removed manually stops deletions, with an error that says what to do."""
    history = subsumed_history(is_begun=True)
    history.jobs.make_savepoint("lost", None)
    history.store.delete([info.key for info in history.store.list("job/savepoints/")])
    with pytest.raises(UnavailableError, match="savepoints --delete lost"):
        history.collect()

    history.jobs.savepoints.delete("lost")
    history.collect()
    with pytest.raises(NotFoundError):
        history.jobs.savepoints.delete("lost")


def delete_all(jobs: JobStore) -> None:
    """Delete all listed savepoints and pins."""
    for name in jobs.savepoints.names():
        jobs.savepoints.delete(name)


def test_maker_that_dies_leaves_no_name_of_a_deleted_savepoint() -> None:
    """I12: a call that is paused anywhere while its savepoint is deleted, and dies later, stops no collection."""
    for call in count():
        for later in count(1):
            history = subsumed_history(is_begun=True)
            first = next(history.jobs.completed())
            view = PausingStore(history.store)
            maker, deleter = opened(view, host=2), opened(history.store, host=3)
            begun = view.calls
            view.pause_before(begun + call, partial(delete_all, deleter))
            view.pause_before(begun + call + later, kill)
            with suppress(Killed):
                run(partial(maker.keep, "kept", first))
            savepoints = opened(history.store, host=4).savepoints
            assert registered(savepoints.register) <= set(savepoints.names())
            history.collect(checkpoints_max=1)
            if view.calls <= begun + call + later:
                break
        if later == 1:
            break
    assert call > 10


def test_damaged_entry_ends_the_collection() -> None:
    """I11: while it is unknown which savepoints exist, nothing is deleted."""
    history = subsumed_history(is_begun=True)
    newest = max(info.key for info in history.store.list("job/savepoints-made/"))
    history.store.put(newest, b"[")

    with pytest.raises(CorruptDataError, match="claim"):
        history.collect()


@pytest.mark.parametrize("content", [b"[", b"", b'{"names": []', b'{"names": 1}'])
def test_damaged_entry_is_read_from_its_claim(content: bytes) -> None:
    """I11: a partly written entry is read from its claim."""
    history = subsumed_history(is_begun=True)
    history.jobs.make_savepoint("kept", None)
    claim = max(info.key for info in history.store.list("job/savepoints-made/") if info.key.endswith(".claim"))
    history.store.put(claim.replace(".claim", ".json"), content)

    assert registered(opened(history.store, host=2).savepoints.register) == {"kept"}
    history.collect(checkpoints_max=1)
    opened(history.store, host=3).make_savepoint("second", None)
    assert registered(opened(history.store, host=4).savepoints.register) == {"kept", "second"}


@pytest.mark.parametrize("paused_one", ["maker", "deleter"])
def test_savepoint_that_is_made_and_deleted_at_once_holds_nobody_up(paused_one: str) -> None:
    """I12: with one of the two paused at any call, the register names no savepoint afterwards that does not exist."""

    def delete(jobs: JobStore, _: Manifest) -> bool:
        return run(lambda: jobs.savepoints.delete("kept"))

    def save(jobs: JobStore, checkpoint: Manifest) -> bool:
        return run(lambda: jobs.keep("kept", checkpoint))

    goes_on, others = (save, [delete]) if paused_one == "maker" else (delete, [delete, save])

    def meanwhile(jobs: JobStore, checkpoint: Manifest) -> None:
        for act in others:
            act(jobs, checkpoint)

    for call in count():
        history = subsumed_history(is_begun=True)
        first = next(history.jobs.completed())
        if paused_one == "deleter":
            history.jobs.keep("kept", first)
        view = PausingStore(history.store)
        of_one, of_other = opened(view, host=2), opened(history.store, host=3)
        calls = view.calls
        view.pause_before(calls + call, partial(meanwhile, of_other, first))
        goes_on(of_one, first)
        if view.calls <= calls + call:
            break
        savepoints = opened(history.store, host=4).savepoints
        assert registered(savepoints.register) <= set(savepoints.names())
        history.collect(checkpoints_max=1)
    assert call > 5


def test_register_goes_on_where_a_copy_lacks_its_end() -> None:
    """A folder that was copied while a savepoint was made may lack the number after the last entry."""
    history = subsumed_history(is_begun=True)
    history.jobs.make_savepoint("kept", None)
    end = max(info.key for info in history.store.list("job/savepoints-made/"))
    history.store.delete([end])

    jobs = opened(history.store, host=2)
    jobs.make_savepoint("second", None)
    assert registered(jobs.savepoints.register) == {"kept", "second"}
    history.collect(checkpoints_max=1)


@pytest.mark.parametrize("hint", range(5))
def test_wrong_hint_hides_no_savepoint(hint: int) -> None:
    """I11: a copy may have a hint that is newer than its register, whose last entry is empty."""
    history = JobHistory()
    register = SavepointRegister(history.store, LifeFolder(history.store, "job"))
    for name in ("a", "b"):
        register.add(name)
    write_hint(history.store, "job", "savepoints", hint)

    assert registered(SavepointRegister(history.store, LifeFolder(history.store, "job"))) == {"a", "b"}
