"""
Restores tables: plans what a table lacks, and reads the bytes.

Combines the plan of a restore with caches, threads, and the materializer, which tells a task when a snapshot is due.
Methods run on the event loop unless marked as blocking.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

from dstl_service.intake.active_jobs import ActiveJobs
from dstl_service.intake.persister import Persister
from dstl_service.materialization.materializer import Materializer
from dstl_service.materialization.pending import Offer
from dstl_service.metrics.restores import RestoreMetrics
from dstl_service.process.fair_slots import FairSlots
from dstl_service.process.job_threads import JobThreads, RunInThread
from dstl_service.process.shares import SharedRoom, Shares
from dstl_service.restore.download_cache import DownloadCache
from dstl_service.restore.plan import (
    Payloads,
    RestorePlan,
    SnapshotStream,
    plan_restore,
    plan_step,
    read_handles,
    read_snapshots,
)
from dstl_service.restore.progress import RestoreProgress
from dstl_service.restore.read_ahead import ReadAhead
from dstl_service.restore.segment_cache import SegmentCache
from dstl_service.restore.table_id import TableId
from dstl_service.wire import ChangeSetRef, CheckpointRef
from storage.checksum import BytesLike
from storage.clock import Clock
from storage.errors import CorruptDataError, NotFoundError, OverloadedError
from storage.key_groups import KeyGroupRange
from storage.model import ChangeSetId, Segment, SegmentHandle
from storage.validation import validate_name

RESTORE_THREADS = 60
"""Threads that read the bytes of restores: each waits for the store most of the time."""

STREAMS_BYTES_MAX = 2 << 30
"""Memory for what streams have read and their clients have not taken; a job's streams may hold half of it."""
_STREAM_BYTES_MAX = 32 << 20
"""A stream counts as no more, so that 32 tables of one job are restored at a time at least."""

PLANS_BYTES_MAX = 2 << 30
"""Memory for the plans of streams, which may wait for others; those of one job may hold as much as stays free."""
_HANDLE_BYTES = 600


class RestoreService:
    """
    Advances tables to checkpoints.

    Args:
        active_jobs: The jobs of this process.
        persister: Finds change sets whose checkpoint does not exist yet.
        materializer: Tells when a table's snapshot is due, and which tables are damaged.
        downloads: Downloads of immutable objects, on disk.
        cache: Recent change sets, in memory.
        ahead: Reads from the store what a table needs next.
        clock: The only source of time.
        metrics: Metrics of restores.
        in_thread: Runs a job's blocking read of the registry.
    """

    def __init__(
        self,
        active_jobs: ActiveJobs,
        persister: Persister,
        materializer: Materializer,
        downloads: DownloadCache,
        cache: SegmentCache,
        ahead: ReadAhead,
        clock: Clock,
        metrics: RestoreMetrics,
        in_thread: RunInThread,
    ) -> None:
        self._jobs = active_jobs
        self._persister = persister
        self._materializer = materializer
        self._downloads = downloads
        self._cache = cache
        self._ahead = ahead
        self._clock = clock
        self._metrics = metrics
        self._in_thread = in_thread
        self._threads = JobThreads(RESTORE_THREADS, "restore")
        self._streams = FairSlots(STREAMS_BYTES_MAX)
        self._plans = SharedRoom(Shares(PLANS_BYTES_MAX, 1, 0))

    async def plan(
        self,
        name: str,
        operator: str,
        key_groups: KeyGroupRange,
        from_checkpoint: CheckpointRef | None,
        to_checkpoint: CheckpointRef,
        *,
        is_for_task: bool = True,
        only: int | None = None,
    ) -> tuple[RestorePlan, Offer]:
        """
        Plan the restore of a table from one checkpoint to another, with the materializer's offer to its task.

        Without a task, for rows in the log or a standby's copy, there is no offer. With `only` it is the logged rows
        of one checkpoint.
        """
        job = await self._jobs.opened(name)
        table_id = TableId(name, operator, key_groups)
        if is_for_task:
            from_checkpoint = self._materializer.trusted(table_id, from_checkpoint)
        plan = plan_step(job.store, operator, key_groups, from_checkpoint, to_checkpoint)
        if plan is None:
            try:
                plan = await self._in_thread(
                    name, plan_restore, job.store, operator, key_groups, from_checkpoint, to_checkpoint
                )
            except (NotFoundError, CorruptDataError):
                if not await self._jobs.forget_former(name):
                    raise
                job = await self._jobs.opened(name)
                plan = await self._in_thread(
                    name, plan_restore, job.store, operator, key_groups, from_checkpoint, to_checkpoint
                )
        if not is_for_task:
            return (plan if only is None else plan.of_checkpoint(only)), Offer()
        self._metrics.restore_planned_bytes.labels(name).inc(plan.size_bytes)
        return plan, await self._materializer.offer(table_id, job.store, plan, to_checkpoint)

    async def sets(
        self, name: str, epoch: int, refs: Sequence[ChangeSetRef]
    ) -> tuple[int, Iterator[tuple[ChangeSetId, int, BytesLike]]]:
        """
        Return sets whose checkpoint does not exist yet: id, checksum and payload of each.

        The memory that a stream of them takes comes first, see `RestorePlan.held_bytes`. The iterator blocks.
        """
        job = await self._jobs.owned(name, epoch)  # this process may be new, or have received no set of the epoch
        held = await self._persister.held(job, refs)
        handles = [item for item in held if isinstance(item, SegmentHandle)]
        if handles:
            stored = read_handles(handles, self._downloads, self._cache, self._ahead)
            size_bytes = RestorePlan(False, handles[0].entry.key_groups, handles).held_bytes
            return size_bytes, ((handle.entry.id, handle.entry.checksum, payload) for handle, payload in stored)
        sets = [item for item in held if isinstance(item, Segment)]
        size_bytes = 2 * max((item.size_bytes for item in sets), default=0)
        return size_bytes, ((item.id, item.checksum, item.payload) for item in sets)

    async def take_snapshot(
        self, name: str, operator: str, key_groups: KeyGroupRange, version: CheckpointRef, path: str, *, is_own: bool
    ) -> None:
        """Store a table's snapshot in the background; see `dstl_service.materialization.materializer`."""
        validate_name("operator", operator)
        job = await self._jobs.opened(name)
        await self._materializer.take(TableId(name, operator, key_groups), job.store, version, path, is_own=is_own)

    def at_hand(self, plan: RestorePlan) -> Payloads | None:
        """Return a plan's payloads if all it needs is in memory, so that reading them needs no thread."""
        found = None if plan.materializations else self._cache.get_all(plan.handles)
        return None if found is None else zip(plan.handles, found, strict=True)

    def payloads(self, plan: RestorePlan, at_hand: Payloads | None = None, *, is_for_task: bool = True) -> Payloads:
        """Yield a plan's payloads: those at hand, or those that are read, which blocks."""
        started_ms = self._clock.monotonic_ms()
        yield from read_handles(plan.handles, self._downloads, self._cache, self._ahead) if at_hand is None else at_hand
        if not is_for_task:
            return
        # The client takes a payload about when it has applied the one before, so this measures its replay.
        self._materializer.replayed(plan.log_bytes, self._clock.monotonic_ms() - started_ms)

    def snapshots(self, plan: RestorePlan, *, by_path: bool) -> SnapshotStream:
        """Yield the files of a plan's materializations, with `by_path` those on disk by their path; blocking."""
        if by_path:
            return read_snapshots(plan, self._downloads, self._ahead, self._downloads.lend)
        return read_snapshots(plan, self._downloads, self._ahead)

    def progress(self, table: TableId, plan: RestorePlan, count: Callable[[int], None]) -> RestoreProgress:
        """Return what says how far a plan's restore is; `count` takes the bytes sent, for metrics."""
        return RestoreProgress(table, plan.size_bytes, count, self._clock)

    async def joined(self, name: str, pieces: Iterator[bytes]) -> bytes:
        """Join a job's pieces, read in a thread."""
        return await self._threads.run(name, b"".join, pieces)

    def in_turn(self, name: str, pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
        """Yield a job's pieces, each read in a thread when it is the job's turn."""
        return self._threads.each(name, pieces)

    def room_for_stream(self, name: str, size_bytes: int) -> AbstractAsyncContextManager[None]:
        """
        Return the context of a stream that takes this memory while its client takes nothing; it waits for room.

        A client that reads slowly, or not at all, keeps its own job waiting.
        """
        return self._streams.held(name, min(max(1, size_bytes), _STREAM_BYTES_MAX))

    def hold_plan(self, name: str, plan: RestorePlan) -> Callable[[], None]:
        """
        Count a plan's memory until the returned function is called: a short request may have a log of any length.

        Raises:
            OverloadedError: The job's plans hold too much; ask again.
        """
        size_bytes = _HANDLE_BYTES * len(plan.handles)
        if not self._plans.take(name, size_bytes):
            raise OverloadedError(f"restores of job {name!r} from long logs are in progress; ask again", job=name)
        return partial(self._plans.give_back, name, size_bytes)

    def close(self) -> None:
        """Release the threads."""
        self._threads.close()
        self._ahead.close()
