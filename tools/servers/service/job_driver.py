"""A job without Spark: opens it, appends change sets, completes checkpoints, and restores them to compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backend_client.service.client import ServiceClient
from backend_client.service.log_writer import LogWriter
from backend_client.service.restore import advance_to_base
from backend_client.table.state_table import StateTable
from dstl_service.wire import ChangeSetRef, CheckpointRef, CompleteRequest, CompleteResponse, LogTarget, OpenJob
from storage.checksum import checksum64
from storage.key_groups import KeyGroupRange

ALL_KEY_GROUPS = KeyGroupRange(0, 127)


class JobDriver:
    """
    The driver of one job, and its tasks. Takes the job over when it is created.

    Payloads are opaque to the service unless it compacts or materializes, so any bytes will do.

    Args:
        client: Client of the driver; tasks of other hosts and threads have their own.
        name: Name of the job.
        operator: Name of its only operator.
        max_parallelism: Number of key groups; the service's default if None.

    Attributes:
        epoch: The driver's epoch.
        base: The newest checkpoint that it completed.
    """

    def __init__(
        self, client: ServiceClient, name: str = "job", *, operator: str = "op", max_parallelism: int | None = None
    ) -> None:
        self.client = client
        self.name = name
        self.operator = operator
        self.path = f"/v1/jobs/{name}"
        opened = client.post(f"{self.path}/epochs", asdict(OpenJob("test", max_parallelism)))
        self.epoch = int(opened["epoch"])
        self.base: CheckpointRef | None = None

    @property
    def next_id(self) -> int:
        """Id of the checkpoint after `base`."""
        return self.base.id + 1 if self.base else 0

    def target(
        self,
        partition: int = 0,
        *,
        attempt: int = 1,
        key_groups: KeyGroupRange = ALL_KEY_GROUPS,
        checkpoint_id: int | None = None,
    ) -> LogTarget:
        """Return the log of a task, by default of the next checkpoint."""
        number = self.next_id if checkpoint_id is None else checkpoint_id
        return LogTarget(self.name, self.operator, number, self.epoch, attempt, partition, key_groups)

    def append(
        self,
        payload: bytes,
        sqn: int = 0,
        *,
        preemptive: bool = False,
        client: ServiceClient | None = None,
        **target: Any,
    ) -> ChangeSetRef:
        """Append a payload as a change set of the log that `target` describes."""
        log = self.target(**target)
        return (client or self.client).append(log, sqn, payload, checksum64(payload), 1, preemptive=preemptive)

    def write(
        self, changes: Mapping[bytes, bytes | None], *, client: ServiceClient | None = None, **target: Any
    ) -> list[ChangeSetRef]:
        """Append changes as a task does; return references of the change sets, none if there are no changes."""
        writer = LogWriter(client or self.client, self.target(**target))
        writer.append(dict(changes), preemptive=False)
        return writer.refs

    def persist(self, *refs: ChangeSetRef) -> list[dict[str, Any]]:
        """Make change sets durable; return their handles."""
        return self.client.persist(self.name, self.epoch, list(refs))

    def begin(self) -> None:
        """Begin the next checkpoint: a repeated batch begins without the change sets of the failed one."""
        self.client.post(f"{self.path}/checkpoints/{self.next_id}/begin", {"epoch": self.epoch})

    def flush(self, refs: list[ChangeSetRef]) -> None:
        """Start the upload of the next checkpoint."""
        body = asdict(self._request(self.next_id, refs, {}))
        self.client.post(f"{self.path}/checkpoints/{self.next_id}/flush", body)

    def complete(
        self, refs: list[ChangeSetRef], *, checkpoint_id: int | None = None, **fields: Any
    ) -> CompleteResponse:
        """
        Complete a checkpoint, by default the next one; it becomes the base.

        Args:
            refs: Its change sets.
            checkpoint_id: Its id.
            fields: Other fields of the request than those that follow from the base.
        """
        number = self.next_id if checkpoint_id is None else checkpoint_id
        body = asdict(self._request(number, refs, fields))
        answer = self.client.post(f"{self.path}/checkpoints/{number}/complete", body)
        response = CompleteResponse(**{**answer, "ref": CheckpointRef(**answer["ref"])})
        self.base = response.ref
        return response

    def frames(
        self, ref: CheckpointRef | None = None, client: ServiceClient | None = None
    ) -> list[tuple[dict[str, Any], bytes]]:
        """Return the frames that restore an empty table to a checkpoint, by default to the newest."""
        wanted = ref or self.base
        assert wanted is not None, "the job has no checkpoint"
        restore = (client or self.client).restore(self.name, self.operator, ALL_KEY_GROUPS, None, wanted.to_text())
        with restore as frames:
            return list(frames)

    def payloads(self, ref: CheckpointRef | None = None, client: ServiceClient | None = None) -> list[bytes]:
        """Return the payloads of the change sets in these frames."""
        return [payload for header, payload in self.frames(ref, client) if header["kind"] == "segment"]

    def _request(self, checkpoint_id: int, refs: list[ChangeSetRef], fields: Mapping[str, Any]) -> CompleteRequest:
        uid = f"{self.name}-e{self.epoch}c{checkpoint_id}"  # of no other job, like a real one
        known: dict[str, Any] = {"epoch": self.epoch, "uid": uid, "base": self.base, "operators": []}
        return CompleteRequest(refs=refs, **{**known, **fields})


def restored_table(
    client: ServiceClient, folder: Path, ref: CheckpointRef | None, job: str = "job", operator: str = "op"
) -> dict[bytes, bytes]:
    """Advance the table of all key groups in a folder to a checkpoint; return its content."""
    table = StateTable.open(folder)
    try:
        advance_to_base(table, client, job, operator, ALL_KEY_GROUPS, ref)
        return dict(table.items())
    finally:
        table.close()
