"""
Compares the stored state with a driver's model, using the library's own view of a checkpoint's content.

No service takes part: any later process would read this state.
"""

from __future__ import annotations

import io
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import dataclass, field

from dstl_service.cli import main
from dstl_service.collection.garbage_collector import collect_garbage
from dstl_service.formats.manifest import object_keys
from dstl_service.formats.under_way import uid_in_key
from dstl_service.registry.job_store import JobStore
from dstl_service.restore.plan import plan_restore, read_handles
from dstl_service.restore.segment_cache import SegmentCache
from loadtest.chaos.driver import ScriptedDriver
from loadtest.chaos.model import MAX_PARALLELISM, OPERATORS, Table, apply
from storage.change_set import decode_change_set
from storage.clock import SystemClock, SystemIds
from storage.errors import DstlError
from storage.key_groups import KeyGroupRange
from storage.object_store import ObjectStore
from storage.segment_reader import read_segments

_EVERYTHING = KeyGroupRange(0, MAX_PARALLELISM - 1)


@dataclass(slots=True)
class Findings:
    """Counts of compared items, and the defects found."""

    checkpoints: int = 0
    """Stored checkpoints whose whole state was restored and compared."""
    handles: int = 0
    """Segments that stored checkpoints name, each read and verified."""
    collected: int = 0
    """Orphans that the kills had left."""
    lost: list[str] = field(default_factory=list)
    """Stored checkpoints that name unreadable objects."""
    different: list[str] = field(default_factory=list)
    """Stored checkpoints whose state differs from the model."""
    orphans: list[str] = field(default_factory=list)
    """Unnamed objects that garbage collection left."""


def verify(storage: str, store: ObjectStore, driver: ScriptedDriver, findings: Findings) -> None:
    """
    Compare a job whose driver has stopped, delete its garbage, and compare it again.

    Args:
        storage: URL of the store, for ``dstl fsck``.
        store: Holds the job.
        driver: Knows the expected state.
        findings: Is extended with the findings.
    """
    clock = SystemClock()

    def opened() -> JobStore:
        job_store = JobStore(store, driver.job, clock, SystemIds())
        job_store.open(None)
        return job_store

    _compare(store, opened(), driver, findings, newest_only=1)  # subsumed ones may be incomplete
    findings.collected += len(collect_garbage(store, opened(), driver.job, clock, age_min_ms=0).orphans)
    _compare(store, opened(), driver, findings)
    findings.lost += _fsck(storage, driver.job)
    findings.orphans += _unnamed(store, opened(), driver.job)


def _compare(
    store: ObjectStore, job_store: JobStore, driver: ScriptedDriver, findings: Findings, newest_only: int | None = None
) -> None:
    newest = job_store.newest()
    if newest is None or newest.ref != driver.base:
        findings.different.append(f"{driver.job}: the newest checkpoint is {newest and newest.ref}, not {driver.base}")
        return
    for manifest in list(job_store.completed())[-newest_only if newest_only else 0 :]:
        name = f"{driver.job} at {manifest.ref.to_text()}"
        findings.checkpoints += 1
        try:
            findings.handles += sum(1 for _ in read_segments(store, job_store.state(manifest.ref).log))
            tables = {operator: _restored(store, job_store, operator, manifest.id) for operator in OPERATORS}
        except DstlError as error:
            findings.lost.append(f"{name}: {error}")
            continue
        expected = driver.states.get(manifest.id)
        for operator, (table, repeated) in tables.items():
            if expected is not None and table != expected[operator]:
                findings.different.append(f"{name}: {operator} has other content")
            if repeated:
                findings.different.append(f"{name}: {operator} has {repeated} segments twice")


def _restored(store: ObjectStore, job_store: JobStore, operator: str, checkpoint_id: int) -> tuple[Table, int]:
    """Return an operator's table as restored by a cold start, and how many segments came more than once."""
    manifest = job_store.newest_of(checkpoint_id)
    assert manifest is not None
    plan = plan_restore(job_store, operator, _EVERYTHING, None, manifest.ref)
    table: Table = {}
    for handle, payload in read_handles(plan.handles, store, SegmentCache(0)):
        apply(table, dict(decode_change_set(payload, handle.object_key)))
    places = Counter((handle.object_key, handle.entry.offset_bytes) for handle in plan.handles)
    return table, sum(count > 1 for count in places.values())


def _fsck(storage: str, job: str) -> list[str]:
    """Return the problems that ``dstl fsck`` reports; its last line is a summary."""
    with redirect_stdout(io.StringIO()) as output:
        code = main(["fsck", "--storage", storage, job])
    return (
        []
        if code == 0
        else [f"{job}: {line}" for line in output.getvalue().splitlines()[:-1] or [f"fsck ended with {code}"]]
    )


def _unnamed(store: ObjectStore, job_store: JobStore, job: str) -> list[str]:
    """Return the job's objects that no manifest names or lists, found without the garbage collector."""
    named = set(job_store.savepoints.object_keys())
    listed: frozenset[str] = frozenset()
    for manifest in job_store.completed():
        named |= object_keys(manifest)
        listed = manifest.under_way.uids
    folders = (f"{job}/{name}/" for name in ("segments", "materialized"))
    unnamed = [info.key for folder in folders for info in store.list(folder) if info.key not in named]
    return [key for key in unnamed if uid_in_key(key) not in listed]
