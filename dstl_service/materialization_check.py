"""
The coordinator's gate: which of the materializations that tasks report may enter a checkpoint's state.

What does not belong to the state is refused and counted, never an error: a checkpoint does not depend on it (I13).
Refused are handles that are damaged, of another job, of key groups that the job does not have, of a checkpoint that is
no ancestor of the base (an aborted or fenced history), and those whose objects the garbage collector could have taken
meanwhile: too old, or built upon a materialization that the state has no more (I11). Blocking I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from dstl_service.job_store import JobStore
from dstl_service.materialization_index import index_key, may_enter, read_index
from dstl_service.truncation import would_count
from dstl_service.wire import CheckpointRef
from storage.clock import Clock
from storage.errors import DstlError, InvalidInputError
from storage.model import MaterializationHandle
from storage.object_store import ObjectStore

logger = logging.getLogger("dstl_service")


def choose_materializations(
    store: ObjectStore,
    jobs: JobStore,
    job: str,
    base: CheckpointRef,
    reported: Sequence[dict[str, Any]],
    clock: Clock,
    handover_ms: int,
    patience_ms: int,
) -> tuple[list[MaterializationHandle], int]:
    """
    Return those of the reported handles that may enter the state that follows `base`, and how many may not.

    Args:
        store: Holds the job.
        jobs: The job's manifests.
        job: Its name.
        base: The checkpoint on which the new one builds.
        reported: Handles as tasks reported them; of several attempts the same one may come twice.
        clock: Compared with the store's time of modification; minutes of difference do not matter.
        handover_ms: How old an index may be that is not awaited.
        patience_ms: No further handle is looked at after this time; those that are left are reported again.
    """
    accepted: dict[str, MaterializationHandle] = {}
    refused = 0
    until_ms = clock.monotonic_ms() + patience_ms
    for data in reported:
        if clock.monotonic_ms() > until_ms:
            break
        try:
            handle = MaterializationHandle.from_dict(data)
            state = jobs.state(base)
            if handle.uid not in accepted and all(item.uid != handle.uid for item in state.materializations):
                check_handle(store, jobs, job, base, handle, clock, handover_ms)
                accepted[handle.uid] = handle
        except DstlError as error:
            refused += 1
            logger.warning("materialization refused", extra={"job": job, "error": str(error)})
    return list(accepted.values()), refused


def check_handle(
    store: ObjectStore,
    jobs: JobStore,
    job: str,
    base: CheckpointRef,
    handle: MaterializationHandle,
    clock: Clock,
    handover_ms: int,
) -> None:
    """
    Raise what speaks against a handle, whose files are taken to be whole.

    Raises:
        InvalidInputError: It does not belong to the state, or its objects may be gone.
        CorruptDataError: Its index cannot be read.
        NotFoundError: Its index is gone.
    """
    state = jobs.state(base)
    if handle.index_key != index_key(job, handle.operator, handle.key_groups, handle.uid):
        raise InvalidInputError(f"{handle.index_key} is no index of job {job!r}")
    if handle.key_groups.last >= jobs.max_parallelism:
        raise InvalidInputError(f"job {job!r} has no key groups {handle.key_groups.to_text()}")
    if not would_count(state, handle):
        raise InvalidInputError(f"materialization {handle.uid} is no newer than what the state has")
    age_ms = clock.now_ms() - store.head(handle.index_key).modified_ms
    if not may_enter(handle.checkpoint_id, base.id, age_ms, handover_ms):
        raise InvalidInputError(f"materialization {handle.uid} is too old to enter a checkpoint")
    index = read_index(store, handle)
    if index.job_uid != jobs.job_uid:
        raise InvalidInputError(f"materialization {handle.uid} belongs to another life of job {job!r}")
    if not jobs.is_ancestor(index.version, base):
        raise InvalidInputError(
            f"materialization {handle.uid} is of checkpoint {index.version.to_text()}, which is no ancestor of "
            f"{base.to_text()}"
        )
    if not set(index.parents) <= {item.uid for item in state.materializations}:
        raise InvalidInputError(f"materialization {handle.uid} is built upon one that the state has no more")
