"""
Finds and deletes orphans: segment objects that no checkpoint names (I12), whoever crashed when.

An object is deleted only if both hold (I11): no checkpoint of the newest chain names it, and it is older than the
minimum age, which is longer than any checkpoint may take. Objects are listed *before* the manifests are read: one that
becomes part of a checkpoint in between is too young, and one that was part of it before is named.

`choose_orphans` is pure; `collect_garbage` does blocking I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from dstl_service.job_store import JobStore
from dstl_service.manifest import Manifest, ManifestKind, log_up_to
from storage.clock import Clock
from storage.model import ObjectInfo
from storage.object_store import ObjectStore

ORPHAN_AGE_MIN_MS = 30 * 60 * 1000
_DELETED_AT_ONCE = 500

logger = logging.getLogger("dstl_service")


@dataclass(frozen=True, slots=True)
class GarbageReport:
    """
    What a collection found and did.

    `young` are unnamed objects that are not old enough yet.
    Without any checkpoint all objects count as named: they may be all that is left.
    With `dry_run` the orphans were left where they are.
    """

    job: str
    dry_run: bool
    objects: int
    named: int
    young: int
    orphans: list[str]
    orphan_bytes: int


def choose_orphans(
    objects: Iterable[ObjectInfo], named: AbstractSet[str], now_ms: int, age_min_ms: int
) -> tuple[list[ObjectInfo], int]:
    """Return the objects that may be deleted, and how many unnamed ones are still too young (I11)."""
    unnamed = [info for info in objects if info.key not in named]
    orphans = [info for info in unnamed if now_ms - info.modified_ms >= age_min_ms]
    return orphans, len(unnamed) - len(orphans)


def collect_garbage(
    store: ObjectStore,
    jobs: JobStore,
    job: str,
    clock: Clock,
    *,
    age_min_ms: int = ORPHAN_AGE_MIN_MS,
    dry_run: bool = False,
) -> GarbageReport:
    """
    Delete a job's orphans, or only report them with `dry_run`.

    Args:
        store: Holds the job.
        jobs: The job's manifests.
        job: Its name.
        clock: Compared with the store's times of modification; minutes of difference do not matter.
        age_min_ms: Must exceed the checkpoint timeout while a query of the job may run.
        dry_run: Delete nothing.

    Raises:
        CorruptDataError: A manifest cannot be read; nothing was deleted.
    """
    now_ms = clock.now_ms()
    objects = list(store.list(f"{job}/segments/"))
    named = _named_objects(jobs)
    if named is None:
        # Either nothing was completed yet, or the manifests were lost and these objects are all that is left.
        named = {info.key for info in objects}
    orphans, young = choose_orphans(objects, named, now_ms, age_min_ms)
    keys = [info.key for info in orphans]
    if not dry_run:
        for begin in range(0, len(keys), _DELETED_AT_ONCE):
            store.delete(keys[begin : begin + _DELETED_AT_ONCE])
    logger.info(
        "garbage collected",
        extra={"job": job, "orphans": len(keys), "young": young, "objects": len(objects), "dry_run": dry_run},
    )
    return GarbageReport(
        job=job,
        dry_run=dry_run,
        objects=len(objects),
        named=len(objects) - len(orphans) - young,
        young=young,
        orphans=keys,
        orphan_bytes=sum(info.size_bytes for info in orphans),
    )


def _named_objects(jobs: JobStore) -> set[str] | None:
    """Return the keys of all objects that the newest checkpoint or one before it names; None without a checkpoint."""
    newest = jobs.newest()
    if newest is None:
        return None
    chain: list[Manifest] = []
    for manifest in jobs.chain(newest.ref):
        chain.append(manifest)
        if manifest.kind is ManifestKind.COMPLETE:
            break
    return {handle.object_key for handle in log_up_to(chain)}
