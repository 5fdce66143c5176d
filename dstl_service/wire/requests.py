"""Requests of clients, and of services to each other. No I/O."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from dstl_service.wire.limits import (
    NOTE_CHARS_MAX,
    REFS_MAX,
    Flag,
    HostName,
    Limits,
    Name,
    Number,
    Parallelism,
    Partition,
    Port,
    ShortText,
    Uid,
)
from dstl_service.wire.values import ChangeSetRef, CheckpointRef, OperatorInfo


@dataclass(frozen=True, slots=True)
class OpenJob:
    """
    Ask for a job and a new epoch; without `max_parallelism` the stored one holds, or the default of a new job.

    `storage` is the URL that the driver was given: a service of another storage refuses. Empty: any.
    """

    owner: ShortText
    max_parallelism: Parallelism | None = None
    storage: ShortText = ""


@dataclass(frozen=True, slots=True)
class EpochRequest:
    """The epoch of the driver that asks."""

    epoch: Number


@dataclass(frozen=True, slots=True)
class PersistRequest:
    """
    Make these change sets durable; `wait` false only starts the upload.

    `note` is stored with these sets, for a coordinator that holds no set of the checkpoint itself; see
    `dstl_service.formats.checkpoint_record`.
    """

    epoch: Number
    refs: Annotated[list[ChangeSetRef], Limits(max_length=REFS_MAX, fail_fast=True)]
    wait: Flag = True
    note: Annotated[str, Limits(max_length=NOTE_CHARS_MAX)] | None = None


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Return these change sets of a checkpoint that does not exist yet."""

    epoch: Number
    refs: Annotated[list[ChangeSetRef], Limits(max_length=REFS_MAX, fail_fast=True)]


@dataclass(frozen=True, slots=True)
class CompleteRequest:
    """
    Complete a checkpoint, or start the upload of its change sets.

    The driver chooses `uid` once and keeps it over retries, so that a lost response is recognised. `refs` are exactly
    the change sets of the accepted attempts. `materializations` are the tasks' reports of their tables' snapshots:
    announcements (see `dstl_service.formats.under_way.Announcement`), which the checkpoint lists, and handles of
    stored ones (see `storage.model.MaterializationHandle.to_dict`); those that belong to the state enter it.
    `closed_ms` is set if the batch was closed, see `CheckpointInfo`: then a partition may have two writers. The one
    with the greater attempt wrote after the other, and its sequence numbers continue the other's.
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
class BatchFigures:
    """A driver's figures of a finished batch, for the metrics; see `backend_client.progress.BatchProgress`."""

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
    rows_waiting: Number = 0
    rows_lost: Number = 0
    standby_tables: Number = 0
    standby_missing: Number = 0
    standby_lag: Number = 0
    standby_bytes: Number = 0
    unpublished: Number = 0


@dataclass(frozen=True, slots=True)
class ParallelismRequest:
    """The number of partitions that an operator of the running query shall have."""

    parallelism: Parallelism


@dataclass(frozen=True, slots=True)
class OpenLinks:
    """
    Ask the coordinator to accept links of other hosts' sidecars.

    `host` is the name or address under which they reach the coordinator's host, `bind_address` the one to listen on;
    `port` 0 lets the system choose.
    """

    epoch: Number
    host: HostName
    bind_address: HostName
    port: Port = 0


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """
    The address at which a job's coordinator accepts links; the driver sends it to tasks, and they to their sidecars.

    `certificate`, in PEM, is the only one that the coordinator may show. A process that shows `token` counts as a host
    of the job.
    """

    host: HostName
    port: Port
    certificate: Annotated[str, Limits(max_length=10_000)]
    token: Annotated[str, Limits(max_length=1_000)] = field(repr=False)


@dataclass(frozen=True, slots=True)
class SavepointRequest:
    """The checkpoint that a savepoint keeps; null: the newest."""

    checkpoint_id: Number | None = None


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """
    The checkpoint at which a fork begins: a retained one, or a savepoint's; if both are null, the newest.

    `max_parallelism` is the fork's number of key groups; null: the parent's.
    """

    checkpoint_id: Number | None = None
    savepoint: Name | None = None
    max_parallelism: Parallelism | None = None


def to_json(value: Any) -> bytes:
    """Return the JSON text of a wire dataclass."""
    return json.dumps(asdict(value), separators=(",", ":")).encode()
