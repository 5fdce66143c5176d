"""
Which rows of an operator wait in the log, by checkpoint and key groups. No I/O.

A manifest lists them with a companion of the operator, of kind `SET_ASIDE`, whose changes they are. An entry without
rows only says that a batch's time has not passed in the partition yet: timers may be due in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby

from backend_client.batch_time import BatchTime
from dstl_service.wire import SET_ASIDE, SET_ASIDE_SUFFIX, CheckpointInfo, OperatorInfo, RowsSetAside
from storage.errors import InternalError
from storage.key_groups import KeyGroupRange

Waiting = tuple[RowsSetAside, ...]


def companion_of(operator: str) -> str:
    """Return the name of an operator's companion."""
    return operator + SET_ASIDE_SUFFIX


def waiting_of(latest: CheckpointInfo | None) -> dict[str, Waiting]:
    """Return the entries that a checkpoint lists, by name of the companion; an empty one if its rows have all run."""
    operators = latest.operators if latest is not None else ()
    return {info.name: tuple(info.set_aside) for info in operators if info.kind == SET_ASIDE}


def companion_info(operator: OperatorInfo, columns: str, waiting: Waiting) -> OperatorInfo:
    """Return a manifest's entry for an operator's companion; `columns` describes the columns of its rows."""
    return OperatorInfo(
        companion_of(operator.name), operator.parallelism, columns, {}, kind=SET_ASIDE, set_aside=list(waiting)
    )


def by_owner(waiting: Iterable[RowsSetAside], parallelism: int, max_parallelism: int) -> Mapping[int, Waiting]:
    """
    Return the entries of each partition that has any.

    There may be thousands of partitions and of entries, so no partition looks at those of all others.
    """
    found = defaultdict[int, list[RowsSetAside]](list)
    for entry in waiting:
        groups = entry.first_key_group, entry.last_key_group
        first, last = (key_group * parallelism // max_parallelism for key_group in groups)
        for partition in range(first, last + 1):
            found[partition].append(entry)
    return {partition: tuple(entries) for partition, entries in found.items()}


def to_run(waiting: Iterable[RowsSetAside], key_groups: KeyGroupRange, *, with_lost: bool = False) -> Waiting:
    """Return the entries that a partition runs before its own rows, in order of arrival; `with_lost` adds lost ones."""
    found = [entry for entry in waiting if (with_lost or not entry.is_lost) and entry.key_groups.intersects(key_groups)]
    return tuple(sorted(found, key=lambda entry: (entry.checkpoint_id, entry.first_key_group)))


def by_partition(waiting: Waiting) -> Iterator[Waiting]:
    """
    Yield the entries of each batch and partition.

    After a change of parallelism, the partition that runs them has parts of several.
    """
    for _, entries in groupby(waiting, key=lambda entry: (entry.checkpoint_id, entry.key_groups)):
        yield tuple(entries)


def after_batch(
    waiting: Waiting,
    stalled: Collection[KeyGroupRange],
    added: Iterable[RowsSetAside],
    *,
    with_lost: bool = False,
) -> Waiting:
    """
    Return the entries that wait after a batch in which all partitions but the stalled ones have run earlier ones.

    With `with_lost` they have also run the lost ones.

    Raises:
        InternalError: A stalled partition has a part of other partitions' rows, of which the rest has run.
    """
    own = frozenset(stalled)
    left = [entry for entry in waiting if (entry.is_lost and not with_lost) or entry.key_groups in own]
    for key_groups in {entry.key_groups for entry in waiting if with_lost or not entry.is_lost} - own:
        if any(key_groups.intersects(other) for other in own):
            raise InternalError(f"rows of key groups {key_groups.to_text()} have run in part")
    return (*left, *added)


def without_lost(waiting: Iterable[RowsSetAside]) -> Waiting:
    """Return the waiting entries without the lost ones."""
    return tuple(entry for entry in waiting if not entry.is_lost)


def time_of(entry: RowsSetAside) -> BatchTime | None:
    """Return the time of an entry's batch; None if no operator used time."""
    if entry.timestamp_ms is None or entry.watermark_ms is None or entry.previous_watermark_ms is None:
        return None
    return BatchTime(entry.timestamp_ms, entry.watermark_ms, entry.previous_watermark_ms)


def closing_time(entry: RowsSetAside) -> BatchTime | None:
    """Return the time for work that the batch's rows have made due; None if nothing can be due."""
    time = time_of(entry)
    if time is None or entry.closed_ms is None or entry.closed_ms <= time.watermark_ms:
        return None
    return replace(time, watermark_ms=entry.closed_ms, previous_watermark_ms=time.watermark_ms)
