"""Commands on whole jobs: list, delete, undelete, audit, rescale."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from dstl_service.access.audit import AuditTrail, this_user
from dstl_service.collection.job_deletion import delete_job, has_leftovers, job_names
from dstl_service.collection.tombstones import Deletions
from dstl_service.commands.common import complain, deletions_of, open_existing, open_job, record, say, settings_of
from dstl_service.formats.tombstone import Tombstone
from dstl_service.process.display import utc_text
from dstl_service.registry.forks import living_forks
from dstl_service.registry.job_store import MAX_PARALLELISM_DEFAULT, JobStore
from dstl_service.registry.lives import Lives
from storage.clock import SystemClock, SystemIds
from storage.errors import ConflictError, CorruptDataError, DstlError, NotFoundError


def list_jobs(options: argparse.Namespace) -> int:
    """Print the names of all jobs of a storage. Return 1 if a deleted job's tombstone cannot be read."""
    settings = settings_of(options)
    store = open_existing(settings)
    deletions = deletions_of(store)
    damage: list[str] = []
    deleted = {tombstone.job for tombstone in deletions.all(damage.append)}
    name = None
    for name in job_names(store):
        tombstone = deletions.of(name) if name in deleted else None
        say(f"{name}  {tombstone.text}" if tombstone is not None else name)
    if name is None:
        complain(f"there are no jobs in {settings.storage}; it must be the storage that the queries' backend has")
    return _reported(damage)


def rescale(options: argparse.Namespace) -> int:
    """Request another parallelism for an operator of a job's running query."""
    store, job_store = open_job(options)
    deletions_of(store).check(options.job)
    job_store.open(None)
    job_store.request_parallelism(options.operator, options.parallelism)
    record(store, "rescale", options.job, operator=options.operator, parallelism=str(options.parallelism))
    say(
        f"operator {options.operator} of job {options.job}: {options.parallelism} partitions requested; the running "
        "query prepares their tables and then switches, and its log says so"
    )
    return 0


def delete(options: argparse.Namespace) -> int:
    """Delete a job: with ``--now`` at once, otherwise undoable; without ``--write`` only report its size."""
    if (left := _leftovers(options)) is not None:
        return left
    store, _ = open_job(options)
    if not options.write:
        found = delete_job(store, options.job)
        forks = living_forks(store, options.job, Lives(store, options.job).current())
        remedy = f"delete its forks first: {', '.join(forks)}" if forks else "stop the query first; --write does it"
        say(f"job {found.job}: {found.objects} objects of {found.size_bytes} bytes would be deleted; {remedy}")
        return 0
    deletions = deletions_of(store)
    tombstone = deletions.of(options.job)
    if tombstone is None:
        tombstone = deletions.bury(options.job, this_user(), settings_of(options).deletion.delay_s)
    else:
        deletions.check_no_forks(tombstone)
    record(store, "delete", options.job, now=str(options.now))
    if not options.now:
        _fence(deletions, tombstone)
        say(
            f"job {options.job} {tombstone.text}, with `dstl undelete`; then its objects are deleted, and its name is "
            "free"
        )
        return 0
    try:
        removal = deletions.collect(tombstone)
    except (CorruptDataError, NotFoundError) as error:
        complain(f"warning: a query that still runs is not stopped by this; stop it: {error}")
        removal = deletions.collect(tombstone, although_damaged=True)
    if removal is None:
        raise ConflictError(f"job {options.job!r} was brought back meanwhile; nothing was deleted")
    say(f"job {removal.job}: {removal.objects} objects of {removal.size_bytes} bytes deleted")
    return 0


def _reported(damage: Sequence[str]) -> int:
    """Print what cannot be read; return the exit code."""
    for message in damage:
        complain(message)
    return 1 if damage else 0


def _fence(deletions: Deletions, tombstone: Tombstone) -> None:
    """
    Fence a query that still runs, so that it stops at its next checkpoint; warn if that fails.

    Nothing is deleted yet: the collection of the job fences it first.
    """
    try:
        deletions.fence(tombstone)
    except DstlError as error:
        complain(f"warning: a query that still runs is not stopped by this; stop it: {error}")


def undelete(options: argparse.Namespace) -> int:
    """Bring a deleted job back."""
    store, _ = open_job(options)
    deletions_of(store).undo(options.job)
    record(store, "undelete", options.job)
    say(f"job {options.job} is restored; its query can be started")
    return 0


def audit(options: argparse.Namespace) -> int:
    """Print the audit log of a job, oldest first; the job may be gone. Return 1 if an entry cannot be read."""
    settings = settings_of(options)
    store = open_existing(settings)
    trail = AuditTrail(store, SystemClock(), SystemIds())
    damage: list[str] = []
    entry = None
    for entry in trail.entries(options.job, damage.append):
        at = utc_text(entry.at_ms)
        facts = "  ".join(f"{name}={text}" for name, text in entry.facts.items())
        row = f"{at}  {entry.who}  {entry.act}  {facts}".rstrip()
        say(json.dumps({**asdict(entry), "at": at}) if options.json else row)
    if entry is None and not damage:
        complain(f"nothing is recorded of a job {options.job!r} in {settings.storage}")
    return _reported(damage)


def _leftovers(options: argparse.Namespace) -> int | None:
    """Delete the objects of a name without a job, or report their number; None if there is a job or no object."""
    settings = settings_of(options)
    store = open_existing(settings)
    is_job = JobStore(store, options.job, SystemClock(), SystemIds()).exists()
    if is_job or deletions_of(store).of(options.job) is not None or not has_leftovers(store, options.job):
        return None
    removal = (
        deletions_of(store).clear(options.job, this_user(), MAX_PARALLELISM_DEFAULT)
        if options.write
        else delete_job(store, options.job)
    )
    say(
        f"job {options.job} has no job.json: it was never created, or its registry is lost, and `dstl fsck --rebuild` "
        f"reports what can be restored; {removal.objects} objects of {removal.size_bytes} bytes "
        f"{'deleted' if options.write else 'would be deleted, for good; --write does it'}"
    )
    return 0
