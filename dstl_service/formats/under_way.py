"""
The under-way list: snapshots and compaction results that may be put into the store, but that no state has yet.

Neither an age nor a clock tells whether a later manifest will name an object that none names yet (I11). A list does:
each manifest says which snapshots and compactions are *under way* at it.

1. A uid is drawn for one base, and enters the list only with the checkpoint that directly follows this base. So it
   enters at most once; every later manifest either carries it on or drops it for ever.
2. No object of a uid is put before a completed manifest lists the uid. All keys of its objects carry the uid, and a key
   is written by its own uid only.
3. A checkpoint takes a snapshot or a result only while its base lists the uid. The uid then leaves the list.

So if the newest manifest neither lists nor names the uid of an existing object, no later one will: the uid was listed
before (2), it cannot enter again (1), and an unlisted uid cannot be taken (3). A rewind begins a new base with an empty
list, so an announcement for an earlier base fits none after it. The garbage collector relies on this: it lists the
objects first and then reads the newest manifest.

Dropping a uid costs at most work, so the coordinator drops every uid that is of no more use. No I/O.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dstl_service.wire import CheckpointRef, OperatorInfo, validate_operator
from storage.errors import InvalidInputError
from storage.key_groups import KeyGroupRange, partition_of
from storage.model import MaterializationHandle
from storage.validation import validate_name

CHECKPOINTS_MAX = 50_000
"""A snapshot under way for more checkpoints than this is dropped: no process is left to finish it."""
_FIELDS = {"operator", "key_groups", "version", "uid", "base"}
_UID_IN_KEY = re.compile(r"/([^/=]+)(?:=[^/]+|\.json)\Z")


@dataclass(frozen=True, slots=True)
class UnderWaySnapshot:
    """
    A snapshot of a table that a sidecar may be storing.

    Args:
        operator: The table's operator.
        key_groups: The table's key groups.
        version: The checkpoint of the table's content.
        uid: The materialization's own id, in the keys of all of its objects.
    """

    operator: str
    key_groups: KeyGroupRange
    version: CheckpointRef
    uid: str

    @property
    def table(self) -> tuple[str, KeyGroupRange]:
        """Its table, which has at most one snapshot under way."""
        return self.operator, self.key_groups

    def is_of(self, handle: MaterializationHandle) -> bool:
        """Return whether a handle points at this snapshot."""
        found = (handle.uid, handle.operator, handle.key_groups, handle.checkpoint_id)
        return found == (self.uid, self.operator, self.key_groups, self.version.id)


@dataclass(frozen=True, slots=True)
class Announcement:
    """A sidecar's request to list a snapshot in the checkpoint that directly follows `base`, and in no other."""

    snapshot: UnderWaySnapshot
    base: CheckpointRef

    def to_dict(self) -> dict[str, Any]:
        """Return a flat JSON-able dict."""
        snapshot = self.snapshot
        return {
            "operator": snapshot.operator,
            "key_groups": snapshot.key_groups.to_text(),
            "version": snapshot.version.to_text(),
            "uid": snapshot.uid,
            "base": self.base.to_text(),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Announcement:
        """Read the result of `to_dict`; `InvalidInputError` for anything else."""
        if not isinstance(data, dict) or data.keys() != _FIELDS:
            raise InvalidInputError(f"an announcement must have exactly the fields {', '.join(sorted(_FIELDS))}")
        if not all(isinstance(value, str) for value in data.values()):
            raise InvalidInputError("all fields of an announcement must be strings")
        snapshot = UnderWaySnapshot(
            validate_operator(data["operator"]),
            KeyGroupRange.parse(data["key_groups"]),
            CheckpointRef.parse(data["version"]),
            validate_name("materialization", data["uid"]),
        )
        return cls(snapshot, CheckpointRef.parse(data["base"]))


def is_announcement(data: Any) -> bool:
    """Return whether a task's report of a snapshot is an announcement; else it is the handle of a stored one."""
    return isinstance(data, dict) and "base" in data


@dataclass(frozen=True)
class UnderWay:
    """
    The list of one manifest.

    Args:
        snapshots: At most one per table.
        compactions: Uids of compactions whose results are being stored, or wait to be taken.
    """

    snapshots: tuple[UnderWaySnapshot, ...] = ()
    compactions: tuple[str, ...] = ()

    @cached_property  # each table of a host asks, for each checkpoint
    def uids(self) -> frozenset[str]:
        """All listed uids."""
        return frozenset({snapshot.uid for snapshot in self.snapshots} | set(self.compactions))

    def snapshot_of(self, operator: str, key_groups: KeyGroupRange) -> UnderWaySnapshot | None:
        """Return the snapshot of a table, or None."""
        return self._by_table.get((operator, key_groups))

    @cached_property
    def _by_table(self) -> dict[tuple[str, KeyGroupRange], UnderWaySnapshot]:
        return {snapshot.table: snapshot for snapshot in self.snapshots}

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form that `from_dict` reads; compact, since each manifest holds the whole list."""
        versions: dict[str, dict[str, list[list[str]]]] = {}
        for item in self.snapshots:
            tables = versions.setdefault(item.version.to_text(), {}).setdefault(item.operator, [])
            tables.append([item.key_groups.to_text(), item.uid])
        return {"snapshots": versions, "compactions": list(self.compactions)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> UnderWay:
        """Read the result of `to_dict`."""
        snapshots = tuple(
            UnderWaySnapshot(operator, KeyGroupRange.parse(key_groups), CheckpointRef.parse(version), uid)
            for version, operators in data["snapshots"].items()
            for operator, tables in operators.items()
            for key_groups, uid in tables
        )
        return cls(snapshots, tuple(data["compactions"]))


NOTHING = UnderWay()


def followed(
    before: UnderWay,
    base: CheckpointRef,
    announced: Iterable[Announcement],
    gone: Collection[str],
    operators: Sequence[OperatorInfo],
    materializations: Iterable[MaterializationHandle],
    max_parallelism: int,
) -> tuple[UnderWaySnapshot, ...]:
    """
    Return the snapshots that the checkpoint after `base` lists.

    Args:
        before: The base's list.
        base: The checkpoint's base; announcements for another base are ignored (rule 1).
        announced: Announcements of the batch's tasks; a new snapshot of a table replaces an older one.
        gone: Uids that the checkpoint takes, and those that none ever will.
        operators: The checkpoint's operators; snapshots of tables that none of them has are dropped.
        materializations: Those of its state; snapshots that are not newer are dropped.
        max_parallelism: Number of the job's key groups.
    """
    known = before.uids
    carried = [item for item in before.snapshots if item.uid not in gone]
    new = [item.snapshot for item in announced if item.base == base and item.snapshot.uid not in known]
    if not carried and not new:
        return ()
    parallelism = {operator.name: operator.parallelism for operator in operators if operator.has_table}
    newest = {(item.operator, item.key_groups): item.checkpoint_id for item in materializations}
    of_table = {
        item.table: item
        for item in (*carried, *new)
        if item.operator in parallelism
        and partition_of(item.key_groups, parallelism[item.operator], max_parallelism) is not None
        and newest.get(item.table, -1) < item.version.id
        and base.id - item.version.id <= CHECKPOINTS_MAX
    }
    ordered = sorted(of_table.values(), key=lambda item: (item.version.id, item.operator, item.key_groups.first))
    return tuple(ordered)


def uid_in_key(key: str) -> str | None:
    """Return the uid in the key of an object of a snapshot or compaction; None for other keys."""
    found = _UID_IN_KEY.search(key)
    return found[1] if found is not None else None
