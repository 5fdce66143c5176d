"""
The frames of a restore, and of change sets that are given back: written by the service, read by tables.

Each kind of frame is one class here, which writes its header and reads it. `PlanFrame` comes first, `EndFrame` last;
in between come each `SnapshotFrame` with its `FileFrame`s, then `SegmentFrame`s. Instead of the rest there may be
one `ErrorFrame` or `GoneFrame`. Change sets that are given back are `SetFrame`s.

A field that only tells people, or programs that watch, may be missing when a frame is read. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from dstl_service.wire.frames import encode_frame
from storage.checksum import BytesLike
from storage.errors import CorruptDataError, DstlError, error_from_dict
from storage.key_group_sets import KeyGroups, to_pairs
from storage.model import KeyGroupRange


@dataclass(frozen=True, slots=True)
class PlanFrame:
    """
    What is going to come.

    Args:
        is_full: The table must be emptied first.
        materialize: A snapshot is to be made of the table when it stands at the checkpoint.
        materialized: What to report to the driver of the table's snapshot: the announcement of one, the handle of a
            stored one, or None.
        snapshots: How many come.
        segments: How many change sets come.
        size_bytes: How many bytes they have together.
    """

    KIND: ClassVar = "plan"

    is_full: bool
    materialize: bool = False
    materialized: dict[str, Any] | None = None
    snapshots: int = 0
    segments: int = 0
    size_bytes: int = 0

    def header(self) -> dict[str, Any]:
        """Return what `read` reads."""
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
        """Read what `header` wrote."""
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
    A snapshot, whose files follow.

    Args:
        index_key: Of its index, for messages.
        version: The checkpoint at which its table stood.
        key_groups: What it holds.
        counted: What of it is to be taken.
        files: How many it has.
    """

    KIND: ClassVar = "snapshot"

    index_key: str
    version: str
    key_groups: KeyGroupRange
    counted: KeyGroups
    files: int

    def header(self) -> dict[str, Any]:
        """Return what `read` reads."""
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
        """Read what `header` wrote."""
        return cls(header["index"], header["version"], *_key_groups(header), header["files"])


@dataclass(frozen=True, slots=True)
class FileFrame:
    """
    A piece of a snapshot's file; the payload is its bytes.

    Args:
        name: RocksDB's name for the file.
        object_key: Where it is stored, for messages.
        offset: Of the piece.
        size_bytes: Of the whole file.
        checksum: XXH3-128 of the whole file, as 32 hexadecimal digits.
    """

    KIND: ClassVar = "file"

    name: str
    object_key: str
    offset: int
    size_bytes: int
    checksum: str

    def header(self) -> dict[str, Any]:
        """Return what `read` reads."""
        return {
            "kind": self.KIND,
            "name": self.name,
            "object": self.object_key,
            "offset": self.offset,
            "file_size": self.size_bytes,
            "checksum": self.checksum,
        }

    @classmethod
    def read(cls, header: dict[str, Any]) -> FileFrame:
        """Read what `header` wrote."""
        name, object_key, checksum = (str(header[field]) for field in ("name", "object", "checksum"))
        return cls(name, object_key, header["offset"], int(header["file_size"]), checksum)


@dataclass(frozen=True, slots=True)
class SetFrame:
    """
    A change set that is given back before its checkpoint exists; the payload is its bytes.

    Args:
        source: What it is, for messages.
        checksum: XXH3-64 of the payload, as 16 hexadecimal digits.
    """

    KIND: ClassVar = "segment"

    source: str
    checksum: str

    def header(self) -> dict[str, Any]:
        """Return what `read` reads."""
        return {"kind": self.KIND, "object": self.source, "checksum": self.checksum}

    @classmethod
    def read(cls, header: dict[str, Any]) -> SetFrame:
        """Read what `header` wrote, or that of a `SegmentFrame`."""
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
    A change set of the log; the payload is its bytes, and `source` the object where it is stored.

    Args:
        key_groups: What it holds.
        counted: What of it is to be applied.
        checkpoint_id: Of which it is.
        count: How many changes it has.
    """

    key_groups: KeyGroupRange
    counted: KeyGroups
    checkpoint_id: int = 0
    count: int = 0

    def header(self) -> dict[str, Any]:
        """Return what `SetFrame.read` reads."""
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
    """Why nothing more comes; `error` is as `DstlError.to_dict` wrote it."""

    KIND: ClassVar = "error"

    error: dict[str, Any]

    def header(self) -> dict[str, Any]:
        """Return what `read` reads."""
        return {"kind": self.KIND, "error": self.error}

    @classmethod
    def read(cls, header: dict[str, Any]) -> ErrorFrame:
        """Read what `header` wrote."""
        return cls(dict(header["error"]))

    @property
    def exception(self) -> DstlError:
        """The error, to be raised."""
        return error_from_dict(self.error)


@dataclass(frozen=True, slots=True)
class GoneFrame:
    """What led from the table's version is no longer stored: the table must be emptied, and all asked for."""

    KIND: ClassVar = "gone"

    def header(self) -> dict[str, Any]:
        """Return what `read` reads."""
        return {"kind": self.KIND}

    @classmethod
    def read(cls, _header: dict[str, Any]) -> GoneFrame:
        """Read what `header` wrote."""
        return cls()


@dataclass(frozen=True, slots=True)
class EndFrame:
    """Nothing more comes."""

    KIND: ClassVar = "end"

    def header(self) -> dict[str, Any]:
        """Return what `read` reads."""
        return {"kind": self.KIND}

    @classmethod
    def read(cls, _header: dict[str, Any]) -> EndFrame:
        """Read what `header` wrote."""
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
    Return what a header says.

    Raises:
        CorruptDataError: It is of no known kind, or says too little.
    """
    kind = header["kind"]
    try:
        return _KINDS[kind].read(header)
    except (LookupError, TypeError, ValueError) as error:  # InvalidInputError is one of the latter
        raise CorruptDataError(f"unexpected frame {kind!r} in a restore stream: {error!r}") from error


def read_frames(frames: Iterable[tuple[dict[str, Any], bytes]]) -> Iterator[tuple[RestoreFrame, bytes]]:
    """Yield what the headers say, with the payloads; see `read_frame`."""
    return ((read_frame(header), payload) for header, payload in frames)


def _key_groups(header: dict[str, Any]) -> tuple[KeyGroupRange, KeyGroups]:
    counted = tuple(KeyGroupRange(first, last) for first, last in header["counted"])
    return KeyGroupRange(header["first"], header["last"]), counted
