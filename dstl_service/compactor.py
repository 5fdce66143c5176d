"""
Performs compactions: reads the segments of each partition, merges them, and stores the results as segment objects.

One partition is merged at a time, so its log, uncompressed, has to fit into memory. Reading and merging are blocking
and run in a thread; what is stored goes through the same uploads as change sets, with a time-out for large objects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from dstl_service.log_compaction import Compaction, Output, Replacement
from dstl_service.restore import read_handles
from dstl_service.segment_cache import SegmentCache
from dstl_service.uploads import Uploader
from storage.clock import Clock
from storage.model import ChangeSetId, Segment, SegmentHandle, SegmentKind, Writer
from storage.object_store import ObjectStore

_OBJECT_BYTES = 32 * 1024 * 1024
_SEGMENT_BYTES = 8 * 1024 * 1024

_T = TypeVar("_T")


class Compactor:
    """Compacts the logs of any job of one service."""

    def __init__(self, store: ObjectStore, cache: SegmentCache, uploader: Uploader, clock: Clock) -> None:
        self._store = store
        self._cache = cache
        self._uploader = uploader
        self._clock = clock

    async def run(self, job: str, epoch: int, compactions: Sequence[Compaction]) -> list[Replacement]:
        """
        Do these compactions; their results share objects.

        Raises:
            CorruptDataError: A segment is damaged, or is no change set; names its object.
            UnavailableError: The store does not answer.
        """
        began_ms = self._clock.now_ms()
        made: list[tuple[Compaction, Segment]] = []
        handles: list[SegmentHandle] = []
        stored = 0
        for compaction in compactions:
            for output in compaction.outputs:
                for segment in await self._in_thread(self._merge, job, epoch, compaction, output):
                    made.append((compaction, segment))
                    if sum(waiting.size_bytes for _, waiting in made[stored:]) >= _OBJECT_BYTES:
                        handles += await self._uploader.begin(job, [waiting for _, waiting in made[stored:]]).stored()
                        stored = len(made)
        if made[stored:]:
            handles += await self._uploader.begin(job, [waiting for _, waiting in made[stored:]]).stored()
        return [
            Replacement(
                compaction,
                tuple(handle for (of, _), handle in zip(made, handles, strict=True) if of is compaction),
                began_ms,
            )
            for compaction in compactions
        ]

    def _merge(self, job: str, epoch: int, compaction: Compaction, output: Output) -> list[Segment]:
        # Arrow is large and few services of a cluster compact, so it is only loaded then.
        from storage.change_set import merge_change_sets

        payloads = read_handles([handle for handle, _ in output.inputs], self._store, self._cache)
        sets = (
            (payload, handle.object_key, key_groups)
            for (handle, payload), (_, key_groups) in zip(payloads, output.inputs, strict=True)
        )
        keep_deleted = output.kind is not SegmentKind.BASE
        merged = merge_change_sets(sets, keep_deleted=keep_deleted, size_bytes_max=_SEGMENT_BYTES)
        segments = []
        for sqn, (payload, count) in enumerate(merged):
            set_id = ChangeSetId(
                job, compaction.operator, compaction.checkpoint_id, Writer(epoch, 0), output.partition, sqn
            )
            segments.append(Segment.of(set_id, output.key_groups, count, payload, output.kind))
        return segments

    async def _in_thread(self, function: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(None, function, *args)
