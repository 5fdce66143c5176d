"""Commands that maintain a job's objects: collect garbage, verify, rebuild."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from dstl_service.collection.garbage_collector import collect_garbage
from dstl_service.commands.common import deletions_of, open_existing, open_job, record, say, settings_of
from dstl_service.formats.tombstone import Tombstone
from dstl_service.repair.fsck import check_job
from dstl_service.repair.rebuild import describe_rebuild, rebuild_registry
from storage.clock import SystemClock, SystemIds
from storage.errors import InvalidInputError
from storage.object_store import ObjectStore


def collect(options: argparse.Namespace) -> int:
    """Print a job's orphans and, with ``--delete``, delete them."""
    if options.age_min_s is not None and options.age_min_s < 0:
        raise InvalidInputError(f"--age-min-s must not be negative: {options.age_min_s}")
    settings = settings_of(options)
    store, job_store = open_job(options)
    tombstone = deletions_of(store).of(options.job)
    if tombstone is not None:
        return _collect_deleted(options, store, tombstone)
    if options.delete:
        job_store.open(None)  # finishes an interrupted rewind
    age_min_s = settings.gc.age_min_s if options.age_min_s is None else options.age_min_s
    report = collect_garbage(
        store,
        job_store,
        options.job,
        SystemClock(),
        age_min_ms=age_min_s * 1000,
        checkpoints_max=settings.retention.checkpoints_max,
        dry_run=not options.delete,
    )
    say(*report.orphans)
    say(
        f"{report.objects} objects, {report.named} named by checkpoints, {report.young} too young to be checked; "
        f"{report.subsumed} manifests of subsumed checkpoints and {len(report.orphans)} orphans of "
        f"{report.orphan_bytes} bytes {'deleted' if options.delete else 'found'}"
    )
    if options.delete:
        record(store, "collect garbage", options.job, orphans=str(len(report.orphans)))
    return 0


def _collect_deleted(options: argparse.Namespace, store: ObjectStore, tombstone: Tombstone) -> int:
    """Delete the objects of a deleted job if its deletion can no longer be undone."""
    deletions = deletions_of(store)
    removal = deletions.collect(tombstone) if options.delete and deletions.is_over(tombstone) else None
    if removal is None:
        say(f"job {options.job} {tombstone.text}")
        return 0
    record(store, "collect deleted job", options.job, objects=str(removal.objects))
    say(f"job {options.job} was deleted; {removal.objects} objects of it were removed")
    return 0


def check(options: argparse.Namespace) -> int:
    """Verify a job's stored state, or rebuild its registry; print the problems; return 1 if there are any."""
    if not options.rebuild and (options.write or options.up_to is not None):
        raise InvalidInputError("fsck only verifies; --write and --up-to go with --rebuild")
    settings = settings_of(options)
    store = open_existing(settings)
    if options.rebuild:
        return rebuild(options, store)
    report = check_job(store, options.job)
    if options.json:
        say(json.dumps(asdict(report)))
    else:
        say(
            *report.problems,
            f"{report.checkpoints} checkpoints, {report.segments} segments in {report.objects} objects, "
            f"{report.bytes_read} bytes verified, {len(report.problems)} problems",
        )
    return 1 if report.problems else 0


def rebuild(options: argparse.Namespace, store: ObjectStore) -> int:
    """Rebuild a job's registry with ``--write``, else report what would be done; return 1 if problems remain."""
    report = rebuild_registry(store, options.job, SystemClock(), SystemIds(), up_to=options.up_to, write=options.write)
    if report.is_written:
        record(store, "rebuild", options.job)
    say(*([json.dumps(asdict(report))] if options.json else describe_rebuild(report)))
    return 1 if report.registry_problems and not report.is_written else 0
