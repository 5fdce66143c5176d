"""A coordinator's maintenance after its checkpoints, seen from outside: requests, restores and stored objects."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

import pytest

from dstl_service.checkpoints.rewind import rewind
from dstl_service.collection.garbage_collector import collect_garbage
from dstl_service.collection.retention import RetentionSettings
from dstl_service.compaction.plan import CompactionSettings
from dstl_service.formats.manifest import COMPLETE_EVERY, Manifest
from dstl_service.formats.under_way import uid_in_key
from storage.change_set import decode_change_set, encode_change_set
from storage.memory_store import MemoryStore
from storage.model import SegmentKind
from storage.object_store import ObjectStore
from storage.testing import FakeClock, FakeIds, Fault, FaultKind, FaultyStore, RecordingStore
from tests.unit.dstl_service.http_life import Life, samples, service
from tests.unit.dstl_service.samples import opened
from tests.waiting import wait_until

EAGER = CompactionSettings(floor_bytes=1, log_ratio_max=0.1)
NOW = RetentionSettings(checkpoints_max=1, delay_s=0)
KEYS = [bytes([0, number]) for number in range(20)]


class MaintainedJob:
    """A job whose every checkpoint changes some keys, with its expected state."""

    def __init__(self, store: ObjectStore, life: Life) -> None:
        self.store = store
        self.life = life
        self.chance = random.Random(3)
        self.base: Any = None
        self.state: dict[bytes, bytes] = {}
        self.states: list[tuple[Any, dict[bytes, bytes]]] = []
        life.open()

    def checkpoint(self) -> None:
        """Complete the next checkpoint."""
        checkpoint_id = 0 if self.base is None else self.base["id"] + 1
        changes = {
            key: self.chance.randbytes(4) if self.chance.random() < 0.7 else None for key in self.chance.sample(KEYS, 8)
        }
        ref = self.life.append(encode_change_set(changes), checkpoint_id=checkpoint_id)
        self.base = self.life.complete(checkpoint_id, self.base, ref)
        for key, value in changes.items():
            if value is None:
                self.state.pop(key, None)
            else:
                self.state[key] = value
        self.states.append((self.base, dict(self.state)))

    def restored(self, ref: Any) -> dict[bytes, bytes]:
        """Restore an empty table."""
        _, payloads = self.life.restore(ref)
        table: dict[bytes, bytes] = {}
        for payload in payloads:
            for key, value in decode_change_set(payload, "restored"):
                if value is None:
                    table.pop(key, None)
                else:
                    table[key] = value
        return table

    def keys(self, folder: str) -> list[str]:
        """Return the stored objects of one folder."""
        return [info.key for info in self.store.list(f"job/{folder}/")]

    def metric(self, name: str) -> float:
        """Read a metric."""
        lines = self.life.client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@pytest.fixture
def job() -> Iterator[MaintainedJob]:
    """Return a job that is compacted whenever possible and keeps one checkpoint."""
    store = MemoryStore()
    with service(store, compaction=EAGER, retention=NOW) as life:
        yield MaintainedJob(store, life)


def test_compacted_log_restores_every_checkpoint(job: MaintainedJob) -> None:
    """I14: the newest checkpoint restores to its state, whatever was compacted meanwhile."""
    for _ in range(40):
        job.checkpoint()
        assert job.restored(job.base) == job.state
    wait_until(lambda: job.metric("dstl_compactions_total") >= 3)
    job.checkpoint()

    assert job.restored(job.base) == job.state


def test_log_and_manifests_stay_short(job: MaintainedJob) -> None:
    """The stored data depend on the size of a job's state, not on the length of its history (I12)."""
    for _ in range(50):
        job.checkpoint()
    for _ in range(50):  # compactions run after the checkpoints: the log is short at one of the next ones
        if len(job.keys("segments")) <= 12:
            break
        job.checkpoint()

    assert len(job.keys("segments")) <= 12
    wait_until(lambda: len(job.keys("checkpoints")) <= 25)


def test_retained_checkpoints_stay_restorable() -> None:
    """I11: with more checkpoints retained, each of them restores to its own state while older ones are deleted."""
    store = MemoryStore()
    retention = RetentionSettings(checkpoints_max=5, delay_s=0)
    with service(store, compaction=EAGER, retention=retention) as life:
        job = MaintainedJob(store, life)
        for _ in range(45):
            job.checkpoint()
        wait_until(lambda: job.metric("dstl_checkpoints_subsumed_total") > 0)
        for ref, state in job.states[-5:]:
            assert job.restored(ref) == state
        answer = job.life.restore_raw(job.states[0][0])

    assert answer.status_code == 404


def test_savepoint_outlives_its_checkpoint(job: MaintainedJob) -> None:
    """I11: a savepoint keeps a checkpoint restorable until it is deleted, whatever is subsumed."""
    for _ in range(7):
        job.checkpoint()
    ref, state = job.states[-1]
    answer = job.life.client.put("/v1/jobs/job/savepoints/before-upgrade", json={"checkpoint_id": None})
    assert (answer.status_code, answer.json()["ref"]) == (200, ref)
    for _ in range(45):
        job.checkpoint()
    wait_until(lambda: f"job/checkpoints/{ref['id']:020d}.{ref['generation']:06d}.json" not in job.keys("checkpoints"))

    assert job.restored(ref) == state
    assert list(job.life.client.get("/v1/jobs/job/savepoints").json()) == ["before-upgrade"]
    assert job.life.client.delete("/v1/jobs/job/savepoints/before-upgrade").status_code == 204
    assert job.life.restore_raw(ref).status_code == 404


def test_taken_savepoint_name_is_refused(job: MaintainedJob) -> None:
    """A savepoint is never overwritten; a repeated request for the same checkpoint is not a conflict."""
    job.checkpoint()
    job.checkpoint()
    path = "/v1/jobs/job/savepoints/one"

    assert job.life.client.put(path, json={}).status_code == 200
    assert job.life.client.put(path, json={"checkpoint_id": 1}).status_code == 200
    job.checkpoint()
    assert job.life.client.put(path, json={}).status_code == 409


@pytest.mark.parametrize(("checkpoint_id", "status"), [(99, 404), (-1, 400)])
def test_savepoint_of_no_checkpoint_is_refused(job: MaintainedJob, checkpoint_id: int, status: int) -> None:
    """A savepoint of a checkpoint that does not exist is refused."""
    job.checkpoint()
    answer = job.life.client.put("/v1/jobs/job/savepoints/one", json={"checkpoint_id": checkpoint_id})

    assert answer.status_code == status
    assert job.life.client.delete("/v1/jobs/job/savepoints/one").status_code == 404


def test_opaque_log_is_left_alone(job: MaintainedJob) -> None:
    """Change sets that cannot be merged fail the compaction, and nothing else."""
    base = None
    for checkpoint_id in range(5):
        base = job.life.complete(checkpoint_id, base, job.life.append(b"opaque" * 9, checkpoint_id=checkpoint_id))
    wait_until(lambda: job.metric("dstl_compactions_failed_total") >= 1)

    assert base is not None
    assert job.life.restore(base) == (True, [b"opaque" * 9] * 5)


def listed_compaction(job: MaintainedJob) -> Manifest:
    """Complete checkpoints until one lists a compaction; return that checkpoint."""

    def listed() -> Manifest | None:
        job.checkpoint()
        newest = opened(job.store).newest()
        return newest if newest is not None and newest.under_way.compactions else None

    manifest: Manifest = wait_until(listed)
    return manifest


def compacted(job: MaintainedJob) -> Manifest:
    """Complete checkpoints until one lists a compaction; return that one once the result is stored."""
    done = job.metric("dstl_compactions_total")
    manifest = listed_compaction(job)
    wait_until(lambda: job.metric("dstl_compactions_total") > done)
    return manifest


def test_result_waits_at_any_age_for_the_next_checkpoint(job: MaintainedJob) -> None:
    """I11: a result that no manifest names is kept however late the next checkpoint comes, and enters it."""
    manifest = compacted(job)
    (uid,) = manifest.under_way.compactions
    results = {key for key in job.keys("segments") if uid_in_key(key) == uid}
    later = FakeClock(1 << 50)
    assert collect_garbage(job.store, opened(job.store), "job", later, checkpoints_max=1).orphans == []
    job.checkpoint()
    newest = opened(job.store).newest()

    assert newest is not None
    assert {handle.object_key for handle in newest.earlier if handle.entry.kind is SegmentKind.BASE} == results
    assert newest.under_way.compactions == ()
    assert job.restored(job.base) == job.state


def test_compaction_of_what_was_given_up_is_dropped() -> None:
    """I11: a rewind empties the list; a compaction that runs meanwhile is neither listed again nor taken."""
    store = FaultyStore(MemoryStore())
    with service(store, compaction=EAGER, retention=RetentionSettings(checkpoints_max=5, delay_s=0)) as life:
        job = MaintainedJob(store, life)
        job.checkpoint()
        store.inject(Fault("put", FaultKind.DELAY, "*=*.seg", times=None))
        (uid,) = listed_compaction(job).under_way.compactions
        jobs = opened(store, host=9)
        rewind(jobs, "job", FakeIds(8), checkpoint_id=job.base["id"] - 1, write=True)
        job.state = dict(job.states[-2][1])
        job.base = life.open()["latest"]["ref"]
        newest: Manifest | None = None
        for _ in range(2):
            job.checkpoint()
            newest = opened(store).newest()
            assert newest is not None
            assert uid not in newest.under_way.uids
        store.heal()
        compacted(job)
        job.checkpoint()

        assert newest is not None
        assert not any(uid_in_key(handle.object_key) == uid for handle in jobs.state(newest.ref).log)
        assert job.restored(job.base) == job.state


def test_new_coordinator_goes_on(job: MaintainedJob) -> None:
    """A service that takes a job over knows what its predecessor compacted and subsumed."""
    for _ in range(25):
        job.checkpoint()
    with service(job.store, compaction=EAGER, retention=NOW) as life:
        job.life = life
        job.life.open()
        for _ in range(25):
            job.checkpoint()
            assert job.restored(job.base) == job.state


def test_settings_switch_compaction_off() -> None:
    """Without compaction the complete log is kept."""
    store = MemoryStore()
    with service(store, compaction=CompactionSettings(enabled=False, floor_bytes=1), retention=NOW) as life:
        job = MaintainedJob(store, life)
        for _ in range(12):
            job.checkpoint()
        _, payloads = job.life.restore(job.base)

    assert len(payloads) == 12


def test_removed_operator_leaves_the_store(job: MaintainedJob) -> None:
    """I11, I12: its objects are deleted once no retained checkpoint names them; those of a savepoint stay with it."""
    operator = {"name": "op", "parallelism": 1, "key_schema": "{}", "states": {}}
    gone = {**operator, "name": "gone"}
    for checkpoint_id in range(6):
        ref = job.life.append(encode_change_set({KEYS[0]: b"x"}), operator="gone", checkpoint_id=checkpoint_id)
        job.base = job.life.complete(checkpoint_id, job.base, ref, operators=[operator, gone])
        if checkpoint_id == 2:
            assert job.life.client.put("/v1/jobs/job/savepoints/before", json={}).status_code == 200
    kept = opened(job.store).savepoints.object_keys()
    others, numbers = {*job.keys("segments")} - kept, count(6)

    def are_gone_after_another_checkpoint() -> bool:
        checkpoint_id = next(numbers)
        ref = job.life.append(encode_change_set({KEYS[1]: b"y"}), checkpoint_id=checkpoint_id)
        operators = [operator, {**gone, "kind": "removed"}]
        job.base = job.life.complete(checkpoint_id, job.base, ref, operators=operators)
        # The result of a compaction that was under way is an orphan.
        collect_garbage(job.store, opened(job.store), "job", FakeClock(1 << 50), checkpoints_max=1)
        return not others & {*job.keys("segments")}

    wait_until(are_gone_after_another_checkpoint, what="the deletion of the removed operator's objects")

    assert {key for key in kept if "/segments/" in key} <= {*job.keys("segments")}
    assert job.restored(job.base) == {KEYS[1]: b"y"}


def test_restart_reads_only_retained_checkpoints() -> None:
    """J25: however many subsumed checkpoints wait to be deleted, a restarted coordinator reads those that it keeps."""
    store, kept = RecordingStore(MemoryStore()), RetentionSettings(checkpoints_max=1, delay_s=86_400)
    with service(store, retention=kept) as life:
        before = MaintainedJob(store, life)
        for _ in range(60):
            before.checkpoint()
    with service(store, retention=kept) as life:
        job = MaintainedJob(store, life)
        job.base = before.base
        store.clear()
        job.checkpoint()
        wait_until(partial(_shows, job, "op"), what="the end of the work after the checkpoint")

    assert store.count("get", "job/checkpoints/*") <= COMPLETE_EVERY


def test_sizes_of_former_operators_are_not_shown(job: MaintainedJob) -> None:
    """C24: metrics show the operators of the newest checkpoint only, however many names the ones before had."""
    base = None
    for number in range(3):
        operator = {"name": f"op-{number}", "parallelism": 1, "key_schema": "{}", "states": {}}
        base = job.life.complete(number, base, operators=[operator])
        wait_until(partial(_shows, job, f"op-{number}"), what="the newest checkpoint's sizes")

    assert _shown_of(job, "dstl_log_bytes") == _shown_of(job, "dstl_table_bytes") == {"op-2"}


def _shows(job: MaintainedJob, operator: str) -> bool:
    return operator in _shown_of(job, "dstl_log_bytes")


def _shown_of(job: MaintainedJob, metric: str) -> set[str]:
    shown = [name for name in samples(job.life) if name.startswith(metric)]
    return {name.partition('operator="')[2].partition('"')[0] for name in shown}
