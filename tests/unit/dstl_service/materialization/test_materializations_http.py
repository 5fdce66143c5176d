"""A materialization from the first request to the restore, as tasks and the driver see it over HTTP."""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dstl_service.checkpoints import checkpointer
from dstl_service.checkpoints.rewind import rewind
from dstl_service.collection.garbage_collector import collect_garbage
from dstl_service.formats.manifest import Manifest
from dstl_service.formats.under_way import Announcement, UnderWaySnapshot, uid_in_key
from dstl_service.materialization import materializer
from dstl_service.materialization.policy import MaterializationSettings
from dstl_service.registry.job_store import JobStore
from dstl_service.restore import download_cache
from dstl_service.settings import CacheSettings, GcSettings
from dstl_service.wire import CheckpointRef, decode_frames
from storage.local_store import LocalStore
from storage.memory_store import MemoryStore
from storage.model import MaterializationHandle
from storage.object_store import ObjectStore
from storage.testing import FakeClock, FakeIds, Fault, FaultKind, FaultyStore
from tests.unit.dstl_service.http_life import Life, service, text
from tests.unit.dstl_service.samples import opened
from tests.unit.dstl_service.snapshots import FILES, GROUPS, index_of, snapshot_folder, store_snapshot
from tests.waiting import wait_until

EAGER = MaterializationSettings(log_floor_bytes=0, log_ratio=0, interval_s=1, upload_attempts_max=1)
HOURS_MS = 5 * 3_600_000
SIZE = sum(map(len, FILES.values()))


class Tasks:
    """A job with one partition, with driver and tasks."""

    def __init__(self, life: Life) -> None:
        self.life = life
        life.open()
        self.base: Any = None
        self.batch()

    def batch(self, *reported: dict[str, Any]) -> None:
        """Complete a batch with one change set."""
        checkpoint_id = self.base["id"] + 1 if self.base else 0
        ref = self.life.append(b"payload", checkpoint_id=checkpoint_id)
        self.base = self.life.complete(checkpoint_id, self.base, ref, materializations=list(reported))

    def frames(self, **changes: Any) -> list[tuple[dict[str, Any], bytes]]:
        """Restore an empty table at the base."""
        answer = self.life.restore_raw(self.base, **changes)
        assert answer.status_code == 200, answer.text
        return list(decode_frames(io.BytesIO(answer.content)))

    def plan(self, **changes: Any) -> dict[str, Any]:
        """Return the first frame of a restore."""
        return self.frames(**changes)[0][0]

    def hand_over(self, folder: Path, **changes: Any) -> Any:
        """Hand a folder over as a snapshot at the base; return the response."""
        body = {"operator": "op", "first_key_group": 0, "last_key_group": 127, "version": text(self.base)}
        return self.life.client.post(
            f"{self.life.path}/materializations", json={**body, "path": str(folder), **changes}
        )

    def announced(self, path: Path) -> dict[str, Any]:
        """Hand a snapshot over, and return its announcement."""
        assert self.hand_over(path).status_code == 202
        announcement: dict[str, Any] = self.plan()["materialized"]
        assert announcement["base"] == text(self.base)
        return announcement

    def stored(self, path: Path) -> dict[str, Any]:
        """Hand a snapshot over, let the next checkpoint list it, and return its handle once it is stored."""
        self.batch(self.announced(path))
        return wait_until(self.handle)

    def handle(self) -> dict[str, Any] | None:
        """Return the handle that a restore offers, or None."""
        offered: dict[str, Any] | None = self.plan()["materialized"]
        return offered if offered and "index" in offered else None

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        lines = self.life.client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0] == name)


@pytest.fixture
def store() -> FaultyStore:
    """Return a store that fails when told."""
    return FaultyStore(MemoryStore())


@pytest.fixture
def tasks(store: FaultyStore) -> Iterator[Tasks]:
    """Return a job on a service that requests a snapshot whenever something was logged."""
    with service(store, materialization=EAGER) as life:
        yield Tasks(life)


@pytest.fixture
def calm_tasks(store: FaultyStore) -> Iterator[Tasks]:
    """Return the same with an interval longer than any test: gauges show a table for one after its last restore."""
    with service(store, materialization=replace(EAGER, interval_s=3600)) as life:
        yield Tasks(life)


def view(store: ObjectStore, tasks: Tasks) -> tuple[tuple[MaterializationHandle, ...], int]:
    """Return the materializations and the length of the log of the newest state."""
    jobs: JobStore = opened(store)
    newest = jobs.newest()
    assert newest is not None
    state = jobs.state(newest.ref)
    return state.materializations, len(state.log)


def newest(store: ObjectStore) -> Manifest:
    """Return the manifest of the newest checkpoint."""
    found = opened(store).newest()
    assert found is not None
    return found


def ref(tasks: Tasks) -> CheckpointRef:
    """Return the newest checkpoint."""
    return CheckpointRef(**tasks.base)


def test_snapshot_goes_from_task_to_task(tasks: Tasks, store: FaultyStore, tmp_path: Path) -> None:
    """I13: a snapshot is requested, stored, offered, reported, named by a checkpoint, and streamed to a table."""
    tasks.batch()
    assert tasks.plan()["materialize"] is True
    handle = tasks.stored(snapshot_folder(tmp_path / "s"))
    wait_until(lambda: not (tmp_path / "s").exists())
    tasks.batch(handle)

    assert view(store, tasks) == ((MaterializationHandle.from_dict(handle),), 2)
    (plan, _), (snapshot, _), *files, _, (segment, _), (end, _) = tasks.frames()
    assert (plan["snapshots"], plan["segments"], plan["bytes"]) == (1, 2, SIZE + 14)
    assert (snapshot["version"].split(".")[0], snapshot["counted"], snapshot["files"]) == ("1", [[0, 127]], len(FILES))
    assert {header["name"]: payload for header, payload in files} == FILES
    assert (segment["checkpoint_id"], segment["counted"], end["kind"]) == (3, [[0, 127]], "end")
    assert tasks.metric("dstl_materializations_named_total") == 1
    assert tasks.metric("dstl_restored_bytes_total") == tasks.metric("dstl_restore_planned_bytes_total") > SIZE


def test_large_files_are_named_where_a_table_takes_them(
    store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table on the sidecar's host is told where large files are; any other one gets their bytes."""
    monkeypatch.setattr(download_cache, "PIECE_BYTES", len(FILES["000008.sst"]))  # the other one is larger
    with service(store, materialization=EAGER, cache=CacheSettings(folder=tmp_path)) as life:
        tasks = Tasks(life)
        tasks.batch(tasks.stored(snapshot_folder(tmp_path / "s")))
        before, sent = tasks.metric("dstl_restored_bytes_total"), []
        for options in ({}, {"files": "true"}):
            files = [frame for frame in tasks.frames(**options) if frame[0]["kind"] == "file"]
            paths = {head["name"]: Path(head["path"]) for head, data in files if "path" in head and not data}
            named = {name: path.read_bytes() for name, path in paths.items()}
            assert list(named) == (["000009.sst"] if options else [])
            assert {head["name"]: data for head, data in files} | named == FILES
            sent.append(tasks.metric("dstl_restored_bytes_total") - before)

    assert sent[1] == 2 * sent[0]


def test_nothing_is_put_before_it_is_listed(tasks: Tasks, store: FaultyStore, tmp_path: Path) -> None:
    """I11: nothing of a snapshot is stored until a completed checkpoint lists it, however long it waits."""
    announcement = tasks.announced(snapshot_folder(tmp_path / "s"))
    assert tasks.plan()["materialized"] == announcement
    tasks.batch()
    again = tasks.plan()["materialized"]
    assert list(store.list("job/materialized/")) == []
    assert (again["base"], again["version"]) == (text(tasks.base), announcement["version"])
    assert again["uid"] != announcement["uid"]

    tasks.batch(announcement)  # it was announced for another base
    assert newest(store).under_way.uids == set()
    tasks.batch(tasks.plan()["materialized"])
    handle = wait_until(tasks.handle)
    assert {uid_in_key(info.key) for info in store.list("job/materialized/")} == {handle["uid"]}


def test_host_that_comes_second_gives_way(tasks: Tasks, tmp_path: Path) -> None:
    """I13: if two hosts made a snapshot of one table, the one that a checkpoint lists continues."""
    tasks.announced(snapshot_folder(tmp_path / "second"))
    first = Announcement(UnderWaySnapshot("op", GROUPS, ref(tasks), "first"), ref(tasks))
    tasks.batch(first.to_dict())

    assert tasks.plan()["materialized"] is None
    wait_until(lambda: not (tmp_path / "second").exists())


def test_offer_is_repeated_until_a_checkpoint_names_it(tasks: Tasks, tmp_path: Path) -> None:
    """A handle whose attempt was lost is offered with every restore until the state has it."""
    handle = tasks.stored(snapshot_folder(tmp_path / "s"))
    tasks.batch()
    assert tasks.plan()["materialized"] == handle
    tasks.batch(handle)

    assert tasks.handle() is None


def test_snapshot_that_no_checkpoint_takes_is_made_again(calm_tasks: Tasks, store: FaultyStore, tmp_path: Path) -> None:
    """I13: a stored snapshot that a checkpoint dropped counts as failed; its whole log is due again."""
    calm_tasks.stored(snapshot_folder(tmp_path / "s"))
    logged = calm_tasks.metric("dstl_materialization_log_bytes")
    uid = newest(store).under_way.snapshots[0].uid
    other = {**Announcement(UnderWaySnapshot("op", GROUPS, ref(calm_tasks), "other"), ref(calm_tasks)).to_dict()}
    calm_tasks.batch(other)
    assert newest(store).under_way.uids == {"other"} != {uid}
    assert calm_tasks.handle() is None

    assert calm_tasks.metric("dstl_materialization_log_bytes") == logged + 2 * len(b"payload")
    assert calm_tasks.metric("dstl_materializations_failed_total") == 1


def test_table_of_a_job_that_was_set_back_is_stored_again(tasks: Tasks, store: FaultyStore, tmp_path: Path) -> None:
    """I13: a snapshot that waits for an abandoned checkpoint is dropped, and the log of its successor counts."""
    for _ in range(3):
        tasks.batch()
    tasks.stored(snapshot_folder(tmp_path / "s"))
    rewind(opened(store, 90), "job", FakeIds(90), checkpoint_id=1, write=True)
    tasks.base = tasks.life.open()["latest"]["ref"]
    tasks.batch()

    plan = tasks.plan()
    assert (tasks.base["id"], plan["materialize"], plan["materialized"]["base"]) == (2, True, text(tasks.base))
    tasks.batch(tasks.stored(snapshot_folder(tmp_path / "t")))
    assert [handle.checkpoint_id for handle in view(store, tasks)[0]] == [2]


def test_upload_of_what_is_not_listed_any_more_is_given_up(tasks: Tasks, store: FaultyStore, tmp_path: Path) -> None:
    """
    I11: a snapshot enters no state if its host was suspended during the upload while the job continued without it.

    Its last files and its index arrive at any time: the checkpoint does not ask how old they are.
    """
    store.inject(Fault("put", FaultKind.DELAY, "job/materialized/*", times=None))
    tasks.batch(tasks.announced(snapshot_folder(tmp_path / "s")))
    (listed,) = newest(store).under_way.snapshots
    tasks.plan()
    other = Announcement(UnderWaySnapshot("op", GROUPS, ref(tasks), "other"), ref(tasks))
    tasks.batch(other.to_dict())
    store.heal()
    index = index_of(listed.version, uid=listed.uid, job_uid=opened(store).job_uid)
    late = store_snapshot(store, index)
    tasks.batch(late.to_dict())

    assert view(store, tasks)[0] == ()
    assert tasks.metric("dstl_materializations_refused_total") == 1
    collected = set(collect_garbage(store, opened(store), "job", FakeClock(1 << 50)).orphans)
    assert {file.object_key for file in index.files} <= collected


def test_snapshot_waits_for_a_batch_that_comes_hours_later(tmp_path: Path) -> None:
    """I11, I13: if batches are hours apart, the next one takes the snapshot, and no collection deletes its objects."""
    clock = FakeClock()
    store = MemoryStore(clock=clock)
    with service(store, clock, materialization=EAGER) as life:
        tasks = Tasks(life)
        handle = tasks.stored(snapshot_folder(tmp_path / "s"))
        for _ in range(2):
            clock.advance(HOURS_MS)
            assert collect_garbage(store, opened(store), "job", clock, age_min_ms=0).orphans == []
            assert tasks.plan()["materialized"] == handle
        tasks.batch(handle)
        clock.advance(HOURS_MS)
        assert collect_garbage(store, opened(store), "job", clock, age_min_ms=0).orphans == []

        assert view(store, tasks)[0] == (MaterializationHandle.from_dict(handle),)
        assert {header["name"]: payload for header, payload in tasks.frames() if header["kind"] == "file"} == FILES


def test_listing_is_seen_without_a_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I13: after a job's last batch nobody restores; the snapshot is stored all the same, for the next run."""
    monkeypatch.setattr(materializer, "_LOOK_S", 0.01)
    store = MemoryStore()
    with service(store, materialization=EAGER) as life:
        tasks = Tasks(life)
        tasks.batch(tasks.announced(snapshot_folder(tmp_path / "s")))
        wait_until(lambda: tasks.metric("dstl_materializations_completed_total") == 1)
    with service(store, materialization=EAGER) as tasks.life:
        tasks.life.open()
        assert tasks.handle() is not None


def test_next_process_finds_the_snapshot_that_waits(tmp_path: Path) -> None:
    """I13: a sidecar started for the next batch offers its predecessor's stored snapshot, and requests no other."""
    clock = FakeClock()
    store = MemoryStore(clock=clock)
    with service(store, clock, materialization=EAGER) as life:
        tasks = Tasks(life)
        handle = tasks.stored(snapshot_folder(tmp_path / "s"))
    clock.advance(HOURS_MS)
    with service(store, clock, materialization=EAGER) as tasks.life:
        tasks.life.open()
        plan = tasks.plan()
        assert (plan["materialized"], plan["materialize"]) == (handle, False)
        tasks.batch(handle)
        assert len(view(store, tasks)[0]) == 1
    with service(store, clock, materialization=EAGER) as tasks.life:
        assert tasks.handle() is None


@pytest.mark.parametrize("fault", ["missing", "damaged"])
def test_next_process_announces_anew_what_is_not_whole(tmp_path: Path, fault: str) -> None:
    """I11, I13: a snapshot whose process died before its index is not offered; after an interval another is made."""
    clock = FakeClock()
    store = MemoryStore(clock=clock)
    with service(store, clock, materialization=EAGER) as life:
        tasks = Tasks(life)
        handle = tasks.stored(snapshot_folder(tmp_path / "s"))
    if fault == "missing":
        store.delete([handle["index"]])
    else:
        store.put(handle["index"], b"{}")

    with service(store, clock, materialization=EAGER) as tasks.life:
        tasks.life.open()
        plan = tasks.plan()
        assert (plan["materialized"], plan["materialize"]) == (None, False)
        clock.advance(EAGER.interval_s * 1000)
        plan = tasks.plan()
        assert plan["materialize"] is True
        tasks.batch(plan["materialized"])
        assert newest(store).under_way.uids == {plan["materialized"]["uid"]}


def test_nobody_is_asked_twice(tasks: Tasks) -> None:
    """After a task was asked, speculative copies and retries are not."""
    assert [tasks.plan()["materialize"] for _ in range(3)] == [True, False, False]


def test_gauges_show_log_and_table(calm_tasks: Tasks, tmp_path: Path) -> None:
    """The log since the last snapshot, and the table's size in it, are shown as of the last restore."""
    calm_tasks.plan()
    assert calm_tasks.metric("dstl_materialization_log_bytes") == len(b"payload")
    assert calm_tasks.metric("dstl_materialization_table_bytes") == 0
    handle = calm_tasks.stored(snapshot_folder(tmp_path / "s"))
    calm_tasks.batch(handle)
    calm_tasks.batch()
    calm_tasks.plan()

    assert calm_tasks.metric("dstl_materialization_log_bytes") == 3 * len(b"payload")
    assert calm_tasks.metric("dstl_materialization_table_bytes") == SIZE
    assert calm_tasks.metric("dstl_materializations_completed_total") == 1


def test_same_snapshot_twice_is_one(tasks: Tasks, tmp_path: Path) -> None:
    """A repeated request is the same snapshot; another one meanwhile is refused and counted as skipped."""
    first, second = snapshot_folder(tmp_path / "s"), snapshot_folder(tmp_path / "other")
    assert [tasks.hand_over(path).status_code for path in (first, first, second)] == [202, 202, 409]
    assert tasks.metric("dstl_materializations_started_total") == 1
    assert tasks.metric("dstl_materializations_skipped_total") == 1
    assert tasks.metric("dstl_materializations_running") == 1
    tasks.batch(tasks.plan()["materialized"])

    wait_until(tasks.handle)
    assert second.exists()


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"path": "relative"}, 400),
        ({"path": "/nowhere"}, 400),
        ({"operator": "../x"}, 400),
        ({"first_key_group": 9, "last_key_group": 3}, 400),
        ({"version": "nonsense"}, 400),
        ({"version": "7.0.nobody"}, 404),
    ],
)
def test_wrong_request_is_refused(tasks: Tasks, tmp_path: Path, changes: dict[str, Any], status: int) -> None:
    """An invalid request is refused with the reason, and does not affect the next snapshot."""
    assert tasks.hand_over(snapshot_folder(tmp_path / "s"), **changes).status_code == status

    assert tasks.stored(tmp_path / "s")


def test_failing_store_costs_no_checkpoint(calm_tasks: Tasks, store: FaultyStore, tmp_path: Path) -> None:
    """I13: snapshots that cannot be stored are counted and reported; checkpoints continue, and the log stays whole."""
    store.inject(Fault("put", FaultKind.FAIL_BEFORE, "job/materialized/*", times=None))
    for number in range(3):
        calm_tasks.batch(calm_tasks.announced(snapshot_folder(tmp_path / str(number))))
        calm_tasks.plan()
        wait_until(lambda: calm_tasks.metric("dstl_materializations_failed_total") == number + 1)  # noqa: B023
    assert calm_tasks.metric("dstl_materialization_failures_reported_total") == 1
    assert calm_tasks.metric("dstl_materialization_consecutive_failures") == 3
    assert calm_tasks.metric("dstl_materializations_completed_total") == 0
    assert view(store, calm_tasks)[1] == 4
    store.heal()

    assert calm_tasks.stored(snapshot_folder(tmp_path / "last"))
    assert calm_tasks.metric("dstl_materialization_consecutive_failures") == 0


def test_damaged_table_is_restored_anew(tasks: Tasks, store: FaultyStore, tmp_path: Path) -> None:
    """I10, I13: a table damaged by the local disk is not stored; its next restore reads the whole log from empty."""
    path = snapshot_folder(tmp_path / "s", _000011=b"damaged later")
    damaged = (path / "000011.sst").read_bytes().replace(b"damaged", b"Damaged")
    (path / "000011.sst").write_bytes(damaged)
    tasks.batch(tasks.announced(path))
    tasks.plan()
    wait_until(lambda: tasks.metric("dstl_tables_damaged_total") == 1)
    have = text(tasks.base)
    tasks.batch()

    assert tasks.metric("dstl_materializations_failed_total") == 1
    assert not list(store.list("job/materialized/"))
    plans = [tasks.plan(have=have) for _ in range(2)]
    assert [(plan["full"], plan["segments"]) for plan in plans] == [(True, 3), (False, 1)]
    assert tasks.stored(snapshot_folder(tmp_path / "anew"))


def test_table_whose_snapshot_the_disk_has_lost_is_restored_anew(
    tasks: Tasks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I10, I13: if the disk lost the folder that a task hands over, the table is damaged; it used to fail for ever."""
    path = snapshot_folder(tmp_path / "s")
    tasks.plan()
    listdir = os.listdir

    def failing(place: int | str) -> list[str]:
        if isinstance(place, int):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return listdir(place)

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", failing)
        assert tasks.hand_over(path).status_code == 422

    assert tasks.metric("dstl_tables_damaged_total") == tasks.metric("dstl_materializations_failed_total") == 1
    assert tasks.plan(have=text(tasks.base))["full"] is True


def test_unreadable_state_costs_no_restore(tasks: Tasks, store: FaultyStore, tmp_path: Path) -> None:
    """I13: an error while a materialization is considered is logged; the restore continues without an offer."""
    handle = tasks.stored(snapshot_folder(tmp_path / "s"))
    tasks.batch({**handle, "uid": "nobody"}, handle)

    assert tasks.metric("dstl_materializations_refused_total") == 1
    assert len(view(store, tasks)[0]) == 1


def test_slow_check_holds_up_no_checkpoint(tasks: Tasks, store: FaultyStore, tmp_path: Path) -> None:
    """I13: if the check of a handle hangs, the checkpoint completes without it, and a later one takes it."""
    handle = tasks.stored(snapshot_folder(tmp_path / "s"))
    store.inject(Fault("get", FaultKind.DELAY, handle["index"]))
    tasks.batch(handle)
    store.heal()
    tasks.batch(handle)

    assert len(view(store, tasks)[0]) == 1
    assert tasks.metric("dstl_materializations_named_total") == 1


def test_new_process_counts_the_log_again(store: FaultyStore, tmp_path: Path) -> None:
    """A restarted sidecar that sees a warm table knows the length of the log since its snapshot."""
    settings = MaterializationSettings(log_floor_bytes=14, log_ratio=0)
    with service(store, materialization=settings) as life:
        tasks = Tasks(life)
        for _ in range(2):
            tasks.batch()
        have, _ = tasks.base, tasks.batch()
    with service(store, materialization=settings) as life:
        answer = life.restore_raw(tasks.base, have)
        (plan, _), *_ = decode_frames(io.BytesIO(answer.content))

    assert (plan["full"], plan["bytes"], plan["materialize"]) == (False, 7, True)


def test_garbage_of_materializations_is_collected(tmp_path: Path) -> None:
    """I11, I12: objects that are named or under way are kept at any age; dropped ones are deleted at any age."""
    store = LocalStore(tmp_path / "store")
    with service(store, materialization=EAGER) as life:
        tasks = Tasks(life)
        tasks.batch(tasks.stored(snapshot_folder(tmp_path / "named")))
        assert tasks.handle() is None
        tasks.stored(snapshot_folder(tmp_path / "unnamed", _000011=b"of the unnamed"))
        jobs = opened(store)
        everything = {info.key for info in store.list("job/materialized/")}
        assert collect_garbage(store, jobs, "job", FakeClock(1 << 50)).orphans == []
        announcement = Announcement(UnderWaySnapshot("op", GROUPS, ref(tasks), "other"), ref(tasks))
        tasks.batch(announcement.to_dict())
    collect_garbage(store, jobs, "job", FakeClock(0), age_min_ms=-(1 << 50))
    [handle] = view(store, tasks)[0]

    left = {info.key for info in store.list("job/materialized/")}
    assert handle.index_key in left
    assert len(left) == 1 + len(FILES)
    assert len(everything - left) == 2


def test_collector_deletes_no_name_that_came_back(tasks: Tasks, store: FaultyStore, tmp_path: Path) -> None:
    """I11: a collector's late deletion of an old orphan removes nothing of the same content stored again and named."""
    tasks.stored(snapshot_folder(tmp_path / "orphan"))
    other = Announcement(UnderWaySnapshot("op", GROUPS, ref(tasks), "other"), ref(tasks))
    tasks.batch(other.to_dict())
    assert tasks.handle() is None
    delete = store.delete

    def late_delete(keys: Iterable[str]) -> None:
        store.delete = delete  # type: ignore[method-assign]  # a deletion that is late
        tasks.batch(tasks.stored(snapshot_folder(tmp_path / "again")))
        delete(keys)

    store.delete = late_delete  # type: ignore[method-assign]  # a deletion that is late
    collected = collect_garbage(store, opened(store), "job", FakeClock(1 << 50)).orphans

    assert len([key for key in collected if "materialized" in key]) == 1 + len(FILES)
    assert {header["name"]: payload for header, payload in tasks.frames() if header["kind"] == "file"} == FILES


def test_function_may_take_longer_than_any_age(tmp_path: Path) -> None:
    """I11: objects chosen when a checkpoint's upload began still exist when it completes, hours later."""
    clock = FakeClock()
    store = MemoryStore(clock=clock)
    gc = GcSettings(age_min_s=0)
    with service(store, clock, materialization=EAGER, gc=gc) as life:
        tasks = Tasks(life)
        handle = tasks.stored(snapshot_folder(tmp_path / "s"))
        checkpoint_id = tasks.base["id"] + 1
        refs = [life.append(b"payload", checkpoint_id=checkpoint_id)]
        assert life.flush(checkpoint_id, tasks.base, *refs, materializations=[handle]).status_code == 204
        clock.advance(HOURS_MS)
        assert life.client.post(f"{life.path}/garbage-collection", params={"dry_run": False}).json()["orphans"] == []
        tasks.base = life.complete(checkpoint_id, tasks.base, *refs, materializations=[handle])

        assert {header["name"]: payload for header, payload in tasks.frames() if header["kind"] == "file"} == FILES


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"operator": "op"},
        {"uid": ["a"]},
        {"checkpoint": "0"},
        {"key_groups": "0-127"},
        {"size": -1},
        {"more": 1},
        {"base": "0.0.u"},
    ],
)
def test_what_is_no_handle_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """A request with a malformed handle or announcement names it and stores nothing; a correct request works."""
    with service(MemoryStore(), FakeClock(), materialization=EAGER) as life:
        tasks = Tasks(life)
        handle = tasks.stored(snapshot_folder(tmp_path / "s"))
        checkpoint_id = tasks.base["id"] + 1
        ref = life.append(b"payload", checkpoint_id=checkpoint_id)
        reported = [handle, {**handle, **wrong} if len(wrong) == 1 and "operator" not in wrong else wrong]
        for ask in (life.flush, life.complete_raw):
            answer = ask(checkpoint_id, tasks.base, ref, materializations=reported)
            assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_input")
            assert answer.json()["message"].startswith("materializations.1 of the request is not valid: ")

        tasks.base = life.complete(checkpoint_id, tasks.base, ref, materializations=[handle])
        assert tasks.plan()["snapshots"] == 1


def test_form_of_reports_is_checked_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """C25: a request may report any number, and keeps no other one waiting meanwhile."""
    threads: list[str] = []
    monkeypatch.setattr(checkpointer, "check_form", lambda _: threads.append(threading.current_thread().name))
    with service(MemoryStore()) as life:
        tasks = Tasks(life)
        uid = UnderWaySnapshot("op", GROUPS, CheckpointRef.parse(text(tasks.base)), "uid")
        tasks.batch(Announcement(uid, uid.version).to_dict())

    assert [name.partition("_")[0] for name in threads] == ["io"]
