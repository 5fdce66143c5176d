"""One execution of a batch: what the driver tells its tasks, and what they answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from backend_client.batch_time import BatchTime
from backend_client.service.host_link import linked_coordinator
from backend_client.service.job_session import kept_client
from backend_client.settings import BackendSettings
from backend_client.standby.executor_host import executor_host
from backend_client.standby.orders import CopyPlan
from dstl_service.wire import ChangeSetRef, CheckpointRef, LinkAddress


@dataclass(frozen=True, slots=True)
class BatchContext:
    """The driver's information for all tasks of one execution of a batch."""

    settings: BackendSettings
    job_uid: str
    epoch: int
    checkpoint_id: int
    base: CheckpointRef | None
    coordinator_id: str
    links: LinkAddress | None = None
    """Where the coordinator accepts links of other hosts; None if it does not."""
    standby: CopyPlan | None = None
    """Which host keeps a copy of which table; None without standbys."""
    time: BatchTime | None = None
    """None if no operator of the query uses time."""
    is_second_pass: bool = False
    """Whether this is the second pass, for what is due after the batch's rows; see `closing`."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """
    An attempt's result; `refs` name its change sets in order, `materialized` is its sidecar's report of a snapshot.

    `late_rows` counts dropped late rows. `next_due_ms` is a lower bound on when the first remaining timer is due or
    state ends; None without any, or if they do not use event time. The partition is *stalled* if its table was not
    there in time: its rows were set aside, `rows_set_aside` of them, in the change sets `set_aside`.
    """

    operator: str
    partition: int
    attempt: int
    rows: int
    keys: int
    changes: int
    refs: list[ChangeSetRef]
    materialized: dict[str, Any] | None = None
    late_rows: int = 0
    groups: int = 0
    """Number of rows that are left of these if Spark combines them; see `combining`."""
    state_reads: int = 0
    table_bytes: int = 0
    next_due_ms: int | None = None
    standby: dict[str, Any] | None = None
    """The report of its host's follower, see `tended`."""
    host: str | None = field(default_factory=executor_host)
    """The host of the process that made it, as Spark names it; None in local mode."""
    is_stalled: bool = False
    rows_set_aside: int = 0
    set_aside: list[ChangeSetRef] = field(default_factory=list)

    @classmethod
    def from_json(cls, text: str) -> Receipt:
        """Parse the receipt in a task's last row."""
        document = json.loads(text)
        refs = {name: [ChangeSetRef(**ref) for ref in document[name]] for name in ("refs", "set_aside")}
        return cls(**{**document, **refs})

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        return json.dumps(asdict(self), separators=(",", ":"))


def is_reachable(batch: BatchContext, refs: Sequence[ChangeSetRef]) -> bool:
    """Say whether the coordinator reaches the sidecar that took in these change sets of a task of the batch."""
    if all(ref.service_id == batch.coordinator_id or ref.service_url is not None for ref in refs):
        return True
    if batch.links is None:
        return False
    client, job = kept_client(batch.settings), batch.settings.job
    return linked_coordinator(client, job, batch.links, refs[-1].service_id) == batch.coordinator_id
