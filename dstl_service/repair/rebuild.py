"""
Rebuilds a job's registry - ``job.json``, epochs and manifests - from its segment objects, after it was lost or damaged.

Sound objects stay as they are. Damaged ones are copied to ``<job>/damaged/``, and then replaced or deleted. A registry
without a defect is never written. An interrupted rebuild is repeated: a defect is left until the newest checkpoint is
back, since perhaps nothing but its note tells that it existed.

Decisions are in `dstl_service.repair.plan`; this module does the blocking I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from dstl_service.formats.checkpoint_record import CheckpointRecord
from dstl_service.formats.keys import EpochRecord, JobRecord, Place, encode_job, epoch_key, manifest_key, number_of
from dstl_service.formats.manifest import Manifest, encode_manifest
from dstl_service.registry.hints import forget_hints
from dstl_service.registry.job_store import JobStore
from dstl_service.registry.lives import Lives, first_epoch, life_of
from dstl_service.registry.takeover import first_of_branch, put_note
from dstl_service.repair.manifests import manifests_of, missing_fences, with_all_state
from dstl_service.repair.plan import (
    CheckpointCandidate,
    join_candidates,
    not_fenced,
    proven_keys,
)
from dstl_service.repair.scan import Registry, read_registry
from dstl_service.repair.survey import Survey
from dstl_service.wire import CheckpointRef
from storage.clock import Clock, IdSource
from storage.errors import ConflictError, CorruptDataError, InvalidInputError, NotFoundError
from storage.model import SegmentHandle
from storage.object_store import ObjectStore

_LOST_EPOCHS = 100
"""An epoch in which no checkpoint was tried left nothing but its record; its driver must be fenced, too."""
_CAUSES_MAX = 3
"""An error names the first few lost checkpoints and object problems; the report has all."""


@dataclass(slots=True)
class RebuildReport:
    """
    Result of a rebuild, or of a dry run.

    Args:
        job: Name of the job.
        is_written: Whether the registry was written; else this was a dry run.
        registry_problems: Why the registry needs to be rebuilt; empty for a sound one.
        object_problems: Segment objects that cannot be read.
        objects: Segment objects listed.
        notes: Notes found in them.
        checkpoint: The newest checkpoint that can be restored, as ``id.generation.uid``.
        is_proven: Whether this checkpoint is known to have been completed. If not, Spark's ``commits`` folder tells.
        query_id: Spark's query id of this checkpoint.
        epoch: The new epoch, which fences older drivers.
        lost: Newer checkpoints that cannot be restored, with the reason.
        sinks: Names of sinks that may have published output of lost checkpoints.
        branch: The branch that begins at the checkpoint, since newer ones are lost, or may be; 0 if none does.
        manifests: Keys of the new manifests.
        moved: Keys of damaged objects that were moved away.
    """

    job: str
    is_written: bool = False
    registry_problems: list[str] = field(default_factory=list)
    object_problems: list[str] = field(default_factory=list)
    objects: int = 0
    notes: int = 0
    checkpoint: str = ""
    is_proven: bool = False
    query_id: str = ""
    epoch: int = 0
    lost: list[str] = field(default_factory=list)
    sinks: list[str] = field(default_factory=list)
    branch: int = 0
    manifests: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)


def rebuild_registry(
    store: ObjectStore, job: str, clock: Clock, ids: IdSource, *, up_to: int | None = None, write: bool = False
) -> RebuildReport:
    """
    Find the newest checkpoint that can be restored and, with `write`, restore its manifests.

    No query of the job may run meanwhile; one that does is fenced at the end.

    Args:
        store: Holds the job.
        job: Its name.
        clock: For the new epoch's record.
        ids: Likewise.
        up_to: Choose no newer checkpoint: excludes one that was never completed. The one of this id was, whether or not
            anything here proves that.
        write: Write the registry; if false, only report.

    Raises:
        NotFoundError: The job has no object.
        CorruptDataError: No checkpoint can be restored.
        InvalidInputError: With `write`: the registry is sound, or has a sound manifest newer than the checkpoint found.
        ConflictError: Another process wrote to the job meanwhile; repeat the rebuild.
    """
    survey = Survey(store, job)
    survey.read()
    registry = read_registry(store, job, max((life_of(record.epoch) for record, _, _ in survey.records), default=0))
    if registry.is_empty and not survey.objects:
        raise NotFoundError(f"job {job!r} does not exist in {store.url}", job=job)
    life = _choose_life(registry, survey.records)
    candidates = _candidates(registry, survey, life)
    report = RebuildReport(
        job,
        registry_problems=registry.problems()
        + _lost_epoch(candidates, registry)
        + _lost_manifests(not_fenced(candidates, registry)),
        object_problems=survey.problems,
        objects=len(survey.objects),
        notes=len(survey.records),
    )
    survey.read_named(candidates)
    plan = survey.choose_verified(candidates, registry, up_to)
    report.lost = [f"checkpoint {name} is lost: {reason}" for name, reason in plan.lost]
    report.registry_problems += [
        f"{manifest_key(registry.folder, manifest.id, manifest.generation)} names what is lost: {reason}"
        for manifest, reason in plan.passed
    ]
    if not plan.path:
        raise CorruptDataError(f"no checkpoint of job {job!r} can be restored: {'; '.join(_causes(report))}", job=job)
    manifests = manifests_of(plan, registry, life, survey.stored)
    newest = plan.path[0]
    if newest.id == up_to and not plan.is_proven:
        report.registry_problems.append(f"the manifest of checkpoint {up_to} is missing, if that was completed")
    # Nothing records a checkpoint whose only object and manifest are lost, so any loss counts.
    is_lossy = report.lost or report.registry_problems
    report.sinks = [info.name for info in newest.operators if info.is_sink and is_lossy]
    made = manifests[-1] if manifests else newest.manifest
    assert made is not None  # no manifest is written only if one exists
    report.checkpoint = made.ref.to_text()
    report.is_proven, report.query_id = plan.is_proven, newest.query_id
    report.manifests = [manifest_key(registry.folder, manifest.id, manifest.generation) for manifest in manifests]
    report.moved = sorted(registry.damaged)
    before_all = first_epoch(registry.life) - 1
    known = max([before_all, registry.epoch_max, *(one.epoch for one in candidates), *_damaged_epochs(registry)])
    report.epoch = known + _LOST_EPOCHS + 2
    if report.lost or report.sinks:
        # The ids of lost checkpoints come again. On another branch they are not those that were published.
        report.branch = report.epoch - 1
        first = first_of_branch(
            with_all_state(made, plan, survey.stored), made.ref, report.branch, ids.unique_id(), clock.now_ms()
        )
        report.checkpoint = first.ref.to_text()
        report.manifests.append(manifest_key(registry.folder, first.id, first.generation))
        manifests.append(first)
    if write:
        _check_writable(not_fenced(candidates, registry), report, newest, registry.folder)
        record = JobRecord(life, _max_parallelism(registry, survey.records, life), newest.forked_from)
        _write(store, registry, report, manifests, record, clock, ids)
    return report


def describe_rebuild(report: RebuildReport) -> list[str]:
    """Return the lines of a report as text."""
    lines = [*report.object_problems, *report.registry_problems, *report.lost]
    lines += [f"{key} {'was' if report.is_written else 'would be'} moved away" for key in report.moved]
    lines += [f"{key} {'was' if report.is_written else 'would be'} written" for key in report.manifests]
    lines.append(f"{report.notes} notes in {report.objects} objects; newest whole checkpoint: {report.checkpoint}")
    if not report.is_proven:
        number = report.checkpoint.partition(".")[0]
        lines.append(
            f"Nothing proves that checkpoint {number} was completed. If commits/{number} is missing in the Spark "
            f"checkpoint of query {report.query_id or 'unknown'}, exclude it with --up-to {int(number) - 1}; if it "
            f"exists, say so with --up-to {number}"
        )
    if report.branch:
        lines.append(
            "Newer checkpoints are lost, or may be: the query's next start sets its Spark checkpoint back, too, and "
            "plans their batches again"
        )
    if report.sinks:
        lines.append(
            "Output of lost checkpoints that sinks have published stays where it is, and is published again: "
            f"{', '.join(report.sinks)}"
        )
    if report.is_written:
        lines.append(f"the registry was written; the job is at epoch {report.epoch}")
    elif report.registry_problems:
        lines.append("nothing was written; pass --write to do it")
    else:
        lines.append("the registry is sound: there is nothing to rebuild")
    return lines


def _write(
    store: ObjectStore,
    registry: Registry,
    report: RebuildReport,
    manifests: Sequence[Manifest],
    job_record: JobRecord,
    clock: Clock,
    ids: IdSource,
) -> None:
    """
    Write the missing objects; ``job.json``, which makes the job visible, after the manifests.

    The newest manifest goes first: until those that it needs are there, the registry is not sound, nor are the objects
    that only the newest one names garbage. A damaged object keeps its place until it is replaced.
    """
    job = registry.job
    for ended in range(registry.ended, registry.life):
        Lives(store, job).end(ended)
    for key in report.moved:
        store.put(f"{job}/damaged/{ids.unique_id()}/{key.removeprefix(f'{job}/')}", store.get(key))
    # Restored checkpoints may lie before the places that hints skip to.
    forget_hints(store, registry.folder)
    if report.branch:
        note = put_note(store, ids, job, job_record.max_parallelism, manifests[-1])
        manifests = [*manifests[:-1], replace(manifests[-1], note=note)]
    for manifest in reversed(manifests):
        key = manifest_key(registry.folder, manifest.id, manifest.generation)
        store.put(key, encode_manifest(manifest), if_absent=key not in registry.damaged)
    epoch = report.epoch - 1
    newest = CheckpointRef.parse(report.checkpoint)
    branch = Place.of(newest.id, newest.generation).branch
    fences = missing_fences(
        [*registry.manifests.values(), *manifests], branch, job_record.uid, epoch, ids, clock.now_ms()
    )
    kept = [*report.manifests, registry.record_key]
    for one in fences:
        kept.append(manifest_key(registry.folder, one.id, one.generation))
        store.put(kept[-1], encode_manifest(one), if_absent=kept[-1] not in registry.damaged)
    record = EpochRecord(epoch, "fsck --rebuild", ids.unique_id(), clock.now_ms(), branch)
    store.put(epoch_key(registry.folder, epoch), record.encode(), if_absent=True)
    if registry.uid is None:
        key = registry.record_key
        store.put(key, encode_job(*job_record), if_absent=key not in registry.damaged)
    store.delete([key for key in report.moved if key not in kept])
    # Like any new owner: fences drivers that may still run, and proves that the registry is readable again.
    job_store = JobStore(store, job, clock, ids)
    job_store.open(None)
    report.epoch, latest = job_store.claim("fsck --rebuild")
    if latest is None or latest.ref.to_text() != report.checkpoint:
        raise ConflictError(f"another process wrote to job {job!r} during the rebuild; repeat it", job=job)
    report.is_written = True


def _check_writable(
    current: Sequence[CheckpointCandidate], report: RebuildReport, chosen: CheckpointCandidate, folder: str
) -> None:
    if not report.registry_problems:
        raise InvalidInputError(f"the registry of job {report.job!r} is sound: there is nothing to rebuild")
    newest = _newest_manifest(current)
    if newest is not None and newest.id > chosen.id:
        key = manifest_key(folder, newest.id, newest.generation)
        raise InvalidInputError(
            f"manifest {key} is sound, and newer than checkpoint {chosen.id}, the one to restore: "
            f"bring back the objects it lacks, or move this manifest away ({'; '.join(_causes(report))})"
        )


def _causes(report: RebuildReport) -> list[str]:
    causes = [*report.lost[:_CAUSES_MAX], *report.object_problems[:_CAUSES_MAX], *report.registry_problems]
    return causes or ["no notes were found"]


def _choose_life(registry: Registry, records: Sequence[tuple[CheckpointRecord, SegmentHandle, int]]) -> str:
    """Return the uid in ``job.json``, else of the newest manifest or savepoint, else of the newest note."""
    if registry.uid is not None:
        return registry.uid
    newest = max((*registry.checkpoints, *registry.savepoints.values()), key=lambda m: m.created_ms, default=None)
    if newest is not None:
        return newest.job_uid
    return max(((life_of(one.epoch), stored_ms, one.job_uid) for one, _, stored_ms in records), default=(0, 0, ""))[2]


def _candidates(registry: Registry, survey: Survey, life: str) -> list[CheckpointCandidate]:
    """Return what manifests, savepoints and notes tell of the checkpoints of one life."""
    found = [CheckpointCandidate.of_record(*noted) for noted in survey.records if noted[0].job_uid == life]
    found += [
        CheckpointCandidate.of_manifest(manifest) for manifest in registry.checkpoints if manifest.job_uid == life
    ]
    found += [CheckpointCandidate.of_savepoint(savepoint) for savepoint in registry.kept if savepoint.job_uid == life]
    return join_candidates(found)


def _max_parallelism(
    registry: Registry, records: Sequence[tuple[CheckpointRecord, SegmentHandle, int]], life: str
) -> int:
    if registry.max_parallelism is not None:
        return registry.max_parallelism
    counts = Counter(record.max_parallelism for record, _, _ in records if record.job_uid == life)
    if not counts:
        raise CorruptDataError(
            f"{registry.record_key} is lost, and no note has max_parallelism: restore it from a backup",
            job=registry.job,
        )
    return counts.most_common(1)[0][0]


def _newest_manifest(current: Sequence[CheckpointCandidate]) -> Manifest | None:
    """Return the newest manifest of those that no higher epoch fenced, for instance by a rewind."""
    manifests = [one.manifest for one in current if one.manifest is not None]
    return max(manifests, key=lambda one: Place.of(one.id, one.generation), default=None)


def _lost_epoch(candidates: Sequence[CheckpointCandidate], registry: Registry) -> list[str]:
    """Return a problem if a note is of an epoch of which nothing else tells: no driver stores one before its record."""
    noted = max((one.epoch for one in candidates), default=0)
    if noted <= max(registry.epoch_max, first_epoch(registry.life) - 1):  # of which a fork's first note is
        return []
    return [f"{epoch_key(registry.folder, noted)} is missing: a note is of this epoch"]


def _lost_manifests(current: Sequence[CheckpointCandidate]) -> list[str]:
    """Return a problem if a proven checkpoint is newer than all manifests."""
    newest = _newest_manifest(current)
    newest_id = -1 if newest is None else newest.id
    proven_id = max((checkpoint_id for checkpoint_id, _ in proven_keys(current)), default=-1)
    if proven_id <= newest_id:
        return []
    return [f"manifests up to checkpoint {proven_id} are missing"]


def _damaged_epochs(registry: Registry) -> list[int]:
    numbers = []
    for key in registry.damaged:
        if key.startswith(f"{registry.folder}/epochs/"):
            with suppress(CorruptDataError):
                numbers.append(number_of(key))
    return numbers
