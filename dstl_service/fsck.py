"""
Verifies a job's stored state: every manifest of the newest chain, and every byte of every object that it names (I10).

Reads only; damage is collected, not raised, so that one report tells all of it. Blocking I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dstl_service.job_store import JobStore
from dstl_service.manifest import Manifest
from storage.errors import CorruptDataError, DstlError, NotFoundError
from storage.model import SegmentHandle
from storage.object_store import ObjectStore
from storage.segment_format import decode_object


@dataclass(slots=True)
class FsckReport:
    """What was looked at, and what is wrong; `problems` each name an object."""

    job: str
    checkpoints: int = 0
    objects: int = 0
    segments: int = 0
    bytes_read: int = 0
    problems: list[str] = field(default_factory=list)


def check_job(store: ObjectStore, jobs: JobStore, job: str) -> FsckReport:
    """Read all that the newest checkpoint and those before it name, and compare it with its checksums."""
    report = FsckReport(job)
    named: dict[str, list[SegmentHandle]] = {}
    for manifest in _chain(jobs, report):
        report.checkpoints += 1
        for handle in manifest.segments:
            named.setdefault(handle.object_key, []).append(handle)
    for key, handles in sorted(named.items()):
        report.objects += 1
        report.segments += len(handles)
        try:
            report.bytes_read += _check_object(store, key, handles)
        except DstlError as error:
            report.problems.append(str(error))
    return report


def _chain(jobs: JobStore, report: FsckReport) -> list[Manifest]:
    """Return as much of the chain as can be read; note where it breaks."""
    found: list[Manifest] = []
    try:
        newest = jobs.newest()
        if newest is not None:
            for manifest in jobs.chain(newest.ref):
                found.append(manifest)  # noqa: PERF402 - what was read before an error counts
    except DstlError as error:
        report.problems.append(str(error))
    return found


def _check_object(store: ObjectStore, key: str, handles: list[SegmentHandle]) -> int:
    try:
        data = store.get(key)
    except NotFoundError:
        raise CorruptDataError(f"object {key} named by a checkpoint is missing", object_key=key) from None
    stored = {entry for entry, _ in decode_object(data, key)}
    missing = [handle for handle in handles if handle.entry not in stored or handle.object_size_bytes != len(data)]
    if missing:
        raise CorruptDataError(f"object {key} does not hold {len(missing)} of the segments named in it", object_key=key)
    return len(data)
