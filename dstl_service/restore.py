"""
What a table lacks: from its version and a checkpoint to the segments that lead from one to the other.

A table whose version is an ancestor of the checkpoint gets only the change sets in between; any other table gets the
whole log and must be emptied first. Only what checkpoints name is read (I2), and every byte is verified (I10).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from dstl_service.job_store import JobStore
from dstl_service.manifest import Manifest, ManifestKind, log_up_to, select_handles
from dstl_service.segment_cache import SegmentCache
from dstl_service.wire import CheckpointRef
from storage.checksum import BytesLike
from storage.errors import NotFoundError
from storage.model import KeyGroupRange, SegmentHandle
from storage.object_store import ObjectStore
from storage.segment_reader import read_segments


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """`is_full` tells that the table must be empty before `handles` are applied in this order."""

    is_full: bool
    handles: list[SegmentHandle]

    @property
    def size_bytes(self) -> int:
        """Size of all payloads."""
        return sum(handle.entry.size_bytes for handle in self.handles)


def plan_restore(
    jobs: JobStore, operator: str, key_groups: KeyGroupRange, have: CheckpointRef | None, want: CheckpointRef
) -> RestorePlan:
    """
    Decide what leads from `have` to `want`.

    Raises:
        NotFoundError: `want` does not exist.
        CorruptDataError: A manifest of the chain cannot be read.
    """
    newest_first: list[Manifest] = []
    complete_at: int | None = None
    chain = jobs.chain(want)
    while True:
        try:
            manifest = next(chain, None)
        except NotFoundError:
            if complete_at is None:
                raise
            break  # the table is older than what is kept of the chain
        if manifest is None:
            break
        if have is not None and manifest.ref == have:
            handles = [handle for step in reversed(newest_first) for handle in step.segments]
            return RestorePlan(False, select_handles(handles, operator, key_groups))
        newest_first.append(manifest)
        if complete_at is None and (manifest.kind is ManifestKind.COMPLETE or manifest.base is None):
            complete_at = len(newest_first)
        if complete_at is not None and (have is None or manifest.id <= have.id):
            break
    return RestorePlan(True, select_handles(log_up_to(newest_first[:complete_at]), operator, key_groups))


def read_plan(plan: RestorePlan, store: ObjectStore, cache: SegmentCache) -> Iterator[tuple[SegmentHandle, BytesLike]]:
    """
    Yield the plan's payloads in order, from memory where they are there.

    Raises:
        CorruptDataError: An object is missing, damaged or cut off; names it.
    """
    return read_handles(plan.handles, store, cache)


def read_handles(
    wanted: Sequence[SegmentHandle], store: ObjectStore, cache: SegmentCache
) -> Iterator[tuple[SegmentHandle, BytesLike]]:
    """Yield these segments in the order given; see `read_plan`."""
    for _, group in groupby(wanted, key=lambda handle: handle.entry.id.checkpoint_id):
        handles = list(group)
        payloads = {id(handle): cache.get(handle) for handle in handles}
        missing = [handle for handle in handles if payloads[id(handle)] is None]
        if missing:
            for handle, payload in read_segments(store, missing):
                payloads[id(handle)] = payload
        for handle in handles:
            payload_or_none = payloads[id(handle)]
            assert payload_or_none is not None
            yield handle, payload_or_none
