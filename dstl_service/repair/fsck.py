"""
Verifies a job's stored state (I10): its registry, and every byte that its newest chain and savepoints name.

Table files have two kinds of checksums: the object's, and those that RocksDB wrote into the file. Both are verified.

Reads only; damage is collected, not raised, so that one report has all of it. Blocking I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from dstl_service.formats.manifest import Manifest
from dstl_service.registry.forks import has_hold
from dstl_service.repair.scan import Registry, read_registry
from dstl_service.repair.snapshots import check_snapshots
from storage.errors import CorruptDataError, NotFoundError
from storage.model import SegmentHandle
from storage.object_store import ObjectStore
from storage.segment_format import decode_object


@dataclass(slots=True)
class FsckReport:
    """Counts of verified items, and the problems found, each with the name of an object."""

    job: str
    checkpoints: int = 0
    objects: int = 0
    segments: int = 0
    bytes_read: int = 0
    problems: list[str] = field(default_factory=list)


def check_job(store: ObjectStore, job: str) -> FsckReport:
    """
    Read a job's registry and all objects that its newest chain and savepoints name, and verify their checksums.

    Raises:
        NotFoundError: The job has no object.
        UnavailableError: The store does not answer.
    """
    registry = read_registry(store, job)
    if registry.is_empty and next(iter(store.list(f"{job}/segments/")), None) is None:
        raise NotFoundError(f"job {job!r} does not exist in {store.url}", job=job)
    report = FsckReport(job, problems=[*registry.problems(), *registry.damaged_savepoints.values()])
    chain = _chain(registry)
    report.checkpoints = len(chain)
    snapshots = {handle for manifest in (*chain, *registry.kept) for handle in manifest.materializations}
    chain += registry.savepoints.values()
    for key, handles in sorted(_named(chain).items()):
        report.objects += 1
        report.segments += len(handles)
        try:
            report.bytes_read += check_object(store, key, handles)
        except CorruptDataError as error:
            report.problems.append(error.message)
    if (origin := registry.origin) is not None and registry.uid is not None:
        foreign = [key for key in _named(chain) if not key.startswith(f"{job}/")]
        if foreign and not has_hold(store, registry.uid, origin):
            report.problems.append(
                f"{len(foreign)} objects of other jobs are needed, such as {foreign[0]}, and no savepoint of job "
                f"{origin.job!r} keeps them for this fork: it was lost with that job's registry. `dstl gc --delete` of "
                "the fork makes it again"
            )
    for size_bytes, problem in check_snapshots(store, sorted(snapshots, key=lambda handle: handle.index_key)):
        report.bytes_read += size_bytes
        report.problems += [problem] if problem else []
    return report


def check_object(store: ObjectStore, key: str, handles: Iterable[SegmentHandle]) -> int:
    """
    Read a segment object, verify every byte and that it holds the segments of `handles`; return its size in bytes.

    Raises:
        CorruptDataError: The object is missing, damaged, or another one.
    """
    try:
        data = store.get(key)
    except NotFoundError:
        raise CorruptDataError(f"object {key} named by a checkpoint is missing", object_key=key) from None
    stored = {entry for entry, _ in decode_object(data, key)}
    missing = [handle for handle in handles if handle.entry not in stored or handle.object_size_bytes != len(data)]
    if missing:
        raise CorruptDataError(f"object {key} lacks {len(missing)} segments that a checkpoint names", object_key=key)
    return len(data)


def _chain(registry: Registry) -> list[Manifest]:
    """Return the intact part of the newest chain; the break is among the registry's problems."""
    found: list[Manifest] = []
    with suppress(CorruptDataError):
        if registry.newest is not None:
            for manifest in registry.chain(registry.newest):
                found.append(manifest)  # noqa: PERF402 - keeps the manifests before the break
    return found


def _named(chain: Iterable[Manifest]) -> dict[str, set[SegmentHandle]]:
    """Return the segments that a chain names, by object."""
    named: dict[str, set[SegmentHandle]] = {}
    for manifest in chain:
        for handle in (*manifest.segments, *manifest.earlier, *([manifest.note] if manifest.note else [])):
            named.setdefault(handle.object_key, set()).add(handle)
    return named
