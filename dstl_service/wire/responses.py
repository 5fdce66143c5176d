"""Responses of a service. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dstl_service.wire.values import CheckpointRef, ForkOrigin, OperatorInfo
from storage.errors import ErrorKind


@dataclass(frozen=True, slots=True)
class ErrorBody:
    """The body of each answer with a status of 400 or above; `kind` says what to do, see `storage.errors`."""

    kind: ErrorKind
    message: str
    context: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """
    One completed checkpoint, as listings and drivers see it; `query_id` and `offsets` are Spark's.

    `rewound_from` was the newest checkpoint when the job was rewound to this one. `closed_ms` is the watermark at which
    the batch was closed: timers due up to it have fired. It is None if batches are not closed. `forked_from` is where
    the job began if it is a fork; its first checkpoint is the one without `base`. If it has other key groups than its
    parent, the second one has the same state in its own.
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
    forked_from: ForkOrigin | None = None


@dataclass(frozen=True, slots=True)
class JobInfo:
    """A job as it is stored, for drivers that have not taken it over."""

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
class BeginResponse:
    """
    The process that coordinates the checkpoint; sets that other processes received must reach it or be durable.

    `parallelism` is the requested number of partitions by operator of the running query, and `requests` tells requests
    of the same number apart.
    """

    service_id: str
    parallelism: dict[str, int] = field(default_factory=dict)
    requests: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PersistResponse:
    """Handles in the order of the request, then the note's, if there is one; empty if the request did not wait."""

    handles: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class CompleteResponse:
    """The new checkpoint, and what it cost: bytes and objects written for it (segment objects and manifest)."""

    ref: CheckpointRef
    persist_ms: float
    manifest_ms: float
    bytes_written: int
    objects_written: int


@dataclass(frozen=True, slots=True)
class Linked:
    """The id of the coordinator's process to which this host has a link; null without one, and `why_not` says why."""

    coordinator_id: str | None
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class SilentHosts:
    """The addresses of a job's hosts whose link to the coordinator ended in silence, and that are not back."""

    addresses: list[str]


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """The service that answers; `service_id` is new with every start of its process."""

    service_id: str
    host_id: str
    version: str
    storage: str
    pid: int
    advertised_url: str | None = None
    jobs: list[str] = field(default_factory=list)
