"""
The frames of a restore and of change sets that are read back: written by the service, read by tables.

Each kind of frame is one class, which writes and reads its header. `PlanFrame` is first, `EndFrame` last; between them
come each `SnapshotFrame` with its `FileFrame`s, then the `SegmentFrame`s. One `ErrorFrame` or `GoneFrame` may replace
the rest before `EndFrame`. Change sets that are read back are `SetFrame`s.

Fields that are only informative may be missing when a frame is read. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from dstl_service.wire.frames import encode_frame
from storage.checksum import BytesLike
from storage.errors import CorruptDataError, DstlError, error_from_dict
from storage.key_group_sets import KeyGroups, to_pairs
from storage.key_groups import KeyGroupRange


@dataclass(frozen=True, slots=True)
class PlanFrame:
    """
    The plan of a restore.

    Args:
        is_full: The table must be emptied first.
        materialize: The task must take a snapshot of the table once it is at the checkpoint.
        materialized: What the task reports to the driver about the table's snapshot: an announcement, the handle of a
            stored snapshot, or None.
        snapshots: Number of snapshots that follow.
        segments: Number of change sets that follow.
        size_bytes: Bytes of all of them.
    """

    KIND: ClassVar = "plan"

    is_full: bool
    materialize: bool = False
    materialized: dict[str, Any] | None = None
    snapshots: int = 0
    segments: int = 0
    size_bytes: int = 0

    def header(self) -> dict[str, Any]:
        """Return the header that `read` parses."""
        return {
            "kind": self.KIND,
            "full": self.is_full,
            "snapshots": self.snapshots,
            "segments": self.segments,
            "bytes": self.size_bytes,
            "materialize": self.materialize,
            "materialized": self.materialized,
        }

    @classmethod
    def read(cls, header: dict[str, Any]) -> PlanFrame:
        """Parse a header from `header`."""
        return cls(
            bool(header["full"]),
            header.get("materialize") is True,
            header.get("materialized"),
            header.get("snapshots", 0),
            header.get("segments", 0),
            header.get("bytes", 0),
        )


@dataclass(frozen=True, slots=True)
class SnapshotFrame:
    """
    A snapshot; its files follow.

    Args:
        index_key: Key of its index, for messages.
        version: The checkpoint of the table at the snapshot.
        key_groups: Key groups that it holds.
        counted: Key groups to take from it.
        files: Number of its files.
    """

    KIND: ClassVar = "snapshot"

    index_key: str
    version: str
    key_groups: KeyGroupRange
    counted: KeyGroups
    files: int

    def header(self) -> dict[str, Any]:
        """Return the header that `read` parses."""
        return {
            "kind": self.KIND,
            "index": self.index_key,
            "version": self.version,
            "first": self.key_groups.first,
            "last": self.key_groups.last,
            "counted": to_pairs(self.counted),
            "files": self.files,
        }

    @classmethod
    def read(cls, header: dict[str, Any]) -> SnapshotFrame:
        """Parse a header from `header`."""
        return cls(header["index"], header["version"], *_key_groups(header), header["files"])


@dataclass(frozen=True, slots=True)
class FileFrame:
    """
    A piece of a snapshot's file, whose bytes are the payload; or a whole file on this host's disk.

    Args:
        name: RocksDB's name of the file.
        object_key: Key of the stored file, for messages.
        offset: Offset of the piece in the file, in bytes.
        size_bytes: Size of the whole file.
        checksum: XXH3-128 of the whole file, as 32 hexadecimal digits.
        path: Where the whole file is, if there is no payload; the table takes it away.
    """

    KIND: ClassVar = "file"

    name: str
    object_key: str
    offset: int
    size_bytes: int
    checksum: str
    path: str = ""

    def header(self) -> dict[str, Any]:
        """Return the header that `read` parses."""
        return {
            "kind": self.KIND,
            "name": self.name,
            "object": self.object_key,
            "offset": self.offset,
            "file_size": self.size_bytes,
            "checksum": self.checksum,
            **({"path": self.path} if self.path else {}),
        }

    @classmethod
    def read(cls, header: dict[str, Any]) -> FileFrame:
        """Parse a header from `header`."""
        name, object_key, checksum = (str(header[field]) for field in ("name", "object", "checksum"))
        return cls(name, object_key, header["offset"], int(header["file_size"]), checksum, str(header.get("path", "")))


@dataclass(frozen=True, slots=True)
class SetFrame:
    """
    A change set that is read back before its checkpoint exists; the payload is its bytes.

    Args:
        source: The change set's id, for messages.
        checksum: XXH3-64 of the payload, as 16 hexadecimal digits.
    """

    KIND: ClassVar = "segment"

    source: str
    checksum: str

    def header(self) -> dict[str, Any]:
        """Return the header that `read` parses."""
        return {"kind": self.KIND, "object": self.source, "checksum": self.checksum}

    @classmethod
    def read(cls, header: dict[str, Any]) -> SetFrame:
        """Parse a header from `header`, of this class or of `SegmentFrame`."""
        if "counted" in header:
            return SegmentFrame(
                str(header["object"]),
                header["checksum"],
                *_key_groups(header),
                header.get("checkpoint_id", 0),
                header.get("count", 0),
            )
        return cls(str(header["object"]), header["checksum"])


@dataclass(frozen=True, slots=True)
class SegmentFrame(SetFrame):
    """
    A change set of the log; the payload is its bytes, and `source` the key of its object.

    Args:
        key_groups: Key groups that it holds.
        counted: Key groups to apply from it.
        checkpoint_id: Id of its checkpoint.
        count: Number of its changes.
    """

    key_groups: KeyGroupRange
    counted: KeyGroups
    checkpoint_id: int = 0
    count: int = 0

    def header(self) -> dict[str, Any]:
        """Return the header that `SetFrame.read` parses."""
        return {
            "kind": self.KIND,
            "object": self.source,
            "checkpoint_id": self.checkpoint_id,
            "first": self.key_groups.first,
            "last": self.key_groups.last,
            "counted": to_pairs(self.counted),
            "count": self.count,
            "checksum": self.checksum,
        }


@dataclass(frozen=True, slots=True)
class ErrorFrame:
    """The error that ended the restore; `error` is in the form of `DstlError.to_dict`."""

    KIND: ClassVar = "error"

    error: dict[str, Any]

    def header(self) -> dict[str, Any]:
        """Return the header that `read` parses."""
        return {"kind": self.KIND, "error": self.error}

    @classmethod
    def read(cls, header: dict[str, Any]) -> ErrorFrame:
        """Parse a header from `header`."""
        return cls(dict(header["error"]))

    @property
    def exception(self) -> DstlError:
        """The error as an exception, for the caller to raise."""
        return error_from_dict(self.error)


@dataclass(frozen=True, slots=True)
class GoneFrame:
    """The changes since the table's version are no longer stored: empty the table, and restore in full."""

    KIND: ClassVar = "gone"

    def header(self) -> dict[str, Any]:
        """Return the header that `read` parses."""
        return {"kind": self.KIND}

    @classmethod
    def read(cls, _header: dict[str, Any]) -> GoneFrame:
        """Parse a header from `header`."""
        return cls()


@dataclass(frozen=True, slots=True)
class EndFrame:
    """The end of the stream."""

    KIND: ClassVar = "end"

    def header(self) -> dict[str, Any]:
        """Return the header that `read` parses."""
        return {"kind": self.KIND}

    @classmethod
    def read(cls, _header: dict[str, Any]) -> EndFrame:
        """Parse a header from `header`."""
        return cls()


RestoreFrame: TypeAlias = PlanFrame | SnapshotFrame | FileFrame | SetFrame | ErrorFrame | GoneFrame | EndFrame

_KINDS: dict[str, type[RestoreFrame]] = {
    frame.KIND: frame for frame in (PlanFrame, SnapshotFrame, FileFrame, SetFrame, ErrorFrame, GoneFrame, EndFrame)
}


def write_frame(frame: RestoreFrame, payload: BytesLike = b"") -> bytes:
    """Return a frame's bytes."""
    return b"".join(encode_frame(frame.header(), payload))


def read_frame(header: dict[str, Any]) -> RestoreFrame:
    """
    Return the frame of a header.

    Raises:
        CorruptDataError: The kind is unknown, or a field is missing or invalid.
    """
    kind = header["kind"]
    try:
        return _KINDS[kind].read(header)
    except (LookupError, TypeError, ValueError) as error:  # InvalidInputError is one of the latter
        raise CorruptDataError(f"unexpected frame {kind!r} in a restore stream: {error!r}") from error


def read_frames(frames: Iterable[tuple[dict[str, Any], bytes]]) -> Iterator[tuple[RestoreFrame, bytes]]:
    """Yield frames with their payloads; see `read_frame`."""
    return ((read_frame(header), payload) for header, payload in frames)


def _key_groups(header: dict[str, Any]) -> tuple[KeyGroupRange, KeyGroups]:
    counted = tuple(KeyGroupRange(first, last) for first, last in header["counted"])
    return KeyGroupRange(header["first"], header["last"]), counted
