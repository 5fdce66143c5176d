"""
Savepoints whose makers are paused or killed while other processes make and delete savepoints of the same name.

A failure means that a savepoint that was reported as made is overwritten or deleted by a call that decided earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count

import pytest

from dstl_service.collection.garbage_collector import ORPHAN_AGE_MIN_MS, collect_garbage
from dstl_service.formats.manifest import ManifestKind, encode_manifest, object_keys
from dstl_service.registry.job_store import JobStore
from dstl_service.registry.lives import LifeFolder
from dstl_service.registry.savepoint_register import SavepointRegister
from dstl_service.wire import CheckpointRef
from storage.errors import ConflictError, InvalidInputError, NotFoundError, UnavailableError
from storage.memory_store import MemoryStore
from storage.object_store import ObjectStore
from storage.testing import RecordingStore
from tests.unit.dstl_service.interleaving import CachedStore, Killed, PausingStore, kill
from tests.unit.dstl_service.job_history import JobHistory
from tests.unit.dstl_service.samples import opened, registered

MANIFESTS = "job/checkpoints/*"
REQUESTS_MAX = 14
REQUESTS_FIRST = 8
"""Additional calls for the first savepoint of a job, and of a process."""


class Kept:
    """A job whose first checkpoint is subsumed but still stored, and one maker of savepoints."""

    def __init__(self) -> None:
        self.history = JobHistory()
        self.history.complete(self.history.object(0), kind=ManifestKind.COMPLETE)
        self.history.compact(self.history.object(1))
        self.history.clock.advance(100 * ORPHAN_AGE_MIN_MS)
        self.first, self.newest = self.history.jobs.completed()
        self.store: ObjectStore = self.history.store
        self.view = PausingStore(self.store)
        self.maker = opened(self.view, host=2)
        self._opened = self.view.calls

    def pause(self, call: int, step: Callable[[], object]) -> None:
        """Run something before this call of the maker, counted from 0."""
        self.view.pause_before(self._opened + call, step)

    def has_reached(self, call: int) -> bool:
        """Return whether the maker has reached this call."""
        return self.view.calls > self._opened + call

    def other(self) -> JobStore:
        """Return the job as another process sees it."""
        return opened(self.store, host=3)

    def subsume(self, view: ObjectStore | None = None) -> None:
        """Collect the first checkpoint, as a host with this view does."""
        jobs = opened(view or self.store, host=5)
        collect_garbage(view or self.store, jobs, "job", self.history.clock, checkpoints_max=1)

    def check_whole(self, name: str = "kept") -> CheckpointRef:
        """Fail if an object that a savepoint names is gone; return which checkpoint the savepoint keeps."""
        found = opened(self.store, host=8).savepoints.load(name)
        assert object_keys(found) <= {info.key for info in self.store.list("job/")}
        return found.ref

    def names(self) -> list[str]:
        """Return the listed savepoints."""
        return opened(self.store, host=8).savepoints.names()

    def replace(self) -> None:
        """Delete the savepoint, if it exists, and make it of the newest checkpoint."""
        jobs = self.other()
        with suppress(NotFoundError):
            jobs.savepoints.delete("kept")
        jobs.keep("kept", self.newest)


def each_call(run: Callable[[Kept, int], object], calls_min: int = 12) -> Iterator[Kept]:
    """Yield a job for each call at which its maker can be paused, until the maker has no further call."""
    for call in count():
        kept = Kept()
        run(kept, call)
        yield kept
        if not kept.has_reached(call):
            break
    assert call > calls_min


def test_late_call_overwrites_no_other_savepoint() -> None:
    """I11: a maker that found the savepoint of its checkpoint does not touch a later savepoint of that name."""

    def run(kept: Kept, call: int) -> None:
        kept.history.jobs.keep("kept", kept.first)
        kept.pause(call, kept.replace)
        with suppress(ConflictError):
            kept.maker.keep("kept", kept.first)
        if not kept.has_reached(call):
            kept.replace()

    for kept in each_call(run, calls_min=3):
        kept.subsume()
        assert kept.check_whole() == kept.newest.ref
        assert kept.names() == ["kept"]


def test_who_finds_its_checkpoint_gone_deletes_no_other_savepoint() -> None:
    """I11: a maker paused at any call after reading its checkpoint does not touch a later savepoint of its name."""
    for call in count():
        kept = Kept()
        is_reached = False

        def reach(kept: Kept = kept) -> None:
            nonlocal is_reached
            is_reached = True
            kept.replace()

        def subsume(kept: Kept = kept, call: int = call, reach: Callable[[], None] = reach) -> None:
            kept.other().delete_manifests([kept.first.ref])
            kept.view.pause_before(kept.view.calls + call, reach)

        kept.view.pause_at("get", MANIFESTS, subsume)
        with pytest.raises(NotFoundError, match="subsumed"):
            kept.maker.keep("kept", kept.first)
        if not is_reached:
            assert kept.names() == []
            break
        assert kept.check_whole() == kept.newest.ref
        assert kept.names() == ["kept"]
    assert call > 3


@pytest.mark.parametrize("is_cached", [False, True])
def test_maker_that_dies_stops_no_collection(*, is_cached: bool) -> None:
    """I11, I12: a maker that dies before any call leaves listed savepoints whole, and they can be deleted."""

    def run(kept: Kept, call: int) -> None:
        registered(kept.history.jobs.savepoints.register)
        view = CachedStore(kept.store) if is_cached else None
        kept.pause(call, kill)
        with suppress(Killed):
            kept.maker.keep("kept", kept.first)
        with suppress(UnavailableError):
            kept.subsume(view)

    left = set()
    for kept in each_call(run):
        names = kept.names()
        for name in names:
            left.add(name.partition("@")[1])
            if name == "kept":
                kept.check_whole()
        kept.subsume()
        if "kept" in names:
            assert kept.check_whole() == kept.first.ref
        jobs = kept.other()
        while left_over := kept.names():
            with suppress(NotFoundError):  # its entry was being written, and makes it the savepoint
                jobs.savepoints.delete(left_over[0])
        kept.subsume()
        assert not object_keys(kept.first) & {info.key for info in kept.store.list("job/")}
        assert registered(jobs.savepoints.register) == set()
        jobs.keep("next", kept.newest)
        assert registered(jobs.savepoints.register) == {"next"}
    assert left == {"", "@"}


def test_who_comes_after_one_that_died_makes_it() -> None:
    """If a maker died before any call, the same call succeeds, and its savepoint is whole after a collection."""

    def run(kept: Kept, call: int) -> None:
        kept.pause(call, kill)
        with suppress(Killed):
            kept.maker.keep("kept", kept.first)

    for kept in each_call(run):
        kept.other().keep("kept", kept.first)
        for name in kept.names():
            if name != "kept":
                kept.other().savepoints.delete(name)
        kept.subsume()
        assert kept.check_whole() == kept.first.ref


@pytest.mark.parametrize("is_deleted", [False, True])
@pytest.mark.parametrize("is_same", [False, True])
def test_two_makers_of_one_name(*, is_same: bool, is_deleted: bool) -> None:
    """I3, I11: with a maker paused at any call, both savepoints are whole; the name has one of two checkpoints."""

    def make(kept: Kept, jobs: JobStore, made: list[CheckpointRef], *, is_first: bool) -> None:
        with suppress(ConflictError):
            made.append(jobs.keep("kept", kept.first if is_first else kept.newest).ref)

    def run(kept: Kept, call: int) -> None:
        made: list[CheckpointRef] = []

        def others() -> None:
            jobs = kept.other()
            make(kept, jobs, made, is_first=is_same)
            if is_deleted:
                with suppress(NotFoundError):
                    jobs.savepoints.delete("kept")
                    made.clear()
                make(kept, jobs, made, is_first=is_same)

        kept.pause(call, others)
        make(kept, kept.maker, made, is_first=True)
        if not kept.has_reached(call):
            others()
        kept.subsume()
        assert kept.check_whole() in made
        assert is_same or is_deleted or len(made) == 1

    for kept in each_call(run):
        assert kept.names() == ["kept"]
        assert registered(kept.other().savepoints.register) == {"kept"}


def test_deletion_that_is_late_deletes_no_other_savepoint() -> None:
    """I11: a paused deletion of a savepoint spares the later savepoint of that name, which was made after a retry."""
    kept = Kept()
    kept.history.jobs.keep("kept", kept.first)
    kept.view.pause_at("delete", "job/savepoints/*", kept.replace)

    kept.maker.savepoints.delete("kept")

    assert kept.check_whole() == kept.newest.ref
    assert kept.names() == ["kept"]


def test_savepoint_is_deleted_while_it_is_made_again() -> None:
    """I11, I12: with one maker paused at any call, the savepoint is whole, and the register names it."""

    def run(kept: Kept, call: int) -> None:
        kept.history.jobs.keep("kept", kept.first)
        kept.pause(call, lambda: kept.other().savepoints.delete("kept"))
        kept.maker.keep("kept", kept.first)
        kept.subsume()

    for kept in each_call(run, calls_min=3):
        assert kept.names() == ["kept"]
        assert registered(kept.other().savepoints.register) == {"kept"}
        assert kept.check_whole() == kept.first.ref


@pytest.mark.parametrize("is_cached", [False, True])
def test_pin_that_is_taken_for_a_leftover(*, is_cached: bool) -> None:
    """I11: if a pin is deleted while its maker is paused, a savepoint that is reported as made is still whole."""
    made = 0

    def run(kept: Kept, call: int) -> None:
        nonlocal made
        registered(kept.history.jobs.savepoints.register)
        view = CachedStore(kept.store) if is_cached else None

        def others() -> None:
            jobs = kept.other()
            for name in jobs.savepoints.names():
                if "@" in name:
                    with suppress(NotFoundError):  # it has become the savepoint
                        jobs.savepoints.delete(name)
            with suppress(UnavailableError):
                kept.subsume(view)

        kept.pause(call, others)
        try:
            kept.maker.keep("kept", kept.first)
        except (NotFoundError, UnavailableError):
            return
        made += 1
        assert kept.check_whole() == kept.first.ref
        kept.subsume()
        assert kept.check_whole() == kept.first.ref

    for kept in each_call(run):
        assert [name for name in kept.names() if "@" in name] == []
    assert made > 3


def test_copied_savepoint_has_another_checkpoint_since() -> None:
    """I11: if the source of a copy is deleted, collected and made again meanwhile, the copy is refused or whole."""
    made = 0

    def run(kept: Kept, call: int) -> None:
        nonlocal made
        kept.history.jobs.keep("kept", kept.first)
        kept.subsume()

        def others() -> None:
            jobs = kept.other()
            jobs.savepoints.delete("kept")
            kept.subsume()
            jobs.keep("kept", kept.newest)

        kept.pause(call, others)
        try:
            copied = kept.maker.savepoints.copy("copy", "kept", "call")
        except NotFoundError:
            assert kept.names() == ["kept"]
            return
        made += 1
        assert kept.check_whole("copy") == copied.ref

    for kept in each_call(run):
        assert kept.check_whole() in (kept.first.ref, kept.newest.ref)
    assert made > 3


def test_same_call_again_changes_nothing() -> None:
    """The existing object stays unchanged, and nothing else is left."""
    kept = Kept()
    kept.maker.keep("kept", kept.first)
    before = [info.key for info in kept.store.list("job/savepoints")]

    assert kept.maker.keep("kept", kept.first).ref == kept.first.ref
    assert [info.key for info in kept.store.list("job/savepoints")] == before
    assert kept.names() == ["kept"]
    with pytest.raises(ConflictError, match="of checkpoint 0"):
        kept.maker.keep("kept", kept.newest)
    assert kept.names() == ["kept"]


def test_pins_are_no_savepoints_to_users() -> None:
    """The name of a pin cannot make, copy or restore anything; it can only be deleted."""
    kept = Kept()
    kept.view.pause_at("get", MANIFESTS, kill)
    with pytest.raises(Killed):
        kept.maker.keep("kept", kept.first)
    jobs = kept.other()
    ((pin, found),) = jobs.savepoints.all()
    assert (pin.partition("@")[0], found.ref) == ("kept", kept.first.ref)

    for use in (
        lambda: jobs.keep(pin, kept.first),
        lambda: jobs.savepoints.copy("copy", pin, "call"),
        lambda: jobs.savepoints.load(pin),
        lambda: jobs.savepoints.delete("a/b@c"),
        lambda: jobs.savepoints.delete("a@b@c"),
    ):
        with pytest.raises(InvalidInputError):
            use()
    jobs.savepoints.delete(pin)
    assert kept.names() == []
    with pytest.raises(NotFoundError):
        jobs.savepoints.delete(pin)


def test_name_is_given_once() -> None:
    """One entry turns a pin into the savepoint of its name; the second one removes the pin, or changes nothing."""
    store = MemoryStore()
    register, other = (SavepointRegister(store, LifeFolder(store, "job")) for _ in range(2))
    register.read()
    for one in ("kept@one", "kept@two", "kept@three"):
        store.put(f"job/savepoints/{one}.json", b"{}")
        register.add(one)
        assert one in registered(other)
    entries = len(list(store.list("job/savepoints-made/")))

    assert register.publish("kept@one", pytest.fail)
    assert registered(other) == {"kept", "kept@two", "kept@three"}
    assert len(list(store.list("job/savepoints-made/"))) == entries + 2
    assert not other.publish("kept@two", lambda there: there)
    assert registered(register) == {"kept", "kept@three"}
    with pytest.raises(ConflictError):
        other.publish("kept@three", kept_by_another)
    assert registered(register) == {"kept", "kept@three"}
    assert register.read().object_of("kept") == "kept@one"


def kept_by_another(there: str) -> None:
    """Refuse a savepoint of the name."""
    raise ConflictError(f"{there} is of another checkpoint")


def earlier(kept: Kept, name: str, entry: str | None) -> None:
    """Write a savepoint as an earlier version did, and the register with this entry, or none."""
    manifest = replace(kept.first, kind=ManifestKind.COMPLETE, kept_by="call")
    kept.store.put(f"job/savepoints/{name}.json", encode_manifest(manifest))
    if entry is not None:
        for number, content in enumerate((entry.encode(), b"{}")):
            kept.store.put(f"job/savepoints-made/{number:020}.json", content)


@pytest.mark.parametrize("entry", [None, '{"names": ["kept", "kept@call-1!"]}'])
def test_savepoint_of_an_earlier_version(entry: str | None) -> None:
    """It is listed, keeps its objects and its name, can be copied and deleted, and survives a late deletion."""
    kept = Kept()
    earlier(kept, "kept@call-1", None)
    earlier(kept, "kept", entry)
    kept.subsume()
    assert kept.check_whole() == kept.first.ref
    assert kept.names() == ["kept", "kept@call-1"]
    jobs = kept.other()
    assert jobs.keep("kept", kept.first).ref == kept.first.ref
    with pytest.raises(ConflictError):
        jobs.keep("kept", kept.newest)
    assert jobs.savepoints.copy("copy", "kept", "c0").ref == kept.first.ref
    jobs.savepoints.delete("copy")

    jobs.savepoints.delete("kept@call-1")
    kept.view.pause_at("delete", "job/savepoints/*", kept.replace)
    kept.maker.savepoints.delete("kept")
    assert kept.check_whole() == kept.newest.ref
    assert kept.names() == ["kept"]
    jobs.savepoints.delete("kept")
    assert kept.names() == []
    kept.subsume()
    assert not object_keys(kept.first) & {info.key for info in kept.store.list("job/")}


def test_savepoints_outlive_the_register() -> None:
    """If the register is lost, or was not copied, savepoints still have and keep their names."""
    kept = Kept()
    kept.maker.keep("kept", kept.first)
    kept.maker.keep("other", kept.newest)
    kept.store.delete([info.key for info in kept.store.list("job/savepoints-made/")])

    assert kept.names() == ["kept", "other"]
    assert list(kept.store.list("job/savepoints-made/")) == []
    kept.subsume()
    assert kept.check_whole() == kept.first.ref
    with pytest.raises(ConflictError):
        kept.other().keep("kept", kept.newest)
    kept.other().savepoints.delete("kept")
    assert kept.names() == ["other"]
    assert kept.check_whole("other") == kept.newest.ref


def test_deleter_that_dies_is_repeated() -> None:
    """If a deletion dies before any call, the same deletion succeeds, and nothing of the savepoint remains."""

    def run(kept: Kept, call: int) -> None:
        kept.history.jobs.keep("kept", kept.first)
        kept.pause(call, kill)
        with suppress(Killed):
            kept.maker.savepoints.delete("kept")

    for kept in each_call(run, calls_min=6):
        kept.subsume()
        with suppress(NotFoundError):
            kept.other().savepoints.delete("kept")
        assert kept.names() == []
        assert registered(kept.other().savepoints.register) == set()
        kept.subsume()
        assert not object_keys(kept.first) & {info.key for info in kept.store.list("job/")}


def test_other_checkpoint_at_its_place_is_none() -> None:
    """I11: a manifest at the checkpoint's place proves nothing unless it is the checkpoint's own."""
    kept = Kept()
    with pytest.raises(NotFoundError, match="subsumed"):
        kept.maker.keep("kept", replace(kept.first, uid="another"))
    assert kept.names() == []


def test_savepoint_costs_a_constant_number_of_requests() -> None:
    """The outcomes of `SavepointStore.create`."""
    kept = Kept()
    store = RecordingStore(kept.store)
    jobs = opened(store, host=6)
    store.clear()

    for name, count_max in ("first", REQUESTS_MAX + REQUESTS_FIRST), ("second", REQUESTS_MAX):
        jobs.keep(name, kept.first)
        assert len(store.calls) == count_max
        store.clear()
