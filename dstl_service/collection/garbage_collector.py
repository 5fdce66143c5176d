"""
Finds and deletes orphans: objects that neither a retained checkpoint nor a savepoint names (I12), after any crash.

Neither an age nor a clock decides what is safe (I11): the minimum age only saves requests for objects that are about to
be named. Objects are listed *before* the manifests are read, so an object that becomes part of a checkpoint in between
belongs to the next one, and one that was part of a checkpoint before is named. An object that no manifest names yet is
kept if a later one may name it:

- An object of a snapshot or a compaction carries a uid. It was put after a manifest had listed the uid as under way. If
  the newest manifest neither lists nor names it, no later one will (`dstl_service.formats.under_way`).
- Any other object holds change sets. A checkpoint names only sets of its own id and of its driver's epoch, so those of
  a completed checkpoint's id, or of an epoch that can complete no checkpoint any more, are never named again. After a
  rewind the epoch is a newer one.

Manifests of subsumed checkpoints that their coordinator left are deleted before objects, so that no manifest names a
deleted object. Between the two the savepoints are read again: one made of such a checkpoint meanwhile is seen then, or
its maker sees that the manifest is gone (`SavepointStore.create`).

The target of a rewind is named by a savepoint before it and by a manifest after it. A collection during which a newer
epoch began may have seen neither, and deletes nothing.

Objects of a later job of the same name lie in the same folders. After the listing the collector checks whether the job
was deleted: if it was not, none of them was listed (`dstl_service.registry.lives`).

Objects of other jobs, which a fork names, are never listed here. The fork's hold, which keeps them there, is released
here like an orphan: when nothing names any of them after the second look at the savepoints, and no newer epoch began. A
later manifest names what its base names, its own sets, and a snapshot that shares files with its base's.

`choose_orphans` is pure; `collect_garbage` does blocking I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from dstl_service.collection.retention import CHECKPOINTS_MAX, manifests_to_keep
from dstl_service.formats.manifest import Manifest, ManifestKind, object_keys
from dstl_service.formats.under_way import uid_in_key
from dstl_service.registry.job_store import JobStore
from dstl_service.wire import CheckpointRef
from storage.clock import Clock
from storage.errors import CorruptDataError, NotFoundError
from storage.leftovers import remove_empty_folders, remove_leftovers
from storage.model import ObjectInfo
from storage.object_store import ObjectStore

ORPHAN_AGE_MIN_MS = 30 * 60 * 1000
_DELETED_AT_ONCE = 500

logger = logging.getLogger("dstl_service")


@dataclass(frozen=True, slots=True)
class GarbageReport:
    """
    The result of a collection.

    `young` are unnamed objects that are not old enough yet, or that a later checkpoint may come to name.
    `subsumed` counts manifests that no retained checkpoint needs.
    Without any checkpoint all objects count as named: they may be all that is left.
    With `dry_run` the orphans were left where they are.
    """

    job: str
    dry_run: bool
    objects: int
    named: int
    young: int
    subsumed: int
    orphans: list[str]
    orphan_bytes: int


def choose_orphans(
    objects: Iterable[ObjectInfo],
    named: AbstractSet[str],
    under_way: AbstractSet[str],
    now_ms: int,
    age_min_ms: int,
) -> list[ObjectInfo]:
    """
    Return the objects that are orphans by their keys and ages (I11).

    Args:
        objects: All objects, listed before the manifests were read.
        named: Keys that manifests and savepoints name.
        under_way: Uids that the newest manifest lists.
        now_ms: The time.
        age_min_ms: Younger objects are kept.
    """
    return [
        info
        for info in objects
        if info.key not in named and now_ms - info.modified_ms >= age_min_ms and uid_in_key(info.key) not in under_way
    ]


def collect_garbage(
    store: ObjectStore,
    job_store: JobStore,
    job: str,
    clock: Clock,
    *,
    age_min_ms: int = ORPHAN_AGE_MIN_MS,
    checkpoints_max: int = CHECKPOINTS_MAX,
    dry_run: bool = False,
) -> GarbageReport:
    """
    Delete a job's orphans, or only report them with `dry_run`.

    Args:
        store: Holds the job.
        job_store: The job's manifests.
        job: Its name.
        clock: Compared with the store's modification times; a wrong one costs requests, or delays a deletion.
        age_min_ms: Younger objects are kept. Files that killed processes left anywhere in the store are removed after
            the default age at the earliest.
        checkpoints_max: How many checkpoints are retained; a service that retains fewer deletes the others itself.
        dry_run: Delete nothing.

    Raises:
        CorruptDataError: A manifest or a savepoint cannot be read; no object was deleted.
        NotFoundError: The job was deleted; nothing was collected.
    """
    now_ms = clock.now_ms()
    begun = 0 if dry_run else job_store.settled_epoch()
    found = _look(store, job_store, job, checkpoints_max, now_ms - age_min_ms, dry_run=dry_run)
    orphans = _orphans(job_store, found, now_ms, age_min_ms)
    if not dry_run:
        orphans = _delete(store, job_store, found, orphans, begun)
        job_store.tidy_holds(now_ms - max(age_min_ms, ORPHAN_AGE_MIN_MS))
        # This covers the whole store, where calls of other jobs may run, so the age must suffice.
        remove_leftovers(store, clock, max(age_min_ms, ORPHAN_AGE_MIN_MS))
        remove_empty_folders(store, f"{job}/segments", max(age_min_ms, ORPHAN_AGE_MIN_MS))  # of hosts that are gone
    report = _report(job, found, orphans, dry_run=dry_run)
    logger.info(
        "garbage collected",
        extra={
            "job": job,
            "orphans": len(orphans),
            "young": report.young,
            "objects": report.objects,
            "subsumed": report.subsumed,
            "dry_run": dry_run,
        },
    )
    return report


@dataclass(frozen=True, slots=True)
class _Found:
    """
    The stored objects of a job.

    Args:
        objects: Its objects, listed before the manifests were read.
        named: Keys that retained checkpoints, manifests that stay, and savepoints name.
        newest: The newest checkpoint's manifest.
        epoch: The epoch of the newest manifest or fence.
        subsumed: Manifests to delete.
    """

    objects: list[ObjectInfo]
    named: AbstractSet[str]
    newest: Manifest | None
    epoch: int
    subsumed: list[CheckpointRef]


def _report(job: str, found: _Found, orphans: Sequence[ObjectInfo], *, dry_run: bool) -> GarbageReport:
    named = sum(info.key in found.named for info in found.objects)
    return GarbageReport(
        job=job,
        dry_run=dry_run,
        objects=len(found.objects),
        named=named,
        young=len(found.objects) - named - len(orphans),
        subsumed=len(found.subsumed),
        orphans=[info.key for info in orphans],
        orphan_bytes=sum(info.size_bytes for info in orphans),
    )


def _look(
    store: ObjectStore, job_store: JobStore, job: str, checkpoints_max: int, modified_ms_max: int, *, dry_run: bool
) -> _Found:
    """List the objects, then read what names them."""
    objects = [info for folder in ("segments", "materialized") for info in store.list(f"{job}/{folder}/")]
    newest, epoch = job_store.frontier()
    job_store.check_not_ended()
    kept = manifests_to_keep(job_store.stored_chain(newest.ref), checkpoints_max) if newest else []
    if not kept:
        # Either no checkpoint was completed yet, or the manifests were lost and these objects are all that is left.
        return _Found(objects, {info.key for info in objects}, newest, epoch, [])
    subsumed, staying = _divide_subsumed(job_store, kept, modified_ms_max)
    # A manifest that stays is whole, even if it is no longer needed.
    named = _named(job_store, [*kept, *staying], begin=not dry_run)
    return _Found(objects, named, newest, epoch, subsumed)


def _orphans(job_store: JobStore, found: _Found, now_ms: int, age_min_ms: int) -> list[ObjectInfo]:
    """Return the objects that nothing names, and no later checkpoint can name."""
    under_way = found.newest.under_way.uids if found.newest else set()
    orphans = choose_orphans(found.objects, found.named, under_way, now_ms, age_min_ms)
    if found.newest is None:
        return orphans
    sets = filter(_holds_change_sets, orphans)
    unfinished = job_store.unfinished.among(sets, found.newest.id, found.epoch)
    return [info for info in orphans if info not in unfinished]


def _delete(
    store: ObjectStore, job_store: JobStore, found: _Found, orphans: list[ObjectInfo], begun: int
) -> list[ObjectInfo]:
    """
    Delete subsumed manifests, then orphans; return those that were, after a second look at the savepoints.

    A fork that names no object of another job any more releases its hold.
    """
    job_store.delete_manifests(found.subsumed)
    is_fork = job_store.origin is not None and found.newest is not None
    is_apart = is_fork and all(map(job_store.owns, found.named))
    if orphans or is_apart:
        saved = _named(job_store, [])
        orphans = [info for info in orphans if info.key not in saved]
        is_apart = is_apart and all(map(job_store.owns, saved))
    if (orphans or is_apart) and job_store.has_newer_epoch(begun):  # a rewind may have made unnamed objects needed
        return []
    if is_apart:
        job_store.release_hold()
    elif is_fork:
        job_store.ensure_hold()
    keys = [info.key for info in orphans]
    for begin in range(0, len(keys), _DELETED_AT_ONCE):
        store.delete(keys[begin : begin + _DELETED_AT_ONCE])
    return orphans


def _named(job_store: JobStore, manifests: Sequence[Manifest], *, begin: bool = True) -> set[str]:
    """Return the keys of all objects that these manifests and all savepoints name."""
    saved = job_store.savepoints.named(job_store.indexes, begin=begin)
    keys = saved.union(*(object_keys(manifest) for manifest in manifests))
    for handle in dict.fromkeys(handle for manifest in manifests for handle in manifest.materializations):
        try:
            keys |= job_store.indexes.object_keys_of([handle])
        except CorruptDataError:
            # An index is deleted only after all manifests that named it.
            if any(handle in item.materializations and job_store.is_stored(item.ref) for item in manifests):
                raise
    return keys


def _divide_subsumed(
    job_store: JobStore, kept: Sequence[Manifest], modified_ms_max: int
) -> tuple[list[CheckpointRef], list[Manifest]]:
    """Return the subsumed manifests to delete, and those that stay: young ones, with all manifests that they need."""
    older: list[tuple[CheckpointRef, Manifest]] = []
    staying_from: int | None = None
    complete_at = 0
    for ref, info in job_store.subsumed([manifest.ref for manifest in kept]):
        try:
            manifest = job_store.load(ref.id, ref.generation)
        except NotFoundError:  # its coordinator is deleting it
            continue
        if manifest.kind is ManifestKind.COMPLETE:
            complete_at = len(older)
        if info.modified_ms > modified_ms_max and staying_from is None:
            staying_from = complete_at
        older.append((ref, manifest))
    if staying_from is None:
        staying_from = len(older)
    return [ref for ref, _ in older[:staying_from]], [manifest for _, manifest in older[staying_from:]]


def _holds_change_sets(info: ObjectInfo) -> bool:
    """Return whether an object belongs to neither a snapshot nor a compaction."""
    return info.key.endswith(".seg") and uid_in_key(info.key) is None
