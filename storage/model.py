"""
The value types of stored changes. Frozen, validated on construction, no I/O.

A writer's change set travels as a `Segment`. A segment object holds many segments and describes each by a
`SegmentEntry`. A `SegmentHandle` points to one of them from outside.

    ChangeSetId ─┬─ Segment       with its payload: what goes into an object
                 └─ SegmentEntry  with its offset: one row of the object's index ── SegmentHandle  entry and object

Integers stay below 2**53, so that every JSON reader parses them exactly; checksums are written as hexadecimal text.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from storage.checksum import BytesLike, checksum64
from storage.errors import InvalidInputError
from storage.key_groups import KeyGroupRange
from storage.validation import (
    CHECKSUM_MAX,
    COUNT_MAX,
    KEY_GROUP_MAX,
    NUMBER_MAX,
    OBJECT_BYTES_MAX,
    SEGMENT_BYTES_MAX,
    check_fields,
    check_int,
    shorten,
    validate_name,
)

_CHECKSUM = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True, order=True)
class Writer:
    """
    The writer of a change set: one attempt of one task under one run of the driver.

    Args:
        epoch: Fencing number of the driver's run; the higher one wins.
        attempt: Spark's `taskAttemptId`.
    """

    epoch: int
    attempt: int

    def __post_init__(self) -> None:
        check_int("epoch", self.epoch, NUMBER_MAX)
        check_int("attempt", self.attempt, NUMBER_MAX)


@dataclass(frozen=True, slots=True, order=True)
class ChangeSetId:
    """
    The identity of a change set; the same change set sent twice has the same id (I8).

    Args:
        job: Name of the job.
        operator: Name of the stateful operator in it.
        checkpoint_id: Spark's batch id.
        writer: Its writer.
        partition: Number of the partition in the batch, 0..32767.
        sqn: Sequence number within its writer and partition, from 0.
    """

    job: str
    operator: str
    checkpoint_id: int
    writer: Writer
    partition: int
    sqn: int

    def __post_init__(self) -> None:
        validate_name("job", self.job)
        validate_name("operator", self.operator)
        check_int("checkpoint id", self.checkpoint_id, NUMBER_MAX)
        check_int("partition", self.partition, KEY_GROUP_MAX)
        check_int("sqn", self.sqn, NUMBER_MAX)

    def to_dict(self) -> dict[str, Any]:
        """Return the id as a flat JSON-able dict."""
        return {
            "job": self.job,
            "operator": self.operator,
            "checkpoint": self.checkpoint_id,
            "epoch": self.writer.epoch,
            "attempt": self.writer.attempt,
            "partition": self.partition,
            "sqn": self.sqn,
        }

    @classmethod
    def from_dict(cls, data: Any) -> ChangeSetId:
        """Read what `to_dict` wrote; `InvalidInputError` for other fields, types or bounds."""
        check_fields("change set id", data, _ID_FIELDS)
        return _id_of(data)


class SegmentKind(enum.StrEnum):
    """The content of a segment."""

    CHANGES = "changes"
    """The changes of one writer in one checkpoint."""
    COMPACTED = "compacted"
    """The last change per key of several checkpoints, up to the named one; deletions are kept."""
    BASE = "base"
    """The complete state at the named checkpoint: like COMPACTED from the job's start, without deletions."""


@dataclass(frozen=True, slots=True)
class Segment:
    """
    A sealed change set on its way into an object.

    Args:
        id: Its identity.
        key_groups: The range that its writer owned.
        count: Number of changes in it, 0..2**31-1.
        payload: Opaque bytes, at most SEGMENT_BYTES_MAX; not copied, so it must not change afterwards.
        checksum: `checksum64(payload)`, computed where the payload was made; `encode_object` verifies it.
        kind: Its kind of content.
    """

    id: ChangeSetId
    key_groups: KeyGroupRange
    count: int
    payload: BytesLike = field(repr=False)
    checksum: int
    kind: SegmentKind = SegmentKind.CHANGES

    def __post_init__(self) -> None:
        check_int("count", self.count, COUNT_MAX)
        check_int("checksum", self.checksum, CHECKSUM_MAX)
        check_int("payload size in bytes", self.size_bytes, SEGMENT_BYTES_MAX)

    @classmethod
    def of(
        cls,
        id: ChangeSetId,  # noqa: A002
        key_groups: KeyGroupRange,
        count: int,
        payload: BytesLike,
        kind: SegmentKind = SegmentKind.CHANGES,
    ) -> Segment:
        """Make a segment with the checksum of its payload."""
        return cls(id, key_groups, count, payload, checksum64(payload), kind)

    @property
    def size_bytes(self) -> int:
        """Length of the payload."""
        return memoryview(self.payload).nbytes


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """
    A segment's place in its object: one row of the object's index.

    Args:
        id: Its identity.
        key_groups: The range that its writer owned.
        count: Number of changes in it.
        offset_bytes: Position of the payload's first byte, from the object's first byte.
        size_bytes: Length of the payload, at most SEGMENT_BYTES_MAX.
        checksum: `checksum64` of the payload.
        kind: Its kind of content.
    """

    id: ChangeSetId
    key_groups: KeyGroupRange
    count: int
    offset_bytes: int
    size_bytes: int
    checksum: int
    kind: SegmentKind = SegmentKind.CHANGES

    def __post_init__(self) -> None:
        check_int("count", self.count, COUNT_MAX)
        check_int("offset in bytes", self.offset_bytes, OBJECT_BYTES_MAX)
        check_int("size in bytes", self.size_bytes, SEGMENT_BYTES_MAX)
        check_int("checksum", self.checksum, CHECKSUM_MAX)

    @property
    def end_bytes(self) -> int:
        """Position of the first byte after the payload."""
        return self.offset_bytes + self.size_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as a flat JSON-able dict; the default kind is omitted."""
        special = {} if self.kind is SegmentKind.CHANGES else {"kind": self.kind.value}
        return {
            **special,
            **self.id.to_dict(),
            "key_groups": self.key_groups.to_text(),
            "count": self.count,
            "offset": self.offset_bytes,
            "size": self.size_bytes,
            "checksum": f"{self.checksum:016x}",
        }

    @classmethod
    def from_dict(cls, data: Any) -> SegmentEntry:
        """Read what `to_dict` wrote; `InvalidInputError` for other fields, types or bounds."""
        check_fields("segment entry", data, _ENTRY_FIELDS, _ENTRY_OPTIONAL)
        return _entry_of(data)


@dataclass(frozen=True, slots=True)
class SegmentHandle:
    """
    A pointer to a durable segment, as a checkpoint stores it.

    Args:
        object_key: Key of the segment object in its store.
        object_size_bytes: Length of the whole object, at most OBJECT_BYTES_MAX.
        entry: The segment's row of the object's index; ends within the object.
    """

    object_key: str
    object_size_bytes: int
    entry: SegmentEntry

    def __post_init__(self) -> None:
        if type(self.object_key) is not str or not self.object_key:
            raise InvalidInputError(f"object key must be non-empty text, not {shorten(self.object_key)}")
        check_int("object size in bytes", self.object_size_bytes, OBJECT_BYTES_MAX)
        if self.entry.end_bytes > self.object_size_bytes:
            raise InvalidInputError(
                "segment ends after the end of its object",
                key=self.object_key,
                segment_end_bytes=self.entry.end_bytes,
                object_size_bytes=self.object_size_bytes,
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the handle as a flat JSON-able dict."""
        return {"object": self.object_key, "object_size": self.object_size_bytes, **self.entry.to_dict()}

    @classmethod
    def from_dict(cls, data: Any) -> SegmentHandle:
        """Read what `to_dict` wrote; `InvalidInputError` for other fields, types or bounds."""
        check_fields("segment handle", data, _HANDLE_FIELDS, _ENTRY_OPTIONAL)
        return cls(data["object"], data["object_size"], _entry_of(data))


@dataclass(frozen=True, slots=True)
class MaterializationHandle:
    """
    A pointer to a stored snapshot of one partition's table, which replaces the log up to its checkpoint.

    Args:
        operator: The table's operator.
        key_groups: The range that the table holds.
        checkpoint_id: The snapshot contains exactly the changes up to this checkpoint.
        uid: The materialization's own id, apart from checkpoint ids.
        index_key: Key of the object that names the snapshot's files.
        size_bytes: Size of all files together.
    """

    operator: str
    key_groups: KeyGroupRange
    checkpoint_id: int
    uid: str
    index_key: str
    size_bytes: int

    def __post_init__(self) -> None:
        validate_name("operator", self.operator)
        validate_name("materialization", self.uid)
        check_int("checkpoint id", self.checkpoint_id, NUMBER_MAX)
        check_int("size in bytes", self.size_bytes, NUMBER_MAX)
        if type(self.index_key) is not str or not self.index_key:
            raise InvalidInputError(f"index key must be non-empty text, not {shorten(self.index_key)}")

    def to_dict(self) -> dict[str, Any]:
        """Return the handle as a flat JSON-able dict."""
        return {
            "operator": self.operator,
            "key_groups": self.key_groups.to_text(),
            "checkpoint": self.checkpoint_id,
            "uid": self.uid,
            "index": self.index_key,
            "size": self.size_bytes,
        }

    @classmethod
    def from_dict(cls, data: Any) -> MaterializationHandle:
        """Read what `to_dict` wrote; `InvalidInputError` for other fields, types or bounds."""
        check_fields("materialization handle", data, _MATERIALIZATION_FIELDS)
        key_groups = KeyGroupRange.parse(data["key_groups"])
        return cls(data["operator"], key_groups, data["checkpoint"], data["uid"], data["index"], data["size"])


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """
    A store's description of an object, without its content.

    Args:
        key: Its key, relative to the store.
        size_bytes: Its length.
        modified_ms: Time of the last write, by the clock of the store or of the file server, since 1970-01-01 UTC.
    """

    key: str
    size_bytes: int
    modified_ms: int


_ID_FIELDS = frozenset({"job", "operator", "checkpoint", "epoch", "attempt", "partition", "sqn"})
_ENTRY_FIELDS = _ID_FIELDS | {"key_groups", "count", "offset", "size", "checksum"}
_ENTRY_OPTIONAL = frozenset({"kind"})
_HANDLE_FIELDS = _ENTRY_FIELDS | {"object", "object_size"}
_MATERIALIZATION_FIELDS = frozenset({"operator", "key_groups", "checkpoint", "uid", "index", "size"})


def _id_of(data: Mapping[str, Any]) -> ChangeSetId:
    writer = Writer(data["epoch"], data["attempt"])
    return ChangeSetId(data["job"], data["operator"], data["checkpoint"], writer, data["partition"], data["sqn"])


def _entry_of(data: Mapping[str, Any]) -> SegmentEntry:
    checksum = data["checksum"]
    if not isinstance(checksum, str) or not _CHECKSUM.fullmatch(checksum):
        raise InvalidInputError(f"checksum must be 16 characters of [0-9a-f], not {shorten(checksum)}")
    kind = data.get("kind", SegmentKind.CHANGES.value)
    if kind not in list(SegmentKind):
        raise InvalidInputError(f"segment kind {shorten(kind)} is not one of {', '.join(SegmentKind)}")
    return SegmentEntry(
        id=_id_of(data),
        key_groups=KeyGroupRange.parse(data["key_groups"]),
        count=data["count"],
        offset_bytes=data["offset"],
        size_bytes=data["size"],
        checksum=int(checksum, 16),
        kind=SegmentKind(kind),
    )
