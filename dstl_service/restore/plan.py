"""
What a table lacks: from its version and a checkpoint to the snapshots and segments that lead from one to the other.

A table whose version is an ancestor of the checkpoint gets only the change sets in between; any other table gets the
materializations of its key groups and the log behind them, and must be emptied first. Only what checkpoints name is
read (I2), and every byte is verified (I10): segments here, files of snapshots by the client, which knows when it has
them whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from dstl_service.formats.manifest import Manifest, select_handles, state_up_to
from dstl_service.formats.materialization_index import MaterializationIndex, SnapshotFile, read_file, read_index
from dstl_service.registry.job_store import JobStore
from dstl_service.restore.segment_cache import SegmentCache
from dstl_service.restore.truncation import bases_of, key_groups_by_materialization, key_groups_of_segment
from dstl_service.wire import CheckpointRef
from storage.checksum import BytesLike
from storage.errors import NotFoundError
from storage.key_group_sets import KeyGroups
from storage.model import KeyGroupRange, MaterializationHandle, SegmentHandle
from storage.object_store import ObjectReader
from storage.segment_reader import read_segments


@dataclass(frozen=True, slots=True)
class PlannedMaterialization:
    """A snapshot that a restore needs, and the key groups for which it counts."""

    handle: MaterializationHandle
    counted: KeyGroups


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """
    `is_full` tells that the table must be empty before the rest is applied.

    First come `materializations`, then `handles` in this order. What counts of them lies within `key_groups`.
    """

    is_full: bool
    key_groups: KeyGroupRange
    handles: list[SegmentHandle]
    materializations: tuple[PlannedMaterialization, ...] = ()

    @property
    def log_bytes(self) -> int:
        """Size of all payloads."""
        return sum(handle.entry.size_bytes for handle in self.handles)

    @property
    def size_bytes(self) -> int:
        """Size of all payloads and snapshots."""
        return self.log_bytes + sum(item.handle.size_bytes for item in self.materializations)

    def counted(self, handle: SegmentHandle) -> KeyGroups:
        """Return the key groups for which a segment of the plan counts."""
        return key_groups_of_segment(handle, (item.handle for item in self.materializations), self.key_groups)


SnapshotStream: TypeAlias = Iterator[
    tuple[PlannedMaterialization, MaterializationIndex, Iterator[tuple[SnapshotFile, int, bytes]]]
]
"""Each materialization with its index and its files, piece by piece: file, offset, bytes."""


def plan_restore(
    job_store: JobStore, operator: str, key_groups: KeyGroupRange, have: CheckpointRef | None, want: CheckpointRef
) -> RestorePlan:
    """
    Decide what leads from `have` to `want`.

    Raises:
        NotFoundError: `want` does not exist.
        CorruptDataError: A manifest of the chain cannot be read.
    """
    newest_first: list[Manifest] = []
    complete_at: int | None = None
    chain = job_store.chain(want)
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
            return RestorePlan(False, key_groups, select_handles(handles, operator, key_groups))
        newest_first.append(manifest)
        if complete_at is None and manifest.starts_chain:
            complete_at = len(newest_first)
        if complete_at is not None and (have is None or manifest.id <= have.id):
            break
    state = state_up_to(newest_first[:complete_at])
    snapshots = [handle for handle in state.materializations if handle.operator == operator]
    counted = key_groups_by_materialization(snapshots, bases_of(state.log, operator), key_groups)
    beside = [handle for handle, _ in counted]
    handles = [
        handle
        for handle in select_handles(state.log, operator, key_groups)
        if key_groups_of_segment(handle, beside, key_groups)
    ]
    return RestorePlan(True, key_groups, handles, tuple(PlannedMaterialization(*item) for item in counted))


def plan_step(
    job_store: JobStore, operator: str, key_groups: KeyGroupRange, have: CheckpointRef | None, want: CheckpointRef
) -> RestorePlan | None:
    """Return the plan of a table that stands right before `want`, if that is in memory; the usual case. Never waits."""
    manifest = job_store.remembered(want) if have is not None else None
    if manifest is None or manifest.base != have or manifest.is_fence:
        return None
    return RestorePlan(False, key_groups, select_handles(manifest.segments, operator, key_groups))


def read_plan(plan: RestorePlan, store: ObjectReader, cache: SegmentCache) -> Iterator[tuple[SegmentHandle, BytesLike]]:
    """
    Yield the payloads of a plan's segments in order, from memory where they are there.

    Raises:
        CorruptDataError: An object is missing, damaged or cut off; names it.
    """
    return read_handles(plan.handles, store, cache)


def read_handles(
    wanted: Sequence[SegmentHandle], store: ObjectReader, cache: SegmentCache
) -> Iterator[tuple[SegmentHandle, BytesLike]]:
    """
    Yield these segments in the order given; see `read_plan`.

    Each payload is got when it is asked for, so that of those that were taken none is held, and of those that wait at
    most what shares an object with one that was taken.
    """
    for _, group in groupby(wanted, key=lambda handle: handle.entry.id.checkpoint_id):
        handles = list(group)
        missing = {id(handle) for handle in handles if cache.get(handle) is None}
        stored = read_segments(store, [handle for handle in handles if id(handle) in missing])
        for handle in handles:
            if id(handle) in missing:
                yield next(stored)
            elif (payload := cache.peek(handle)) is not None:
                yield handle, payload
            else:  # dropped from memory since
                yield from read_segments(store, [handle])


def read_snapshots(plan: RestorePlan, store: ObjectReader) -> SnapshotStream:
    """
    Yield the snapshots of a plan.

    Raises:
        CorruptDataError: An object is missing or too short; names it.
    """
    for planned in plan.materializations:
        index = read_index(store, planned.handle)
        yield planned, index, ((file, offset, data) for file in index.files for offset, data in read_file(store, file))
