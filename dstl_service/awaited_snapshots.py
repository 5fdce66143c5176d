"""
Finds again what an earlier process of this host or another stored and no checkpoint has taken in yet.

A batch may come hours after the one that made a snapshot, and the sidecar that stored it may be gone by then. What is
found is offered as if this process had stored it. The coordinator's gate decides, as for any other. Blocking I/O.
"""

from __future__ import annotations

from dstl_service.job_store import JobStore
from dstl_service.materialization_check import check_handle
from dstl_service.materialization_index import decode_index, materialization_folder
from dstl_service.snapshot_uploader import TableId
from dstl_service.wire import CheckpointRef
from storage.clock import Clock
from storage.errors import CorruptDataError, InvalidInputError, NotFoundError
from storage.model import MaterializationHandle
from storage.object_store import ObjectStore

_REST_PART = 3
"""After this part of the handover's time nobody stores it any more, and no collector runs that has not listed it."""


def find_awaited(
    store: ObjectStore, jobs: JobStore, table: TableId, base: CheckpointRef, clock: Clock, handover_ms: int
) -> tuple[MaterializationHandle, int] | None:
    """
    Return the newest whole snapshot of a table that the checkpoint after `base` may take in and its age in ms, or None.

    Args:
        store: Holds the job.
        jobs: The job's manifests.
        table: Of which it is to be; of exactly these key groups.
        base: The checkpoint at which the table is to stand.
        clock: Compared with the store's time of modification.
        handover_ms: See `dstl_service.materialization_index.handover_ms_max`.
    """
    named = {handle.index_key for handle in jobs.state(base).materializations}
    listed = list(store.list(materialization_folder(table.job, table.operator, table.key_groups)))
    sizes = {info.key: info.size_bytes for info in listed}
    for info in sorted(listed, key=lambda info: info.modified_ms, reverse=True):
        age_ms = clock.now_ms() - info.modified_ms
        if not info.key.endswith(".json") or info.key in named or age_ms < handover_ms // _REST_PART:
            continue
        try:
            index = decode_index(store.get(info.key), info.key)
            handle = index.handle(table.job)
            check_handle(store, jobs, table.job, base, handle, clock, handover_ms)
        except (CorruptDataError, InvalidInputError, NotFoundError):
            continue  # of another history, too old, or damaged
        # The index is written before the files: its process may have died before they were all there.
        if all(sizes.get(file.object_key) == file.size_bytes for file in index.files):
            return handle, age_ms
    return None
