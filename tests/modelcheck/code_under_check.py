"""
The code under check, in the form that actors call: the only module that knows its interfaces.

A `Process` is a whole service with its own clock, ids and memory. A real one works in threads; here the work is done in
the turns of the calling actor. All rules about writing, naming and deleting are real; threads, metrics and the folder
of a snapshot are replaced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar
from unittest import mock

from backend_client.sinks.slot_publishing import Target
from backend_client.spark.output.stored_sinks import first_target
from dstl_service.checkpoints.fork import fork_job
from dstl_service.checkpoints.rewind import rewind
from dstl_service.collection.retention import RetentionSettings
from dstl_service.collection.tombstones import Deletions
from dstl_service.compaction.plan import CompactionSettings
from dstl_service.composition import compose
from dstl_service.formats.manifest import Manifest, decode_manifest
from dstl_service.formats.tombstone import Tombstone
from dstl_service.formats.under_way import uid_in_key
from dstl_service.materialization.snapshot_folder import FoundFile
from dstl_service.peers.client import PeerClient
from dstl_service.registry.forks import has_hold
from dstl_service.registry.job_store import JobStore
from dstl_service.restore.plan import plan_restore, read_handles, read_snapshots
from dstl_service.restore.segment_cache import SegmentCache
from dstl_service.settings import CacheSettings, GcSettings, ServiceSettings
from dstl_service.wire import SINK, ChangeSetRef, CheckpointRef, CompleteRequest, OpenJob, OperatorInfo
from storage.change_set import decode_change_set, encode_change_set
from storage.errors import DstlError, LostChangesError, NotFoundError, UnavailableError
from storage.key_groups import KeyGroupRange
from storage.model import ChangeSetId, Segment, Writer
from storage.testing import FakeIds
from tests.modelcheck.cluster import DAY_MS, JOB, RETAINED, CheckedCluster, ProcessClock
from tests.modelcheck.oracle import Oracle, Table
from tests.modelcheck.output import SINK_NAME, SLOT_GROUP, logged_record, publish
from tests.modelcheck.scheduler import ActorLoop, ViolationError
from tests.rocksdb_files import CURRENT, MANIFEST, sst_content, sst_file

OPERATOR = "op"
GROUPS = KeyGroupRange(0, 127)
COMPLETE_EVERY = 3
TRIES_MAX = 4
COLLECTIONS_LAST = 2
"""After this number of collections, a cluster at rest has no object without a reference."""
MANIFESTS_READ_IN = "dstl_service.registry.manifest_log"
_FAILURES_MAX = 2
"""As many calls as fail in one schedule."""
_ROUND_S = 0.1
"""Longer than nothing, or the time of the loop would stand still, in which failed uploads are tried again."""
_NO_PEERS = PeerClient(lambda: None, 1)
_T = TypeVar("_T")


class Process:
    """
    A service process, and the driver or the command line that calls it.

    Args:
        cluster: The cluster to which it belongs.
        wrong_ms: How far its clock is ahead.
        compacts: Whether it compacts the log at every checkpoint.
        has_sink: Whether its query has a sink, to which each batch logs a record.
        job: The job for which it works.
    """

    def __init__(
        self,
        cluster: CheckedCluster,
        wrong_ms: int = 0,
        *,
        compacts: bool = False,
        has_sink: bool = False,
        job: str = JOB,
    ) -> None:
        self.cluster = cluster
        self.job = job
        cluster.processes += 1
        self.clock = ProcessClock(cluster.clock, wrong_ms)
        self.ids = FakeIds(cluster.processes)
        self.loop = ActorLoop(self.clock)
        settings = ServiceSettings(
            "memory://model",
            host_id=f"host-{cluster.processes}",
            cache=CacheSettings(parts_ahead=0),
            retention=RetentionSettings(checkpoints_max=RETAINED),
            gc=GcSettings(interval_s=0),
            compaction=CompactionSettings(floor_bytes=1, log_ratio_max=0.1) if compacts else CompactionSettings(),
        )
        self.parts = compose(settings, cluster.store, self.clock, self.ids, _NO_PEERS)
        self.epoch = 0
        self.base: CheckpointRef | None = None
        self.has_sink = has_sink
        self.published: int | None = None
        self.targets: list[Target] = []
        self.executor = Process(cluster) if has_sink else self

    @property
    def oracle(self) -> Oracle:
        """What observes its job."""
        return self.cluster.oracle_of(self.job)

    # --- A driver and its coordinator --------------------------------------------------------------------------------

    def open(self) -> None:
        """Take the job over."""
        opened = self.do(lambda: self.parts.opener.open(self.job, OpenJob("model")))
        self.epoch, self.base = opened.epoch, opened.latest.ref if opened.latest else None
        if self.has_sink and opened.latest is not None:
            known = next((info for info in opened.latest.operators if info.is_sink), None)
            self.published = known.published if known is not None else None
            target, must_end = first_target(opened.latest, known, 1)
            self.targets = [target]
            if must_end:
                self.publish()

    def look(self) -> None:
        """Open the job without taking it over."""
        self.do(lambda: self.parts.catalog.job(self.job))

    def batch(self, *snapshots: dict[str, Any], empties: bool = False) -> CheckpointRef:
        """
        Execute a batch that writes a key of its own, and complete its checkpoint; tasks reported these snapshots.

        With `empties` it deletes all keys instead, and has no change set if there is none.
        """
        for attempt in range(1, TRIES_MAX):
            try:
                return self._batch(attempt, snapshots, empties=empties)
            except LostChangesError:
                if not self.cluster.scheduler.faults:
                    raise
        return self._batch(TRIES_MAX, snapshots, empties=empties)

    def _batch(self, attempt: int, snapshots: Iterable[dict[str, Any]], *, empties: bool) -> CheckpointRef:
        writer, oracle = Writer(self.epoch, attempt), self.oracle
        checkpoint_id = self.base.id + 1 if self.base else 0
        before = oracle.contents(oracle.manifest(self.base))
        self.do(lambda: self.parts.checkpointer.begin(self.job, checkpoint_id, self.epoch))
        set_id = ChangeSetId(self.job, OPERATOR, checkpoint_id, writer, 0, 0)
        key, value = b"\0\0" + f"{checkpoint_id:03}".encode(), self._value()
        oracle.expect(set_id, {} if empties else {**before, key: value})
        changes = encode_change_set(dict.fromkeys(before)) if empties else _encoded(key, value)
        refs = [] if empties and not before else [self._append(Segment.of(set_id, GROUPS, 1, changes))]
        operators = [OperatorInfo(OPERATOR, 1, "{}", {})]
        if self.has_sink:
            output_id = ChangeSetId(self.job, SINK_NAME, checkpoint_id, writer, 0, 0)
            refs.append(self._append(Segment.of(output_id, SLOT_GROUP, 1, logged_record(checkpoint_id, self.epoch))))
            operators.append(OperatorInfo(SINK_NAME, 1, "Model", {}, kind=SINK, published=self.published))
        request = CompleteRequest(
            self.epoch, self.ids.unique_id(), self.base, refs, operators, materializations=list(snapshots)
        )
        answer = self.do(lambda: self.parts.checkpointer.complete(self.job, checkpoint_id, request))
        self.base = answer.ref
        self.targets.append(Target(answer.ref))
        self.cluster.completed(answer.ref.uid, self.job)
        return answer.ref

    def settle(self) -> None:
        """Do a coordinator's work after its checkpoints: compact, and delete what was subsumed and is due."""

        async def settled() -> None:
            self.parts.background_work.maintenance_of(self.parts.jobs.get(self.job)).wake()
            while self.parts.is_busy:  # noqa: ASYNC110 - it has no event, and each round does some of it
                await asyncio.sleep(_ROUND_S)

        self.do(settled)

    def publish(self) -> None:
        """Publish, through another host's sidecar, one checkpoint after the other of those that wait for it."""
        failures = 0
        while self.targets:
            target, newest = self.targets[0], self.targets[-1].checkpoint
            try:
                publish(self.executor, self.job, replace(target, newest=newest))
            except UnavailableError:
                failures += 1
                if failures > _FAILURES_MAX:
                    raise
                continue  # as a query's publisher does, until the store answers
            except NotFoundError:
                if newest == self.targets[-1].checkpoint:
                    raise
                continue  # as a query's publisher does: meanwhile the job went on, and subsumed what was to be read
            self.published = target.checkpoint.id
            self.targets.remove(target)

    # --- A sidecar ---------------------------------------------------------------------------------------------------

    def announce(self, version: CheckpointRef) -> dict[str, Any] | None:
        """Accept a snapshot of the table at a checkpoint; return what its task then reports."""
        self._take(version)
        return self.offered(version)

    def upload(self, version: CheckpointRef) -> dict[str, Any] | None:
        """Store the snapshot if a checkpoint up to this one lists it; return what its task then reports."""
        self.offered(version)

        async def stored() -> None:
            while self.parts.is_busy:  # noqa: ASYNC110 - it has no event, and each round does some of it
                await asyncio.sleep(_ROUND_S)

        self.do(stored)
        return self.offered(version)

    def offered(self, version: CheckpointRef) -> dict[str, Any] | None:
        """Return what the next task, whose table must be at this checkpoint, is told to report."""
        _, offer = self.do(lambda: self.parts.restores.plan(self.job, OPERATOR, GROUPS, None, version))
        return offer.report

    def _take(self, version: CheckpointRef) -> None:
        path = f"/{version.to_text()}"
        folder = _Folder(path, self.oracle.contents(self.oracle.manifest(version)))
        with mock.patch("dstl_service.materialization.tracked_table.SnapshotFolder.open", return_value=folder):
            self.do(lambda: self.parts.restores.take_snapshot(self.job, OPERATOR, GROUPS, version, path, is_own=False))

    # --- Others ------------------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Collect the job's garbage."""

        async def collected() -> None:
            await self.parts.background_work.collect(await self.parts.jobs.opened(self.job), dry_run=False)

        self.do(collected)

    def save(self, name: str, checkpoint_id: int | None = None) -> None:
        """Make a savepoint, by default of the newest checkpoint."""
        made = self.do(lambda: self.parts.catalog.create_savepoint(self.job, name, checkpoint_id))
        self.cluster.saved(name, made.ref, self.job)

    def forget_savepoint(self, name: str) -> None:
        """Delete a savepoint."""
        self.cluster.unsaved(name, self.job)
        self.do(lambda: self.parts.catalog.delete_savepoint(self.job, name))

    def rewind(self, **target: Any) -> None:
        """Rewind the job to a `checkpoint_id` or a `savepoint`."""
        given: dict[str, Any] = {"checkpoints_max": RETAINED, **target}
        report = self.again(lambda: rewind(self.jobs(), self.job, self.ids, write=True, **given))
        self.cluster.saved(report.savepoint, CheckpointRef.parse(report.newest), self.job)

    def fork(self, name: str, **target: Any) -> None:
        """Fork the job, by default at its newest checkpoint."""
        given: dict[str, Any] = {"checkpoints_max": RETAINED, **target}
        self.again(lambda: fork_job(self.cluster.store, self.jobs(), self.job, name, self.clock, self.ids, **given))

    def begin_fork(self, name: str) -> None:
        """Decide a fork, as a process does that dies then."""
        jobs, made = self.jobs(), JobStore(self.cluster.store, name, self.clock, self.ids)
        newest = jobs.newest()
        assert newest is not None
        made.open(jobs.max_parallelism, jobs.offer(newest, None, name, 0))

    def bury(self) -> Tombstone:
        """Mark the job as deleted; the process that did so died before it fenced a running query."""
        return self.again(lambda: self._deletions().bury(self.job, "model", 0))

    def delete(self, tombstone: Tombstone) -> None:
        """Delete the stored objects of a job that is marked as deleted, and free its name."""
        self.again(lambda: self._deletions().collect(tombstone))

    def undelete(self) -> None:
        """Bring the job back if it is still marked as deleted: a fork needs it, and nobody took the mark away."""
        if self._deletions().of(self.job) is not None:
            self.again(lambda: self._deletions().undo(self.job))

    def delete_buried(self) -> None:
        """Delete the stored objects of all jobs that are marked as deleted, by any process."""
        self._deletions().collect_expired()

    def _deletions(self) -> Deletions:
        return Deletions(self.cluster.store, self.clock, self.ids)

    def jobs(self) -> JobStore:
        """Return the job's store as seen by a process that opened the job."""
        jobs = JobStore(self.cluster.store, self.job, self.clock, self.ids)
        jobs.open(None)
        return jobs

    def _value(self) -> bytes:
        """Return what its batches write, another value in each run of each job."""
        return f"{self.epoch}".encode() if self.job == JOB else f"{self.job}-{self.epoch}".encode()

    def _append(self, segment: Segment) -> ChangeSetRef:
        async def append() -> ChangeSetRef:
            return self.parts.intake.append(segment, preemptive=False)

        return self.do(append)

    def do(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Run the process's loop until some work is done."""
        return self.again(lambda: self.loop.run_until_complete(work()))

    def again(self, call: Callable[[], _T]) -> _T:
        """Do what may be repeated again if there was no answer, as clients and people do."""
        for _ in range(TRIES_MAX):
            try:
                return call()
            except UnavailableError:
                if not self.cluster.scheduler.faults:
                    raise
        return call()


def first_checkpoints(cluster: CheckedCluster, count: int, **how: Any) -> Process:
    """Create the job with some checkpoints; return the driver's process."""
    driver = Process(cluster, **how)
    driver.open()
    for _ in range(count):
        driver.batch()
        driver.settle()
    return driver


def finish(cluster: CheckedCluster) -> None:
    """Check a cluster in which no actor can continue: another driver then continues, and garbage is collected."""
    person = Process(cluster)
    person.delete_buried()
    person.undelete()
    forks = [job for job in cluster.oracles if job != JOB and _exists(cluster, job)]
    for job in (*reversed(forks), JOB):  # a fork's fork first: what it needs of the fork keeps that's hold
        _finish_job(cluster, job)
    if left := [name for name in cluster.oracle.saved if name.startswith("fork-at-")]:
        raise ViolationError(f"a fork has left savepoints: {left}")


def _exists(cluster: CheckedCluster, job: str) -> bool:
    """Return whether a fork was created. If its beginning is lost, it has never begun."""
    process = Process(cluster, job=job)
    if not JobStore(cluster.store, job, process.clock, process.ids).exists():
        return False
    try:
        process.jobs().claim("model")
    except DstlError as error:
        if process.oracle.newest is not None:
            raise ViolationError(f"fork {job} cannot go on: {error}") from error
        process.delete(process.bury())
        return False
    jobs = process.jobs()
    assert jobs.origin is not None
    is_apart = all(map(jobs.owns, process.oracle.needed()))
    if not is_apart and not has_hold(cluster.store, jobs.job_uid, jobs.origin):
        raise ViolationError(f"nothing keeps what fork {job} needs")  # its collector would make another hold
    return True


def _finish_job(cluster: CheckedCluster, job: str) -> None:
    oracle = cluster.oracle_of(job)
    oracle.check("in the end")
    newest = oracle.newest
    has_sink = newest is not None and any(operator.is_sink for operator in newest.operators)
    driver = Process(cluster, has_sink=has_sink, job=job)
    driver.open()
    oracle.check_reported()
    if has_sink:
        driver.publish()
    driver.batch()
    driver.settle()
    if has_sink:
        driver.publish()
    cluster.check_output()
    for _ in range(COLLECTIONS_LAST):
        cluster.clock.advance(8 * DAY_MS)
        driver.collect()
    for other in cluster.oracles.values():
        other.check("after the last collection")
    oracle.check_reported()
    _check_restored(cluster, driver.jobs(), oracle)
    stored = {info.key for folder in ("segments", "materialized") for info in cluster.store.list(f"{job}/{folder}/")}
    if left := {key for key in stored - oracle.named() if not _is_under_way(key, oracle.newest)}:
        raise ViolationError(f"garbage stays in job {job}: {sorted(left)}")


def _is_under_way(key: str, newest: Manifest | None) -> bool:
    """Return whether an object belongs to a snapshot that, by the newest checkpoint, some process may still finish."""
    return newest is not None and uid_in_key(key) in newest.under_way.uids


def _check_restored(cluster: CheckedCluster, job_store: JobStore, oracle: Oracle) -> None:
    """Restore all retained checkpoints and all savepoints as a new process does, and compare them."""
    for name, savepoint in oracle.savepoints.items():
        if job_store.savepoints.load(name).ref != savepoint.ref:
            raise ViolationError(f"savepoint {name} is of another checkpoint than was reported")
    for manifest in (*oracle.retained(), *oracle.savepoints.values()):
        table: Table = {}
        plan = plan_restore(job_store, OPERATOR, GROUPS, None, manifest.ref)
        for _, _, files in read_snapshots(plan, cluster.store):
            for file, _, data in files:
                if file.name.endswith(".sst"):
                    _apply(sst_content(bytes(data)), table)
        for _, payload in read_handles(plan.handles, cluster.store, SegmentCache(0)):
            _apply(bytes(payload), table)
        if table != oracle.contents(manifest):
            raise ViolationError(f"{manifest.ref.to_text()} is restored with other content")


class _Folder:
    """A snapshot of a table: a file for its first key, which later snapshots share, and one for the rest."""

    def __init__(self, path: str, table: Table) -> None:
        self.path = path
        first, *rest = sorted(table.items())
        self._files = {"000001.sst": sst_file(_encoded(*first)), "MANIFEST-000005": MANIFEST, "CURRENT": CURRENT}
        for number, (key, value) in enumerate(rest, 2):
            self._files[f"{number:06}.sst"] = sst_file(_encoded(key, value))

    def files(self) -> list[FoundFile]:
        return [FoundFile(name, len(data), (hash(data),)) for name, data in self._files.items()]

    def read(self, file: FoundFile) -> bytes:
        return self._files[file.name]

    def close(self) -> None:
        pass

    def remove(self) -> None:
        pass


class _Inline(Executor):
    """Runs submitted calls at once; calls through the loop never reach it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args, **kwargs))
        return future


class _NoMetrics:
    """Accepts all figures and stores none: creating real metrics takes longer than a schedule."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> _NoMetrics:
        return self

    def __call__(self, *_: Any, **__: Any) -> _NoMetrics:
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


@contextmanager
def made_small() -> Iterator[None]:
    """
    Adapt the code to many short runs.

    Complete manifests are frequent, so that short histories subsume; no manifest is read twice; nothing runs in threads
    or is counted or logged.
    """
    with (
        mock.patch("dstl_service.formats.manifest.COMPLETE_EVERY", COMPLETE_EVERY),
        mock.patch(f"{MANIFESTS_READ_IN}.decode_manifest", _decoded_manifest),
        mock.patch.multiple("dstl_service.composition", ServiceMetrics=_NoMetrics, ThreadPerCall=_Inline),
        mock.patch("dstl_service.process.job_threads.ThreadPoolExecutor", _Inline),
        mock.patch("dstl_service.materialization.materializer.MaterializationMetrics", _NoMetrics),
        mock.patch.object(logging.getLogger("dstl_service"), "disabled", new=True),
    ):
        yield


_decoded_manifest = lru_cache(10_000)(decode_manifest)


@lru_cache(10_000)
def _encoded(key: bytes, value: bytes) -> bytes:
    return encode_change_set({key: value})


@lru_cache(10_000)
def _decoded(payload: bytes) -> dict[bytes, bytes | None]:
    return dict(decode_change_set(payload, "model"))


def _apply(payload: bytes, table: Table) -> None:
    """Apply a change set to a table."""
    for key, value in _decoded(payload).items():
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value
