"""
The table of one partition of an operator: every task opens it in the same folder and advances it the same way.

The task of a batch opens it for its rows; a `TablePreparation` opens it earlier, so that the batch finds it advanced.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from backend_client.service.deadline import Deadline
from backend_client.service.hand_over import hand_over_snapshot
from backend_client.service.job_session import kept_client
from backend_client.service.restore import Advance, SlowRestoreError, advance_to_base
from backend_client.settings import BackendSettings
from backend_client.table.opening import open_advanced
from backend_client.table.state_table import StateTable
from dstl_service.wire import CheckpointRef
from storage.key_groups import KeyGroupRange

PREPARED = "seconds double"
"""Schema of the output: how long the preparation of each table took."""


def open_partition(
    settings: BackendSettings,
    job_uid: str,
    operator: str,
    key_groups: KeyGroupRange,
    base: CheckpointRef | None,
    patience_s: float | None = None,
) -> tuple[StateTable, Advance]:
    """
    Open a partition's table on this host and advance it to checkpoint `base`; the caller closes it.

    Args:
        settings: The job's settings.
        job_uid: The job's uid, part of the folder.
        operator: The operator's name.
        key_groups: The partition's key groups.
        base: The checkpoint; None for an empty table.
        patience_s: How many seconds opening and advancing it may take; None: as long as it takes. With 0 it is not
            even opened.

    Raises:
        SlowRestoreError: It takes longer.
        DstlError: Stored state is damaged, or the sidecar or its store does not answer.
    """
    if patience_s == 0:
        raise SlowRestoreError("the table is being restored elsewhere")
    advance = partial(
        advance_to_base,
        client=kept_client(settings),
        job=settings.job,
        operator=operator,
        key_groups=key_groups,
        base=base,
        until=None if patience_s is None else Deadline(patience_s),
    )
    folder = settings.private_folder("tables", job_uid, operator, key_groups.to_text())
    return open_advanced(folder, advance, settings.local_idle_s, patience_s)


@dataclass(frozen=True, slots=True)
class TablePreparation:
    """
    The function that ``mapInArrow`` runs: its input's only column has indexes of partitions to prepare.

    Args:
        settings: The job's settings.
        job_uid: The job's uid.
        operator: The operator's name.
        key_groups: Those of each partition, by index.
        base: The checkpoint to which the tables are advanced.
    """

    settings: BackendSettings
    job_uid: str
    operator: str
    key_groups: tuple[KeyGroupRange, ...]
    base: CheckpointRef

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Advance the tables of these partitions to the base, and leave them on this host's disk, as tasks do."""
        for batch in batches:
            for at in batch.column(0).to_pylist():
                key_groups, begun_s = self.key_groups[at], time.monotonic()
                table, advance = open_partition(self.settings, self.job_uid, self.operator, key_groups, self.base)
                with closing(table):
                    if advance.materialize:  # else the sidecar waits for the answer, and asks no later task
                        client, job = kept_client(self.settings), self.settings.job
                        hand_over_snapshot(table, client, job, self.operator, key_groups, self.base)
                yield pa.RecordBatch.from_pydict({"seconds": [time.monotonic() - begun_s]})
