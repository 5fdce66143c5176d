"""
Plans restores: the snapshots and segments that bring a table from its version to a checkpoint.

A table whose version is an ancestor of the checkpoint gets only the change sets in between; any other table gets the
materializations of its key groups and the log after them, and must be emptied first. Only objects that checkpoints name
are read (I2), and every byte is verified (I10): segments here, files of snapshots by the client, which knows when they
are complete.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

from dstl_service.formats.manifest import Manifest, select_handles, state_up_to
from dstl_service.formats.materialization_index import (
    CHUNK_BYTES,
    MaterializationIndex,
    SnapshotFile,
    piece_offsets,
    read_index,
    read_piece,
)
from dstl_service.registry.job_store import JobStore
from dstl_service.restore.read_ahead import NOTHING_AHEAD, PART_BYTES_MAX, Part, ReadAhead
from dstl_service.restore.segment_cache import SegmentCache
from dstl_service.restore.truncation import bases_of, key_groups_by_materialization, key_groups_of_segment
from dstl_service.wire import CheckpointRef
from storage.checksum import BytesLike
from storage.errors import NotFoundError
from storage.key_group_sets import KeyGroups
from storage.key_groups import KeyGroupRange
from storage.model import MaterializationHandle, SegmentHandle
from storage.object_store import ObjectReader
from storage.segment_reader import bytes_to_read, read_segments


@dataclass(frozen=True, slots=True)
class PlannedMaterialization:
    """A snapshot that a restore needs, and the key groups to read from it."""

    handle: MaterializationHandle
    counted: KeyGroups


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """
    The steps of a restore; with `is_full` the table must be emptied first.

    `materializations` are applied first, then `handles` in order, both within `key_groups` only.
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

    @property
    def held_bytes(self) -> int:
        """Memory that a stream of it takes while its reader takes nothing: one object, and two copies of a frame."""
        frame_bytes = max((handle.entry.size_bytes for handle in self.handles), default=0)
        if self.materializations:
            frame_bytes = max(frame_bytes, CHUNK_BYTES)
        by_object: defaultdict[str, list[SegmentHandle]] = defaultdict(list)
        for handle in self.handles:
            by_object[handle.object_key].append(handle)
        return 2 * frame_bytes + max(map(bytes_to_read, by_object.values()), default=0)

    def of_checkpoint(self, checkpoint_id: int) -> RestorePlan:
        """Return the part of the log that one checkpoint added."""
        handles = [handle for handle in self.handles if handle.entry.id.checkpoint_id == checkpoint_id]
        return RestorePlan(self.is_full, self.key_groups, handles)

    def counted(self, handle: SegmentHandle) -> KeyGroups:
        """Return the key groups to apply from a segment of the plan."""
        return key_groups_of_segment(handle, (item.handle for item in self.materializations), self.key_groups)


FilePieces: TypeAlias = Iterator[tuple[SnapshotFile, int, bytes | Path]]
"""Files, piece by piece: file, offset, bytes; or where the whole file is."""
SnapshotStream: TypeAlias = Iterator[tuple[PlannedMaterialization, MaterializationIndex, FilePieces]]
"""Each materialization with its index and its files."""
FindFile: TypeAlias = Callable[[str, int], Path | None]
"""Returns where an object of this key and size is on this host's disk, if it is, for a table to take it away."""
Payloads: TypeAlias = Iterator[tuple[SegmentHandle, BytesLike]]


def plan_restore(
    job_store: JobStore,
    operator: str,
    key_groups: KeyGroupRange,
    from_checkpoint: CheckpointRef | None,
    to_checkpoint: CheckpointRef,
) -> RestorePlan:
    """
    Plan the restore of a table from `from_checkpoint` (None: empty) to `to_checkpoint`.

    Raises:
        NotFoundError: `to_checkpoint` does not exist.
        CorruptDataError: A manifest of the chain cannot be read.
    """
    newest_first: list[Manifest] = []
    complete_at: int | None = None
    chain = job_store.chain(to_checkpoint)
    while True:
        try:
            manifest = next(chain, None)
        except NotFoundError:
            if complete_at is None:
                raise
            break  # the table is older than the stored part of the chain
        if manifest is None:
            break
        if from_checkpoint is not None and manifest.ref == from_checkpoint:
            handles = [handle for step in reversed(newest_first) for handle in step.segments]
            return RestorePlan(False, key_groups, select_handles(handles, operator, key_groups))
        newest_first.append(manifest)
        if complete_at is None and manifest.starts_chain:
            complete_at = len(newest_first)
        if complete_at is not None and (from_checkpoint is None or manifest.id <= from_checkpoint.id):
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
    job_store: JobStore,
    operator: str,
    key_groups: KeyGroupRange,
    from_checkpoint: CheckpointRef | None,
    to_checkpoint: CheckpointRef,
) -> RestorePlan | None:
    """Return the plan for a table at the base of `to_checkpoint`; None if it is not, or not cached. Never blocks."""
    manifest = job_store.remembered(to_checkpoint) if from_checkpoint is not None else None
    if manifest is None or manifest.base != from_checkpoint or manifest.is_fence:
        return None
    return RestorePlan(False, key_groups, select_handles(manifest.segments, operator, key_groups))


def read_handles(
    wanted: Sequence[SegmentHandle], store: ObjectReader, cache: SegmentCache, ahead: ReadAhead = NOTHING_AHEAD
) -> Iterator[tuple[SegmentHandle, BytesLike]]:
    """
    Yield these segments with their payloads in the order given, from the cache where possible.

    Payloads load lazily: a consumed payload is not held, and a waiting one only if it shares an object with a consumed
    one, or is read ahead.

    Raises:
        CorruptDataError: An object is missing, damaged or truncated; names it.
    """
    steps = [list(step) for _, step in groupby(wanted, key=lambda handle: handle.entry.id.checkpoint_id)]
    for handles, (missing, stored) in zip(
        steps, ahead.in_order(_missing_part(step, store, cache) for step in steps), strict=True
    ):
        for handle in handles:
            if id(handle) in missing:
                yield next(stored)
            elif (payload := cache.peek(handle)) is not None:
                yield handle, payload
            else:  # evicted since
                yield from read_segments(store, [handle])


def read_snapshots(
    plan: RestorePlan, store: ObjectReader, ahead: ReadAhead = NOTHING_AHEAD, find: FindFile = lambda _key, _size: None
) -> SnapshotStream:
    """
    Yield the snapshots of a plan; files that `find` finds by their path.

    Raises:
        CorruptDataError: An object is missing or too short; names it.
    """
    indexes = ahead.in_order(Part(partial(read_index, store, item.handle), 0) for item in plan.materializations)
    for planned, index in zip(plan.materializations, indexes, strict=True):
        yield planned, index, _pieces(index, store, ahead, find)


def _missing_part(
    handles: Sequence[SegmentHandle], store: ObjectReader, cache: SegmentCache
) -> Part[tuple[set[int], Payloads]]:
    """Return the part that reads a checkpoint's segments that are not in the cache; it also says which."""
    missing = [handle for handle in handles if cache.get(handle) is None]
    size_bytes = bytes_to_read(missing)

    def read() -> tuple[set[int], Payloads]:
        stored: Payloads = read_segments(store, missing)
        # Read ahead, they must be in memory; a large part is read in its own turn, object by object.
        return {id(handle) for handle in missing}, (iter(list(stored)) if size_bytes <= PART_BYTES_MAX else stored)

    return Part(read, size_bytes)


def _pieces(index: MaterializationIndex, store: ObjectReader, ahead: ReadAhead, find: FindFile) -> FilePieces:
    """Yield a snapshot's files. The first piece of each is read ahead: it brings the whole file to this host's disk."""

    def first(file: SnapshotFile) -> bytes | Path:
        return find(file.object_key, file.size_bytes) or read_piece(store, file, 0)

    firsts = ahead.in_order(Part(partial(first, file), CHUNK_BYTES) for file in index.files)
    for file, found in zip(index.files, firsts, strict=True):
        yield file, 0, found
        for offset in () if isinstance(found, Path) else piece_offsets(file)[1:]:
            yield file, offset, read_piece(store, file, offset)
