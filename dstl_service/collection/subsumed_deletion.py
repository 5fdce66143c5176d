"""
Deletes subsumed checkpoints, in an order that loses nothing that may become needed meanwhile (I11).

1. The epoch of the decision must still be the newest. Else nothing is deleted: another owner may continue from another
   checkpoint.
2. All stored manifests that are not needed are deleted, those that an earlier process left included.
3. The savepoints are read; the objects that they name are spared.
4. The epoch is checked again. If a newer one has begun, no object is deleted.
5. Objects are deleted, but for those of other jobs, which a fork names: their own jobs' collectors delete them.

A checkpoint that becomes a savepoint: if the savepoint is written before step 3, step 3 sees it. Else its manifest is
looked up after step 2, and is either gone or needed; see `SavepointStore.create`.

A rewind: its target is a savepoint from before the new epoch until it is a manifest, and the manifest exists before the
savepoint is deleted. If step 3 reads the savepoints before that period, the argument above applies; if it reads them
within it, it sees the savepoint; if it reads them after it, step 4 sees the epoch.

Blocking I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dstl_service.collection.retention import Deletion
from dstl_service.registry.job_store import JobStore
from dstl_service.wire import CheckpointRef
from storage.object_store import ObjectStore


@dataclass(frozen=True, slots=True)
class Deleted:
    """How many manifests and objects were deleted; `is_owner` is False if a newer epoch has begun."""

    manifests: int
    objects: int
    is_owner: bool = True


def delete_subsumed(
    store: ObjectStore, job_store: JobStore, due: Sequence[Deletion], spared: Iterable[CheckpointRef], epoch: int
) -> Deleted:
    """
    Delete subsumed manifests and objects.

    Args:
        store: Holds the objects.
        job_store: The job's manifests.
        due: Deletions that are due.
        spared: The manifests that are needed, or not due yet.
        epoch: The epoch in which the deletions were decided.
    """
    if job_store.has_newer_epoch(epoch):
        return Deleted(0, 0, is_owner=False)
    subsumed = {ref for ref, _ in job_store.subsumed(list(spared))} | {ref for one in due for ref in one.manifests}
    job_store.delete_manifests(list(subsumed))
    keys = frozenset[str]().union(*(one.object_keys for one in due)) - job_store.savepoints.object_keys()
    if job_store.has_newer_epoch(epoch):
        return Deleted(len(subsumed), 0, is_owner=False)
    own = sorted(filter(job_store.owns, keys))
    store.delete(own)
    return Deleted(len(subsumed), len(own))
