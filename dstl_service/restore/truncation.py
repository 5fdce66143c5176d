"""
Truncation: the part of a state that still counts after tables were materialized. No I/O.

A materialization holds its operator's key groups up to its checkpoint. So for a key group
1. only the newest materialization that holds it counts;
2. only the log newer than that materialization counts: applied to the snapshot, an older change would restore an old
   value;
3. a segment of kind BASE holds everything that existed at its checkpoint, but no deletions. A materialization older
   than one does not count.
A segment whose key groups are all materialized at or after its checkpoint is dropped from the state; one that is
materialized in part stays for the rest. Dropped objects are deleted when no checkpoint names them any more.

The output that a sink has to publish is part of the log until it is published, and rows that a partition has set aside
until they have run. Nothing of a removed operator counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import attrgetter

from dstl_service.formats.manifest import StateView
from dstl_service.wire import REMOVED, OperatorInfo
from storage.key_group_sets import ByKeyGroups, KeyGroups, KeyGroupsLeft, within, without, without_all
from storage.key_groups import KeyGroupRange
from storage.model import MaterializationHandle, SegmentHandle, SegmentKind

_OF_SNAPSHOT, _OF_SEGMENT = attrgetter("key_groups"), attrgetter("entry.key_groups")
_NO_SNAPSHOTS: ByKeyGroups[MaterializationHandle] = ByKeyGroups((), _OF_SNAPSHOT)
_NO_SEGMENTS: ByKeyGroups[SegmentHandle] = ByKeyGroups((), _OF_SEGMENT)


def truncate(view: StateView, made: Iterable[MaterializationHandle]) -> StateView:
    """
    Return the state with new materializations, without the parts that they replace.

    Without new ones it returns the same object. One that is not newer than the state's own for its key groups does not
    enter it, so a repetition is harmless.
    """
    made = list(made)
    if not made:
        return view
    together = {handle.uid: handle for handle in (*view.materializations, *made)}
    groups: defaultdict[str, list[MaterializationHandle]] = defaultdict(list)
    for handle in together.values():
        groups[handle.operator].append(handle)
    kept = {operator: _still_counting(group, bases_of(view.log, operator)) for operator, group in groups.items()}
    indexed = {operator: ByKeyGroups(group, _OF_SNAPSHOT) for operator, group in kept.items()}
    beside: dict[tuple[str, KeyGroupRange], list[MaterializationHandle]] = {}
    log = []
    for segment in view.log:
        # A partition's segments share their range, so most of a long log needs the same few materializations.
        operator, key_groups = segment.entry.id.operator, segment.entry.key_groups
        if (operator, key_groups) not in beside:
            beside[operator, key_groups] = indexed.get(operator, _NO_SNAPSHOTS).within(key_groups)
        if key_groups_of_segment(segment, beside[operator, key_groups], key_groups):
            log.append(segment)
    ordered = sorted(
        (handle for group in kept.values() for handle in group),
        key=lambda handle: (handle.operator, handle.key_groups, handle.checkpoint_id),
    )
    return StateView(tuple(ordered), log)


def without_consumed(view: StateView, operators: Iterable[OperatorInfo]) -> StateView:
    """
    Return the state without published output of sinks, rows set aside that have run, and state of removed operators.

    It is the same object if there is nothing of the kind.
    """
    beside = {operator.name: operator for operator in operators if not operator.has_table}
    waiting = {name: {(r.checkpoint_id, r.key_groups) for r in info.set_aside} for name, info in beside.items()}
    removed = {name for name, info in beside.items() if info.kind == REMOVED}

    def is_consumed(segment: SegmentHandle) -> bool:
        operator = beside.get(segment.entry.id.operator)
        if operator is None:
            return False
        checkpoint_id = segment.entry.id.checkpoint_id
        if operator.is_sink:
            return operator.published is not None and checkpoint_id <= operator.published
        return (checkpoint_id, segment.entry.key_groups) not in waiting[operator.name]

    log = [segment for segment in view.log if not is_consumed(segment)] if beside else view.log
    tables = tuple(handle for handle in view.materializations if handle.operator not in removed)
    is_same = (len(log), len(tables)) == (len(view.log), len(view.materializations))
    return view if is_same else StateView(tables, log)


class Counting:
    """Checks many materializations against a state; one pass over the state."""

    def __init__(self, view: StateView) -> None:
        materializations: defaultdict[str, list[MaterializationHandle]] = defaultdict(list)
        bases: defaultdict[str, list[SegmentHandle]] = defaultdict(list)
        for item in view.materializations:
            materializations[item.operator].append(item)
        for segment in view.log:
            if segment.entry.kind is SegmentKind.BASE:
                bases[segment.entry.id.operator].append(segment)
        self._materializations = {name: ByKeyGroups(found, _OF_SNAPSHOT) for name, found in materializations.items()}
        self._bases = {name: ByKeyGroups(found, _OF_SEGMENT) for name, found in bases.items()}

    def would_count(self, handle: MaterializationHandle) -> bool:
        """Return whether the state would use a materialization: for some of its key groups it has nothing newer."""
        materializations = self._materializations.get(handle.operator, _NO_SNAPSHOTS).within(handle.key_groups)
        bases = self._bases.get(handle.operator, _NO_SEGMENTS).within(handle.key_groups)
        beside = [item for item in materializations if item.uid != handle.uid]
        counted = key_groups_by_materialization([*beside, handle], bases, handle.key_groups)
        return any(item.uid == handle.uid for item, _ in counted)


def bases_of(log: Iterable[SegmentHandle], operator: str) -> list[SegmentHandle]:
    """Return an operator's segments of kind BASE."""
    return [item for item in log if item.entry.kind is SegmentKind.BASE and item.entry.id.operator == operator]


def key_groups_of_segment(
    segment: SegmentHandle, materializations: Iterable[MaterializationHandle], wanted: KeyGroupRange
) -> KeyGroups:
    """Return the key groups within `wanted` for which a segment counts, given materializations of its operator."""
    checkpoint_id = segment.entry.id.checkpoint_id
    covers = (item.key_groups for item in materializations if item.checkpoint_id >= checkpoint_id)
    return within(without_all(segment.entry.key_groups, covers), wanted)


def key_groups_by_materialization(
    materializations: Iterable[MaterializationHandle], bases: Sequence[SegmentHandle], wanted: KeyGroupRange
) -> list[tuple[MaterializationHandle, KeyGroups]]:
    """
    Return the materializations that count for some of the wanted key groups, newest first, with those key groups.

    Args:
        materializations: Those of one operator.
        bases: The operator's segments of kind BASE.
        wanted: The key groups of a table.
    """
    some_bases = ByKeyGroups((base for base in bases if base.entry.key_groups.intersects(wanted)), _OF_SEGMENT)
    # If two are at one checkpoint, the one made first counts: references to it stay valid.
    by_uid = sorted(
        (handle for handle in materializations if handle.key_groups.intersects(wanted)), key=lambda handle: handle.uid
    )
    left = KeyGroupsLeft(wanted)
    counted: list[tuple[MaterializationHandle, KeyGroups]] = []
    for handle in sorted(by_uid, key=lambda handle: handle.checkpoint_id, reverse=True):
        part = left.take(handle.key_groups)
        for base in some_bases.within(handle.key_groups) if part else ():
            if base.entry.id.checkpoint_id > handle.checkpoint_id:
                part = without(part, base.entry.key_groups)
        if part:
            counted.append((handle, part))
    return counted


def _still_counting(
    materializations: Sequence[MaterializationHandle], bases: Sequence[SegmentHandle]
) -> list[MaterializationHandle]:
    everything = KeyGroupRange(
        min(handle.key_groups.first for handle in materializations),
        max(handle.key_groups.last for handle in materializations),
    )
    return [handle for handle, _ in key_groups_by_materialization(materializations, bases, everything)]
