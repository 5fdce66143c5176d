"""
What client and service say to each other: request and response values, and the frames of a restore stream.

Plain dataclasses of JSON types, so that the client needs neither FastAPI nor pydantic; FastAPI validates the same
classes with their limits and describes them in the OpenAPI document.
Binary bodies (change sets, restored segments) are never put into JSON.
No I/O.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, BinaryIO, TypeAlias

from storage.checksum import BytesLike
from storage.errors import CorruptDataError, ErrorKind, InvalidInputError
from storage.model import KEY_GROUP_MAX, NAME_CHARS_MAX, NUMBER_MAX, ChangeSetId, KeyGroupRange, Writer, validate_name

NOTE_OPERATOR = "_note"
"""
Names the segments by which a segment object says which checkpoint its sets belong to; see
`dstl_service.formats.checkpoint_record`.
"""

NOTE_CHARS_MAX = 8 << 20
"""The longest note that is sent to another service."""


FRAME_HEADER_BYTES_MAX = 1 << 20
JSON_BYTES_MAX = 32 << 20
"""The largest body of a request that is read as a whole."""
REFS_MAX = 100_000
"""The most change sets that one request may name: three for each of the most partitions."""
TOKEN_CHARS_MAX = 4096
NAME = f"[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{NAME_CHARS_MAX - 1}}}"
NAME_PATTERN = f"^{NAME}$"
UID_PATTERN = r"^[0-9A-Za-z_-]{1,64}$"
URL_PATTERN = r"^https?://[A-Za-z0-9._:\[\]-]{1,300}(/[A-Za-z0-9._~/-]{0,300})?$"
"""Where a service is reached: without user, query or fragment."""
_FRAME = struct.Struct(">I")
_TOKEN = re.compile(r"[!-~]+")
_REF = re.compile(r"([0-9]{1,19})\.([0-9]{1,18})\.([0-9A-Za-z_-]{1,64})")


class Limits:
    """
    Bounds of a field: checked by the service, shown in the OpenAPI document, and free of charge for the client.

    Args:
        bounds: In the words of pydantic's core schemas: `ge`, `le`, `min_length`, `max_length`, `pattern`, `strict`;
            `fail_fast` for what may be long: the errors of all items take minutes, and the first one tells.
    """

    def __init__(self, **bounds: Any) -> None:
        self._bounds = bounds

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {**handler(source), **self._bounds}


Number: TypeAlias = Annotated[int, Limits(strict=True, ge=0, le=NUMBER_MAX)]
Partition: TypeAlias = Annotated[int, Limits(strict=True, ge=0, le=KEY_GROUP_MAX)]
Parallelism: TypeAlias = Annotated[int, Limits(strict=True, ge=1, le=KEY_GROUP_MAX + 1)]
Flag: TypeAlias = Annotated[bool, Limits(strict=True)]
Name: TypeAlias = Annotated[str, Limits(pattern=NAME_PATTERN)]
Uid: TypeAlias = Annotated[str, Limits(pattern=UID_PATTERN)]
Url: TypeAlias = Annotated[str, Limits(pattern=URL_PATTERN)]
Checksum: TypeAlias = Annotated[str, Limits(pattern=r"^[0-9a-f]{16}$")]
ShortText: TypeAlias = Annotated[str, Limits(max_length=1000)]


@dataclass(frozen=True, slots=True)
class ErrorBody:
    """What an answer with a status from 400 on carries; `kind` says what to do, see `storage.errors`."""

    kind: ErrorKind
    message: str
    context: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """Names one manifest for good: checkpoint id, generation of that id, and the manifest's own unique id."""

    id: Number
    generation: Annotated[int, Limits(strict=True, ge=0, le=999_999_999_999_999_999)]
    uid: Uid

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


def validate_operator(name: Any) -> str:
    """Return `name` if an operator may have it; `InvalidInputError` for a malformed or a reserved one."""
    if validate_name("operator", name).startswith(NOTE_OPERATOR):
        raise InvalidInputError(
            f"operator name {name!r} is reserved: choose one that does not begin with {NOTE_OPERATOR}"
        )
    return str(name)


@dataclass(frozen=True, slots=True)
class StateInfo:
    """
    A state variable: its number inside table keys, and its value schema as Spark's JSON text.

    `earlier` are the schemas that it had before, oldest first: stored values say by number which is theirs.
    `ttl_ms` is how long values live that are written now, 0 for ever; None if no stored value can have an end.
    """

    id: Annotated[int, Limits(strict=True, ge=0, le=65_535)]
    kind: ShortText
    schema: str
    earlier: Annotated[list[str], Limits(fail_fast=True)] = field(default_factory=list)
    ttl_ms: Annotated[int, Limits(strict=True, ge=0, le=NUMBER_MAX)] | None = None


@dataclass(frozen=True, slots=True)
class OperatorInfo:
    """
    What a job's manifest says of one operator; `parallelism` may differ from checkpoint to checkpoint.

    `time_mode` and `output_mode` are Spark's names; None where a program that did not store them yet wrote it.
    `kind` says by what its processor is called, ``rows`` or ``columns``; None likewise.
    """

    name: Name
    parallelism: Parallelism
    key_schema: str
    states: Annotated[dict[str, StateInfo], Limits(fail_fast=True)]
    time_mode: ShortText | None = None
    output_mode: ShortText | None = None
    kind: ShortText | None = None


@dataclass(frozen=True, slots=True)
class OpenJob:
    """Ask for a job and a new epoch; without `max_parallelism` the stored one holds, or the default of a new job."""

    owner: ShortText
    max_parallelism: Parallelism | None = None


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """
    One completed checkpoint, as listings and drivers see it; `query_id` and `offsets` are Spark's.

    `rewound_from` is the checkpoint that was the newest when the job was set back to this one. `closed_ms` is the
    watermark at which the batch was closed: what was due up to there has fired; None where batches are not closed.
    """

    ref: CheckpointRef
    base: CheckpointRef | None
    epoch: int
    created_ms: int
    query_id: str
    offsets: str
    operators: list[OperatorInfo]
    segments: int
    segment_bytes: int
    rewound_from: CheckpointRef | None = None
    closed_ms: int | None = None


@dataclass(frozen=True, slots=True)
class JobInfo:
    """What is stored of a job, for those who look before they take it over."""

    job: str
    job_uid: str
    epoch: int
    max_parallelism: int
    latest: CheckpointInfo | None


@dataclass(frozen=True, slots=True)
class OpenedJob(JobInfo):
    """A job taken over: the caller is its owner until a higher epoch begins."""

    service_id: str


@dataclass(frozen=True, slots=True)
class EpochRequest:
    """Carries only who asks."""

    epoch: Number


@dataclass(frozen=True, slots=True)
class BeginResponse:
    """Which process coordinates the checkpoint; sets that other processes received must reach it or be durable."""

    service_id: str


@dataclass(frozen=True, slots=True)
class LogTarget:
    """Whose changes a writer logs."""

    job: str
    operator: str
    checkpoint_id: int
    epoch: int
    attempt: int
    partition: int
    key_groups: KeyGroupRange
    job_uid: str = ""
    """Tells the job from others that had or will have its name; a sidecar may remember an earlier one."""


@dataclass(frozen=True, slots=True)
class ChangeSetRef:
    """
    Points at one change set that a service took in.

    `service_url` is where its service can be reached from other hosts, or null. A set whose task had to make it
    durable itself carries its `handle` (see `storage.model.SegmentHandle.to_dict`). `checksum` is that of its payload,
    16 hexadecimal digits.
    """

    operator: Name
    checkpoint_id: Number
    epoch: Number
    attempt: Number
    partition: Partition
    sqn: Number
    size_bytes: Number
    service_id: Name
    service_url: Url | None = None
    handle: dict[str, Any] | None = None
    checksum: Checksum | None = None

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
            f'"handle":{json.dumps(self.handle, separators=(",", ":"))},"checksum":{json.dumps(self.checksum)}}}'
        ).encode()


@dataclass(frozen=True, slots=True)
class PersistRequest:
    """
    Make these change sets durable; `wait` false only starts the upload.

    `note` is what a coordinator that holds no set of the checkpoint itself has stored with these sets; see
    `dstl_service.formats.checkpoint_record`.
    """

    epoch: Number
    refs: Annotated[list[ChangeSetRef], Limits(max_length=REFS_MAX, fail_fast=True)]
    wait: Flag = True
    note: Annotated[str, Limits(max_length=NOTE_CHARS_MAX)] | None = None


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Give these change sets back, of a checkpoint that does not exist yet."""

    epoch: Number
    refs: Annotated[list[ChangeSetRef], Limits(max_length=REFS_MAX, fail_fast=True)]


@dataclass(frozen=True, slots=True)
class PersistResponse:
    """Handles in the order of the request, then that of the note, if one was given; empty when it did not wait."""

    handles: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class CompleteRequest:
    """
    Make checkpoint `id` exist, or start the upload of what it consists of.

    `uid` is chosen by the driver once and kept over retries, so that a lost response is recognised. `refs` are exactly
    the change sets of the accepted attempts. `materializations` are what tasks reported of their tables' snapshots:
    announcements (see `dstl_service.formats.under_way.Announcement`), which the checkpoint lists, and handles of
    stored ones (see `storage.model.MaterializationHandle.to_dict`); those that belong to the state enter it.
    `closed_ms` is set where the batch was closed, see `CheckpointInfo`: then a partition may have two writers, of which
    the one with the greater attempt wrote behind the other, and numbered its sets behind that one's.
    """

    epoch: Number
    uid: Uid
    base: CheckpointRef | None
    refs: Annotated[list[ChangeSetRef], Limits(max_length=REFS_MAX, fail_fast=True)]
    operators: Annotated[list[OperatorInfo], Limits(max_length=1000, fail_fast=True)]
    query_id: ShortText = ""
    offsets: str = ""
    materializations: Annotated[list[dict[str, Any]], Limits(fail_fast=True)] = field(default_factory=list)
    closed_ms: Annotated[int, Limits(strict=True)] | None = None


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """
    Store the snapshot of a table.

    `version` is the checkpoint at which the table stood, `path` the folder on the service's host with the snapshot's
    files.
    """

    operator: str
    first_key_group: Partition
    last_key_group: Partition
    version: str
    path: str


@dataclass(frozen=True, slots=True)
class CompleteResponse:
    """The new checkpoint, and what it cost: bytes and objects written for it (segment objects and manifest)."""

    ref: CheckpointRef
    persist_ms: float
    manifest_ms: float
    bytes_written: int
    objects_written: int


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """What a driver tells of a finished batch, for the metrics; see `backend_client.progress.BatchProgress`."""

    rows: Number
    keys: Number
    changes: Number
    state_reads: Number
    log_bytes: Number
    table_bytes: Number
    state_ms: Number
    function_ms: Number
    checkpoint_ms: Number
    upload_ms: Number
    manifest_ms: Number
    tries: Parallelism


@dataclass(frozen=True, slots=True)
class SavepointRequest:
    """Which checkpoint a savepoint keeps; null: the newest."""

    checkpoint_id: Number | None = None


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


def parse_tokens(text: str) -> list[str]:
    """
    Return the tokens of a token file, one a line: the first is sent, every one is accepted.

    Raises:
        InvalidInputError: There is none, or one cannot stand in a header; no token is part of the message.
    """
    tokens = [line.strip() for line in text.splitlines() if line.strip()]
    if not tokens:
        raise InvalidInputError("there is no token; write one into it")
    if any(len(token) > TOKEN_CHARS_MAX or not _TOKEN.fullmatch(token) for token in tokens):
        raise InvalidInputError("a token has only visible ASCII characters, and one line")
    return tokens


def to_json(value: Any) -> bytes:
    """Return the JSON text of a wire dataclass."""
    return json.dumps(asdict(value), separators=(",", ":")).encode()
