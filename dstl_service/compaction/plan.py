"""
Decides log compaction: when an operator's log is rewritten to the last change per key, and how the result enters.

Without a materialization the result is a *base*: everything that exists, without deletions. On top of materializations
it is a *compacted* log, which keeps deletions, since the key may be in a materialization. The log that counts against
the bound is everything but bases; the table's size is estimated as that of the bases and the materializations. A
compaction that ends after further checkpoints replaces exactly the segments it read; it enters with a later checkpoint,
whose manifest is complete, while its base lists the compaction as under way (`dstl_service.formats.under_way`). A merge
must fit into memory, so a partition with too large a log is left to materializations, with all partitions that share
segments with it. Their log does not count when the rest is checked: else the rest would be compacted again at every
checkpoint. A partition that was materialized meanwhile keeps the rest of its log, and the rest of the result
enters: with many tables, each checkpoint takes snapshots of some. No I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from operator import attrgetter

from dstl_service.formats.manifest import StateView
from dstl_service.restore.truncation import key_groups_of_segment
from dstl_service.wire import OperatorInfo
from storage.errors import InvalidInputError
from storage.key_group_sets import ByKeyGroups, KeyGroups
from storage.key_groups import KeyGroupRange, key_group_range
from storage.model import MaterializationHandle, SegmentHandle, SegmentKind

_KEY_GROUPS = attrgetter("key_groups")
_FRESH_SHARE_MIN = 0.25
_SEGMENTS_FACTOR = 4


@dataclass(frozen=True, slots=True)
class CompactionSettings:
    """When logs are compacted."""

    enabled: bool = True
    """Off: the log grows until a materialization replaces it."""
    log_ratio_max: float = 1.0
    """Bound of an operator's log, as a multiple of its table's stored size."""
    floor_bytes: int = 4 * 1024 * 1024
    """A log up to this size is not compacted: its storage costs less than the requests."""
    segments_max: int = 2048
    """A log of more segments is compacted whatever its size, since manifests name each segment: once a quarter of its
    bytes is new, and in any case with four times as many."""
    base_bytes_max: int = 512 * 1024 * 1024
    """
    A larger operator state is not rewritten as a base, nor, on top of materializations, a partition with a larger log;
    such a log waits for materializations, and so does that of a partition that is larger uncompressed, with 40 bytes
    more for each change.
    """

    def __post_init__(self) -> None:
        if not self.log_ratio_max > 0:
            raise InvalidInputError(f"compaction log_ratio_max must be above 0, got {self.log_ratio_max}")
        for name in ("floor_bytes", "segments_max", "base_bytes_max"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"compaction {name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class LogSize:
    """Size of an operator's state: compressed bytes as stored, and the number of segments not compacted yet."""

    table_bytes: int
    log_bytes: int
    fresh_bytes: int
    segments: int


@dataclass(frozen=True, slots=True)
class Output:
    """One partition's part of a compaction: its result, and its input segments with the key groups to read."""

    partition: int
    key_groups: KeyGroupRange
    kind: SegmentKind
    inputs: tuple[tuple[SegmentHandle, KeyGroups], ...]


@dataclass(frozen=True, slots=True)
class Compaction:
    """
    A planned compaction of the segments that an operator's state has at `checkpoint_id`.

    Either all segments of a partition are among its inputs or none is.
    """

    operator: str
    checkpoint_id: int
    inputs: frozenset[SegmentHandle]
    materializations: frozenset[MaterializationHandle]
    outputs: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class Replacement:
    """
    A finished compaction.

    Args:
        compaction: Its plan.
        added: Replaces the plan's inputs.
        uid: Part of the keys of its objects.
        too_large: Partitions whose logs were not merged, since they are too large uncompressed.
    """

    compaction: Compaction
    added: tuple[SegmentHandle, ...]
    uid: str
    too_large: frozenset[int] = frozenset()


def log_size(view: StateView, operator: str) -> LogSize:
    """Return the size of an operator's state."""
    table = sum(handle.size_bytes for handle in view.materializations if handle.operator == operator)
    log = fresh = segments = 0
    for handle in view.log:
        if handle.entry.id.operator != operator:
            continue
        size = handle.entry.size_bytes
        if handle.entry.kind is SegmentKind.BASE:
            table += size
            continue
        log += size
        if handle.entry.kind is SegmentKind.CHANGES:
            fresh += size
            segments += 1
    return LogSize(table, log, fresh, segments)


def choose_compactions(
    view: StateView,
    operators: Iterable[OperatorInfo],
    sizes: Mapping[str, LogSize],
    checkpoint_id: int,
    max_parallelism: int,
    settings: CompactionSettings,
) -> list[Compaction]:
    """
    Return the compactions due for a checkpoint's state; a log within its bound has none.

    Args:
        view: The state.
        operators: Its operators.
        sizes: The `log_size` of each of them.
        checkpoint_id: The checkpoint's.
        max_parallelism: Number of the job's key groups.
        settings: The bounds.
    """
    if not settings.enabled:
        return []
    tables = (operator for operator in operators if operator.has_table)
    due = [operator for operator in tables if _is_due(sizes[operator.name], settings)]
    planned = (_plan(view, operator, checkpoint_id, max_parallelism, settings) for operator in due)
    return [compaction for compaction in planned if compaction is not None]


def apply(view: StateView, replacement: Replacement) -> StateView | None:
    """
    Return the view with a compaction's result, or None if the view no longer has all inputs of the part that can enter.

    Left out are partitions that were too large to merge, and those whose materializations changed: a new one may lack
    a deletion that the result dropped.
    """
    compaction = replacement.compaction
    changed = _materializations(view, compaction.operator) ^ compaction.materializations
    inputs, left_out = compaction.inputs, _partitions_of(changed, compaction.outputs) | replacement.too_large
    if left_out:
        by_partition = {output.partition: [handle for handle, _ in output.inputs] for output in compaction.outputs}
        left_out, staying = _with_neighbours(left_out, by_partition)
        inputs -= staying
    added = [handle for handle in replacement.added if handle.entry.id.partition not in left_out]
    remaining = [handle for handle in view.log if handle not in inputs]
    if not inputs or len(remaining) + len(inputs) != len(view.log):
        return None
    return replace(view, log=[*added, *remaining])


def _partitions_of(materializations: Collection[MaterializationHandle], outputs: Iterable[Output]) -> set[int]:
    """Return the partitions of the outputs that share key groups with any of these materializations."""
    by_key_groups = ByKeyGroups(outputs, _KEY_GROUPS)
    return {output.partition for item in materializations for output in by_key_groups.within(item.key_groups)}


def _is_due(size: LogSize, settings: CompactionSettings) -> bool:
    # A compacted log that is still as large as the table shrinks no further until much of it is new; with many
    # partitions a few checkpoints have many segments, and the whole log would be rewritten for them.
    is_worthwhile = size.fresh_bytes >= _FRESH_SHARE_MIN * size.log_bytes
    if size.segments > settings.segments_max:
        return is_worthwhile or size.segments > _SEGMENTS_FACTOR * settings.segments_max
    return is_worthwhile and size.log_bytes > max(settings.floor_bytes, settings.log_ratio_max * size.table_bytes)


def _plan(
    view: StateView, operator: OperatorInfo, checkpoint_id: int, max_parallelism: int, settings: CompactionSettings
) -> Compaction | None:
    handles = [handle for handle in view.log if handle.entry.id.operator == operator.name]
    materializations = _materializations(view, operator.name)
    if not materializations and sum(handle.entry.size_bytes for handle in handles) > settings.base_bytes_max:
        return None
    by_partition = _by_partition(handles, operator.parallelism, max_parallelism)
    by_key_groups = ByKeyGroups(materializations, _KEY_GROUPS)
    outputs: list[Output] = []
    too_large: set[int] = set()
    for partition in range(operator.parallelism):
        key_groups = key_group_range(partition, operator.parallelism, max_parallelism)
        beside = by_key_groups.within(key_groups)
        counted = ((h, key_groups_of_segment(h, beside, key_groups)) for h in by_partition[partition])
        inputs = [(handle, counting) for handle, counting in counted if counting]
        is_materialized = bool(beside)
        if is_materialized and any(handle.entry.kind is SegmentKind.BASE for handle, _ in inputs):
            # Part of the range has a base without deletions, part a materialization: wait until the materialization
            # covers it.
            return None
        if sum(handle.entry.size_bytes for handle, _ in inputs) > settings.base_bytes_max:
            too_large.add(partition)
        elif inputs:
            kind = SegmentKind.COMPACTED if is_materialized else SegmentKind.BASE
            outputs.append(Output(partition, key_groups, kind, tuple(inputs)))
    if too_large:
        left_alone, staying = _with_neighbours(too_large, dict(enumerate(by_partition)))
        handles = [handle for handle in handles if handle not in staying]
        if not _is_due(log_size(replace(view, log=handles), operator.name), settings):
            return None
        outputs = [output for output in outputs if output.partition not in left_alone]
    return Compaction(operator.name, checkpoint_id, frozenset(handles), materializations, tuple(outputs))


def _with_neighbours(
    partitions: AbstractSet[int], by_partition: Mapping[int, Sequence[SegmentHandle]]
) -> tuple[set[int], set[SegmentHandle]]:
    """
    Return these partitions with all that share segments with them, and their segments.

    A segment of two partitions that stayed for one of them would be applied to the other again, below its base, which
    no longer has the deletions.
    """
    found: set[int] = set()
    segments: set[SegmentHandle] = set()
    new = set(partitions)
    while new:
        found |= new
        segments.update(handle for partition in new for handle in by_partition[partition])
        new = {
            partition
            for partition, handles in by_partition.items()
            if partition not in found and not segments.isdisjoint(handles)
        }
    return found, segments


def _by_partition(
    handles: Sequence[SegmentHandle], parallelism: int, max_parallelism: int
) -> list[list[SegmentHandle]]:
    """Return the handles of each partition, in the order in which they apply; one pass over all handles."""

    def position(handle: SegmentHandle) -> tuple[int, int, int, int]:
        set_id = handle.entry.id
        return set_id.checkpoint_id, set_id.writer.epoch, set_id.writer.attempt, set_id.sqn

    found: list[list[SegmentHandle]] = [[] for _ in range(parallelism)]
    for handle in sorted(handles, key=position):
        owned = handle.entry.key_groups
        first, last = (key_group * parallelism // max_parallelism for key_group in (owned.first, owned.last))
        for partition in range(first, min(last, parallelism - 1) + 1):
            found[partition].append(handle)
    return found


def _materializations(view: StateView, operator: str) -> frozenset[MaterializationHandle]:
    return frozenset(handle for handle in view.materializations if handle.operator == operator)
