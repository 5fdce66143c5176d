"""
What client and service say to each other: request and response values, and the frames of a restore stream.

Plain dataclasses of JSON types, so that the client needs neither FastAPI nor pydantic; FastAPI validates the same
classes and describes them in the OpenAPI document.
Binary bodies (change sets, restored segments) are never put into JSON.
No I/O.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO

from storage.checksum import BytesLike
from storage.errors import CorruptDataError, InvalidInputError
from storage.model import ChangeSetId, Writer

FRAME_HEADER_BYTES_MAX = 1 << 20
_FRAME = struct.Struct(">I")
_REF = re.compile(r"([0-9]{1,19})\.([0-9]{1,9})\.([0-9A-Za-z_-]{1,64})")


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """Names one manifest for good: checkpoint id, generation of that id, and the manifest's own unique id."""

    id: int
    generation: int
    uid: str

    def to_text(self) -> str:
        """Return ``id.generation.uid``, the form used in query strings and in a table's version."""
        return f"{self.id}.{self.generation}.{self.uid}"

    @classmethod
    def parse(cls, text: str) -> CheckpointRef:
        """
        Read the form that `to_text` writes.

        Raises:
            InvalidInputError: The text has another form.
        """
        match = _REF.fullmatch(text)
        if match is None:
            raise InvalidInputError(f"{text!r} is no checkpoint reference; the form is <id>.<generation>.<uid>")
        return cls(int(match[1]), int(match[2]), match[3])


@dataclass(frozen=True, slots=True)
class StateInfo:
    """A state variable: its number inside table keys, and its value schema as Spark's JSON text."""

    id: int
    kind: str
    schema: str


@dataclass(frozen=True, slots=True)
class OperatorInfo:
    """What a job's manifest says of one operator; `parallelism` may differ from checkpoint to checkpoint."""

    name: str
    parallelism: int
    key_schema: str
    states: dict[str, StateInfo]


@dataclass(frozen=True, slots=True)
class OpenJob:
    """Ask for a job and a new epoch; without `max_parallelism` the stored one holds, or the default of a new job."""

    owner: str
    max_parallelism: int | None = None


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One completed checkpoint, as listings and drivers see it; `query_id` and `offsets` are Spark's."""

    ref: CheckpointRef
    base: CheckpointRef | None
    epoch: int
    created_ms: int
    query_id: str
    offsets: str
    operators: list[OperatorInfo]
    segments: int
    segment_bytes: int


@dataclass(frozen=True, slots=True)
class OpenedJob:
    """A job taken over: the caller is its owner until a higher epoch begins."""

    job: str
    job_uid: str
    epoch: int
    max_parallelism: int
    service_id: str
    latest: CheckpointInfo | None


@dataclass(frozen=True, slots=True)
class EpochRequest:
    """Carries only who asks."""

    epoch: int


@dataclass(frozen=True, slots=True)
class BeginResponse:
    """Which process coordinates the checkpoint; sets that other processes received must reach it or be durable."""

    service_id: str


@dataclass(frozen=True, slots=True)
class ChangeSetRef:
    """
    Points at one change set that a service took in.

    `service_url` is where its service can be reached from other hosts, or null. A set whose task had to make it
    durable itself carries its `handle` (see `storage.model.SegmentHandle.to_dict`).
    """

    operator: str
    checkpoint_id: int
    epoch: int
    attempt: int
    partition: int
    sqn: int
    size_bytes: int
    service_id: str
    service_url: str | None = None
    handle: dict[str, Any] | None = None

    def change_set_id(self, job: str) -> ChangeSetId:
        """Return the identity of the set within `job`."""
        return ChangeSetId(
            job, self.operator, self.checkpoint_id, Writer(self.epoch, self.attempt), self.partition, self.sqn
        )

    def to_json(self) -> bytes:
        """Return what the function of this name returns, in a fifth of the time; names need no escapes."""
        return (
            f'{{"operator":"{self.operator}","checkpoint_id":{self.checkpoint_id},"epoch":{self.epoch},'
            f'"attempt":{self.attempt},"partition":{self.partition},"sqn":{self.sqn},"size_bytes":{self.size_bytes},'
            f'"service_id":"{self.service_id}","service_url":{json.dumps(self.service_url)},'
            f'"handle":{json.dumps(self.handle, separators=(",", ":"))}}}'
        ).encode()


@dataclass(frozen=True, slots=True)
class PersistRequest:
    """Make these change sets durable; `wait` false only starts the upload."""

    epoch: int
    refs: list[ChangeSetRef]
    wait: bool = True


@dataclass(frozen=True, slots=True)
class PersistResponse:
    """Handles in the order of the request; empty when it did not wait."""

    handles: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class CompleteRequest:
    """
    Make checkpoint `id` exist.

    `uid` is chosen by the driver once and kept over retries, so that a lost response is recognised.
    `refs` are exactly the change sets of the accepted attempts.
    """

    epoch: int
    uid: str
    base: CheckpointRef | None
    refs: list[ChangeSetRef]
    operators: list[OperatorInfo]
    query_id: str = ""
    offsets: str = ""


@dataclass(frozen=True, slots=True)
class CompleteResponse:
    """The new checkpoint, and what it cost: bytes and objects written for it (segment objects and manifest)."""

    ref: CheckpointRef
    persist_ms: float
    manifest_ms: float
    bytes_written: int
    objects_written: int


@dataclass(frozen=True, slots=True)
class SavepointRequest:
    """Which checkpoint a savepoint keeps; null: the newest."""

    checkpoint_id: int | None = None


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """Who answers: `service_id` is new with every start of the process."""

    service_id: str
    host_id: str
    version: str
    storage: str
    pid: int
    advertised_url: str | None = None
    jobs: list[str] = field(default_factory=list)


def encode_frame(header: dict[str, Any], payload: BytesLike = b"") -> list[BytesLike]:
    """Return one frame of a restore stream: 4-byte header length, JSON header with the payload's `size`, payload."""
    head = json.dumps({**header, "size": len(payload)}, separators=(",", ":")).encode()
    return [_FRAME.pack(len(head)), head, payload]


def decode_frames(stream: BinaryIO) -> Iterator[tuple[dict[str, Any], bytes]]:
    """
    Yield (header, payload) up to the frame whose kind is ``end``.

    Raises:
        CorruptDataError: The stream ends early or is no frame stream.
        DstlError: What the service reported in an ``error`` frame is for the caller to raise.
    """
    while True:
        (size,) = _FRAME.unpack(_read_exactly(stream, _FRAME.size))
        if size > FRAME_HEADER_BYTES_MAX:
            raise CorruptDataError(f"a restore frame claims a header of {size} bytes")
        header = _frame_header(_read_exactly(stream, size))
        payload = _read_exactly(stream, header["size"])
        yield header, payload
        if header["kind"] == "end":
            return


def _frame_header(data: bytes) -> dict[str, Any]:
    try:
        header = json.loads(data)
    except ValueError as error:
        raise CorruptDataError(f"a restore frame's header is no JSON: {error}") from error
    if not isinstance(header, dict) or type(header.get("size")) is not int or not isinstance(header.get("kind"), str):
        raise CorruptDataError(f"a restore frame has no size or no kind: {data[:100]!r}")
    if header["size"] < 0:
        raise CorruptDataError(f"a restore frame claims a payload of {header['size']} bytes")
    return header


def _read_exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise CorruptDataError(f"the restore stream ended early: {len(data)} of {size} bytes")
    return data


def to_json(value: Any) -> bytes:
    """Return the JSON text of a wire dataclass."""
    return json.dumps(asdict(value), separators=(",", ":")).encode()
