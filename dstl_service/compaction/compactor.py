"""
Performs compactions: reads the segments of each partition, merges them, and stores the results as segment objects.

A compaction merges one partition at a time, and few of all jobs run at once, so that their data fits into memory.
An uncompressed log that is too large is not decoded, but left to materializations. A small log is read all at once.
Reading and merging block and run in a thread. Results use the same uploads as change sets, with a timeout for large
objects.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import TypeVar, TypeVarTuple

from dstl_service.compaction.plan import Compaction, Output, Replacement
from dstl_service.process.fair_slots import FairSlots
from dstl_service.process.job_threads import RunInThread
from dstl_service.restore.plan import read_handles
from dstl_service.restore.segment_cache import SegmentCache
from dstl_service.uploads.uploader import Uploader
from storage.checksum import BytesLike
from storage.errors import OverloadedError
from storage.model import ChangeSetId, Segment, SegmentHandle, SegmentKind, Writer
from storage.object_store import ObjectStore

logger = logging.getLogger("dstl_service")

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

_OBJECT_BYTES = 32 * 1024 * 1024
_SEGMENT_BYTES = 8 * 1024 * 1024
_AT_ONCE_BYTES = 64 * 1024 * 1024
_RUNNING_MAX = 2
"""Compactions of all jobs that run at the same time; each takes up to three times `decoded_bytes_max` of memory."""


class Compactor:
    """
    Compacts the logs of any job of one service.

    Args:
        store: Holds the segments.
        cache: Holds some of them in memory.
        uploader: Stores results.
        in_thread: Runs a blocking call of a job.
        decoded_bytes_max: Largest uncompressed log of a partition.
    """

    def __init__(
        self,
        store: ObjectStore,
        cache: SegmentCache,
        uploader: Uploader,
        in_thread: RunInThread,
        decoded_bytes_max: int,
    ) -> None:
        self._store = store
        self._cache = cache
        self._uploader = uploader
        self._in_thread = in_thread
        self._decoded_bytes_max = decoded_bytes_max
        self._turns = FairSlots(_RUNNING_MAX)

    async def run(self, job: str, epoch: int, compactions: Sequence[Compaction], uid: str) -> list[Replacement]:
        """
        Run these compactions when it is their job's turn; their results share objects.

        Args:
            job: Name of the job.
            epoch: Epoch of the driver whose checkpoint led to this.
            compactions: The compactions to run.
            uid: Part of all object keys. A completed manifest lists it as under way, so that the garbage collector
                keeps the objects (`dstl_service.formats.under_way`).

        Raises:
            CorruptDataError: A segment is damaged or not a change set; names its object.
            UnavailableError: The store does not answer.
        """
        async with self._turns.held(job):
            return await self._run(job, epoch, compactions, uid)

    async def _run(self, job: str, epoch: int, compactions: Sequence[Compaction], uid: str) -> list[Replacement]:
        inputs = {handle for compaction in compactions for handle in compaction.inputs}
        payloads: dict[SegmentHandle, BytesLike] = {}
        if sum(handle.entry.size_bytes for handle in inputs) <= _AT_ONCE_BYTES:
            payloads = await self._to_its_end(job, self._read, inputs)
        made: dict[str, list[SegmentHandle]] = {compaction.operator: [] for compaction in compactions}
        too_large: dict[str, set[int]] = {compaction.operator: set() for compaction in compactions}
        waiting: list[Segment] = []
        numbers = count()
        for compaction in compactions:
            for output in compaction.outputs:
                merged = await self._to_its_end(job, self._merge, job, epoch, compaction, output, payloads)
                if merged is None:
                    too_large[compaction.operator].add(output.partition)
                    continue
                waiting += merged
                if sum(segment.size_bytes for segment in waiting) >= _OBJECT_BYTES:
                    await self._store_segments(job, f"{uid}={next(numbers)}", waiting, made)
        await self._store_segments(job, f"{uid}={next(numbers)}", waiting, made)
        return [
            Replacement(
                compaction, tuple(made[compaction.operator]), uid, too_large=frozenset(too_large[compaction.operator])
            )
            for compaction in compactions
        ]

    async def _to_its_end(self, job: str, function: Callable[[*_Args], _T], *args: *_Args) -> _T:
        """Run a call in a thread; a cancelled caller goes on when it has ended, since its memory is held until then."""
        call = asyncio.ensure_future(self._in_thread(job, function, *args))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.gather(call, return_exceptions=True)
            raise

    def _read(self, handles: Iterable[SegmentHandle]) -> dict[SegmentHandle, BytesLike]:
        """Read segments object by object; partition by partition, each object would be requested many times."""
        ordered = sorted(handles, key=lambda handle: (handle.entry.id.checkpoint_id, handle.object_key))
        return dict(read_handles(ordered, self._store, self._cache))

    def _merge(
        self,
        job: str,
        epoch: int,
        compaction: Compaction,
        output: Output,
        payloads: Mapping[SegmentHandle, BytesLike],
    ) -> list[Segment] | None:
        """Return the segments of one result; None if its inputs are too large uncompressed."""
        # Arrow is large and few services of a cluster compact, so it loads lazily.
        from storage.change_set import merge_change_sets

        unread = [handle for handle, _ in output.inputs if handle not in payloads]
        found = {**payloads, **dict(read_handles(unread, self._store, self._cache))} if unread else payloads
        sets = ((found[handle], handle.object_key, key_groups) for handle, key_groups in output.inputs)
        keep_deleted = output.kind is not SegmentKind.BASE
        merged = merge_change_sets(
            sets,
            keep_deleted=keep_deleted,
            size_bytes_max=_SEGMENT_BYTES,
            decoded_bytes_max=self._decoded_bytes_max,
        )
        segments = []
        writer = Writer(epoch, 0)
        try:
            for sqn, (payload, changes) in enumerate(merged if keep_deleted else _with_a_base(merged)):
                set_id = ChangeSetId(job, compaction.operator, compaction.checkpoint_id, writer, output.partition, sqn)
                segments.append(Segment.of(set_id, output.key_groups, changes, payload, output.kind))
        except OverloadedError as error:
            facts = {"job": job, "operator": compaction.operator, "partition": output.partition, "error": str(error)}
            logger.warning("a partition's log is too large to compact", extra=facts)
            return None
        return segments

    async def _store_segments(
        self, job: str, name: str, waiting: list[Segment], made: dict[str, list[SegmentHandle]]
    ) -> None:
        """Upload waiting segments as one object; clear the list."""
        if not waiting:
            return
        for handle, segment in zip(await self._uploader.begin(job, waiting, name).stored(), waiting, strict=True):
            made[segment.id.operator].append(handle)
            self._cache.put(handle, segment.payload)  # the next compaction reads it
        waiting.clear()


def _with_a_base(merged: Iterable[tuple[bytes, int]]) -> Iterator[tuple[bytes, int]]:
    """
    Yield the parts of a base; an empty one if nothing exists.

    Without it the state would not say that everything was deleted: an older snapshot, which may still be under way,
    would count, and bring deleted entries back.
    """
    from storage.change_set import encode_change_set

    part = None
    for part in merged:
        yield part
    if part is None:
        yield encode_change_set({}), 0
