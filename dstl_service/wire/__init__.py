"""
The protocol between client and service: requests, responses, and the frames of a restore stream.

Plain dataclasses of JSON types, so the client needs neither FastAPI nor pydantic; FastAPI validates the same classes
with their limits and describes them in the OpenAPI document. Binary bodies (change sets, restored segments) are never
encoded as JSON. No I/O.
"""

from __future__ import annotations

from dstl_service.wire.frames import FRAME_HEADER_BYTES_MAX, decode_frames, encode_frame
from dstl_service.wire.limits import (
    JSON_BYTES_MAX,
    JSON_VALUES_MAX,
    NAME,
    NAME_PATTERN,
    NOTE_CHARS_MAX,
    NOTE_OPERATOR,
    REFS_MAX,
    UID_PATTERN,
    URL_PATTERN,
    Limits,
    validate_operator,
)
from dstl_service.wire.requests import (
    BatchFigures,
    CompleteRequest,
    EpochRequest,
    LinkAddress,
    OpenJob,
    OpenLinks,
    ParallelismRequest,
    PersistRequest,
    ReadRequest,
    SavepointRequest,
    SnapshotRequest,
    to_json,
)
from dstl_service.wire.responses import (
    BeginResponse,
    CheckpointInfo,
    CompleteResponse,
    ErrorBody,
    JobInfo,
    Linked,
    OpenedJob,
    PersistResponse,
    ServiceInfo,
)
from dstl_service.wire.restore import (
    EndFrame,
    ErrorFrame,
    FileFrame,
    GoneFrame,
    PlanFrame,
    RestoreFrame,
    SegmentFrame,
    SetFrame,
    SnapshotFrame,
    read_frame,
    read_frames,
    write_frame,
)
from dstl_service.wire.tokens import TOKEN_CHARS_MAX, parse_tokens
from dstl_service.wire.values import ChangeSetRef, CheckpointRef, LogTarget, OperatorInfo, StateInfo

__all__ = [
    "FRAME_HEADER_BYTES_MAX",
    "JSON_BYTES_MAX",
    "JSON_VALUES_MAX",
    "NAME",
    "NAME_PATTERN",
    "NOTE_CHARS_MAX",
    "NOTE_OPERATOR",
    "REFS_MAX",
    "TOKEN_CHARS_MAX",
    "UID_PATTERN",
    "URL_PATTERN",
    "BatchFigures",
    "BeginResponse",
    "ChangeSetRef",
    "CheckpointInfo",
    "CheckpointRef",
    "CompleteRequest",
    "CompleteResponse",
    "EndFrame",
    "EpochRequest",
    "ErrorBody",
    "ErrorFrame",
    "FileFrame",
    "GoneFrame",
    "JobInfo",
    "Limits",
    "LinkAddress",
    "Linked",
    "LogTarget",
    "OpenJob",
    "OpenLinks",
    "OpenedJob",
    "OperatorInfo",
    "ParallelismRequest",
    "PersistRequest",
    "PersistResponse",
    "PlanFrame",
    "ReadRequest",
    "RestoreFrame",
    "SavepointRequest",
    "SegmentFrame",
    "ServiceInfo",
    "SetFrame",
    "SnapshotFrame",
    "SnapshotRequest",
    "StateInfo",
    "decode_frames",
    "encode_frame",
    "parse_tokens",
    "read_frame",
    "read_frames",
    "to_json",
    "validate_operator",
    "write_frame",
]
