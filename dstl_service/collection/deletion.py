"""
Deletes what was subsumed, in an order in which nothing is lost that anyone can come to need meanwhile (I11).

1. Is the epoch still the newest in which it was decided what is subsumed? If not, nothing is deleted: another owner may
   go on from elsewhere.
2. All manifests that are stored and not needed are deleted, also those that an earlier process left behind.
3. What savepoints name is read; it is spared.
4. The epoch is looked at again. If a newer one has begun, no object is deleted.
5. Objects are deleted.

A checkpoint that becomes a savepoint: if the savepoint is written before step 3, it is seen there. Else its manifest is
looked for behind step 2, and is gone, or is one that is needed; see `SavepointStore.create`.

A job that is set back: what to is a savepoint from before the new epoch until it is a manifest, and the manifest is
there before the savepoint goes. So if step 3 reads the savepoints before, the argument above holds for it; if it reads
them in between, it sees the savepoint; and if it reads them behind, step 4 sees the epoch.

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
    Delete what was subsumed.

    Args:
        store: Holds the objects.
        job_store: The job's manifests.
        due: What to delete.
        spared: The manifests that are needed, or not due yet.
        epoch: The epoch in which that was decided.
    """
    if job_store.has_newer_epoch(epoch):
        return Deleted(0, 0, is_owner=False)
    subsumed = {ref for ref, _ in job_store.subsumed(list(spared))} | {ref for one in due for ref in one.manifests}
    job_store.delete_manifests(list(subsumed))
    keys = frozenset[str]().union(*(one.object_keys for one in due)) - job_store.savepoints.object_keys()
    if job_store.has_newer_epoch(epoch):
        return Deleted(len(subsumed), 0, is_owner=False)
    store.delete(sorted(keys))
    return Deleted(len(subsumed), len(keys))
