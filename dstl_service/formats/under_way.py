"""
What is under way: snapshots and compaction results that may be put into the store, but that no state has yet.

No age and no clock tells whether an object that no manifest names will be named by a later one (I11). A list does: each
manifest says which snapshots and compactions are *under way* at it.

1. A uid is drawn for one base, and enters the list only with the checkpoint that follows exactly this base. So it
   enters once in its life; every manifest after that either carries it on or lets it go for ever.
2. Nobody puts an object of a uid before a completed manifest lists it. All keys of its objects carry the uid, and a key
   is written by its own uid only.
3. A checkpoint takes a snapshot or a result only while its base lists the uid. It then leaves the list.

So, if a manifest is the newest and neither lists nor names a uid of which an object is there, then no later one will:
the uid was listed before (2), it cannot enter again (1), and what is not listed cannot be taken (3). A rewind begins a
new base with an empty list, so an announcement for a base of before fits none after it. That is what the garbage
collector goes by: it lists the objects first and reads the newest manifest then.

Letting a uid go costs at most work, so the coordinator does it wherever a uid is of no use any more. No I/O.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dstl_service.wire import CheckpointRef, OperatorInfo, validate_operator
from storage.errors import InvalidInputError
from storage.key_groups import key_group_range
from storage.model import KeyGroupRange, MaterializationHandle, validate_name

CHECKPOINTS_MAX = 50_000
"""A snapshot that is under way for more checkpoints than this has no process any more that would ever finish it."""
_FIELDS = {"operator", "key_groups", "version", "uid", "base"}
_UID_IN_KEY = re.compile(r"/([^/=]+)(?:=[^/]+|\.json)\Z")


@dataclass(frozen=True, slots=True)
class UnderWaySnapshot:
    """
    A snapshot of a table that somebody may be storing.

    Args:
        operator: Whose table it is.
        key_groups: What the table holds.
        version: The checkpoint at which the table stood.
        uid: The materialization's own id, in the keys of all of its objects.
    """

    operator: str
    key_groups: KeyGroupRange
    version: CheckpointRef
    uid: str

    @property
    def table(self) -> tuple[str, KeyGroupRange]:
        """Of which it is; a table has one snapshot under way at a time."""
        return self.operator, self.key_groups

    def is_of(self, handle: MaterializationHandle) -> bool:
        """Say whether a handle points at this snapshot."""
        found = (handle.uid, handle.operator, handle.key_groups, handle.checkpoint_id)
        return found == (self.uid, self.operator, self.key_groups, self.version.id)


@dataclass(frozen=True, slots=True)
class Announcement:
    """A sidecar's wish to have a snapshot listed by the checkpoint that follows `base`, and by no other one."""

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
        """Read what `to_dict` wrote; `InvalidInputError` for anything else."""
        if not isinstance(data, dict) or data.keys() != _FIELDS:
            raise InvalidInputError(f"an announcement of a snapshot has the fields {', '.join(sorted(_FIELDS))}")
        if not all(isinstance(value, str) for value in data.values()):
            raise InvalidInputError("all fields of an announcement of a snapshot are texts")
        snapshot = UnderWaySnapshot(
            validate_operator(data["operator"]),
            KeyGroupRange.parse(data["key_groups"]),
            CheckpointRef.parse(data["version"]),
            validate_name("materialization", data["uid"]),
        )
        return cls(snapshot, CheckpointRef.parse(data["base"]))


def is_announcement(data: Any) -> bool:
    """Say whether what a task reported of a snapshot is its announcement; else it is the handle of a stored one."""
    return isinstance(data, dict) and "base" in data


@dataclass(frozen=True, slots=True)
class UnderWay:
    """
    The list of one manifest.

    Args:
        snapshots: One for a table at most.
        compactions: Uids of compactions whose results are being stored, or wait to be taken.
    """

    snapshots: tuple[UnderWaySnapshot, ...] = ()
    compactions: tuple[str, ...] = ()

    @property
    def uids(self) -> set[str]:
        """The uids of all that is listed."""
        return {snapshot.uid for snapshot in self.snapshots} | set(self.compactions)

    def snapshot_of(self, operator: str, key_groups: KeyGroupRange) -> UnderWaySnapshot | None:
        """Return the snapshot of a table, or None."""
        return next((item for item in self.snapshots if item.table == (operator, key_groups)), None)

    def to_dict(self) -> dict[str, Any]:
        """Return what `from_dict` reads: short, since each manifest holds the whole list."""
        versions: dict[str, dict[str, list[list[str]]]] = {}
        for item in self.snapshots:
            tables = versions.setdefault(item.version.to_text(), {}).setdefault(item.operator, [])
            tables.append([item.key_groups.to_text(), item.uid])
        return {"snapshots": versions, "compactions": list(self.compactions)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> UnderWay:
        """Read what `to_dict` wrote."""
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
        base: On which the checkpoint builds; what was announced for another one is left out (rule 1).
        announced: By the tasks of the checkpoint's batch; the newest snapshot of a table replaces an older one.
        gone: Uids of those that the checkpoint takes, and of those that none ever will.
        operators: Those of the checkpoint; tables that none of them has any more are let go.
        materializations: Those of its state; what is no newer than these is let go.
        max_parallelism: Number of the job's key groups.
    """
    known = before.uids
    carried = [item for item in before.snapshots if item.uid not in gone]
    new = [item.snapshot for item in announced if item.base == base and item.snapshot.uid not in known]
    if not carried and not new:
        return ()
    tables = {
        (operator.name, key_group_range(partition, operator.parallelism, max_parallelism))
        for operator in operators
        for partition in range(operator.parallelism)
    }
    newest = {(item.operator, item.key_groups): item.checkpoint_id for item in materializations}
    of_table = {
        item.table: item
        for item in (*carried, *new)
        if item.table in tables
        and newest.get(item.table, -1) < item.version.id
        and base.id - item.version.id <= CHECKPOINTS_MAX
    }
    ordered = sorted(of_table.values(), key=lambda item: (item.version.id, item.operator, item.key_groups.first))
    return tuple(ordered)


def uid_in_key(key: str) -> str | None:
    """Return the uid of the snapshot or the compaction that an object belongs to, as its key tells; None: of none."""
    found = _UID_IN_KEY.search(key)
    return found[1] if found is not None else None
