"""
Rewinds a job to a savepoint or a retained checkpoint, for instance after a faulty deployment.

1. The target becomes a savepoint, so that it is not deleted meanwhile.
2. A new epoch begins, whose record names that savepoint: the rewind is decided, whichever process finishes it.
3. A fence ends the branch of manifests, so that a driver that still writes is fenced (I4).
4. The newest checkpoint becomes a savepoint: nothing is lost, and the rewind can be reversed.
5. The target is written again, as the first manifest of a new branch. The rewind is done.
6. The savepoint of step 1 is deleted, unless the next owner was quicker.

A process that dies before step 2 leaves a savepoint, and the job as it was. After step 2, the next claim, garbage
collection or rewind of the job does the rest; see `dstl_service.registry.takeover`. The query's driver sees
`rewound_from` when it starts, and rewinds the Spark checkpoint too. Blocking I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dstl_service.collection.retention import CHECKPOINTS_MAX, retained_manifests
from dstl_service.formats.manifest import Manifest
from dstl_service.registry.job_store import JobStore
from dstl_service.registry.takeover import before_rewind
from dstl_service.wire import SINK, CheckpointRef
from storage.clock import IdSource
from storage.errors import InvalidInputError, NotFoundError

OWNER = "dstl rewind"


@dataclass(frozen=True, slots=True)
class RewindReport:
    """
    Result of a rewind, or of a dry run.

    Args:
        job: Name of the job.
        is_written: Whether the rewind was done.
        newest: The job's newest checkpoint before the rewind, as ``id.generation.uid``.
        target: The checkpoint it is rewound to; after the rewind, its new generation.
        given_up: Number of checkpoints after the target that are no longer part of the job.
        savepoint: Name of the savepoint that keeps `newest`.
        epoch: The new epoch; 0 if nothing was written.
        published: Sinks that have published output of checkpoints after the target, with the id up to which they have,
            at least; that output stays in their systems.
        sinks: All sinks of the newest checkpoint; they may have published output up to there.
    """

    job: str
    is_written: bool
    newest: str
    target: str
    given_up: int
    savepoint: str
    epoch: int = 0
    published: Mapping[str, int] = field(default_factory=dict)
    sinks: tuple[str, ...] = ()


def rewind(
    job_store: JobStore,
    job: str,
    ids: IdSource,
    *,
    savepoint: str | None = None,
    checkpoint_id: int | None = None,
    checkpoints_max: int = CHECKPOINTS_MAX,
    write: bool = False,
) -> RewindReport:
    """
    Rewind a job to a savepoint or to a retained checkpoint; exactly one of the two is given.

    No query of the job should run; one that does is fenced, and stops at its next checkpoint.

    Args:
        job_store: The job's objects, opened.
        job: Its name.
        ids: Names the savepoint that holds the target meanwhile.
        savepoint: Name of the savepoint.
        checkpoint_id: Id of the checkpoint.
        checkpoints_max: How many checkpoints are retained.
        write: Do it; if false, only report.

    Raises:
        NotFoundError: The savepoint or retained checkpoint does not exist, or the job has no checkpoint.
        InvalidInputError: None or both are given, or the job is already at the target.
    """
    if (savepoint is None) == (checkpoint_id is None):
        raise InvalidInputError("a rewind needs either a savepoint or a checkpoint id, exactly one of the two")
    if write:
        job_store.settled_epoch()
    newest = job_store.newest()
    if newest is None:
        raise NotFoundError(f"job {job!r} has no checkpoint: there is nothing to rewind", job=job)
    target = find_target(job_store, job, checkpoints_max, savepoint=savepoint, checkpoint_id=checkpoint_id)
    if target.ref == newest.ref:
        raise InvalidInputError(f"job {job!r} is already at checkpoint {target.ref.to_text()}: choose another one")
    given_up = sum(manifest.id > target.id for manifest in job_store.completed())
    sinks = [sink for sink in newest.operators if sink.kind == SINK]
    report = RewindReport(
        job,
        False,
        newest.ref.to_text(),
        target.ref.to_text(),
        given_up,
        before_rewind(newest.ref),
        published={s.name: s.published for s in sinks if s.published is not None and s.published > target.id},
        sinks=tuple(sink.name for sink in sinks),
    )
    if not write:
        return report
    call_uid = ids.unique_id()
    pin = f"rewind-to-{target.id}-{call_uid}"
    if savepoint is None:
        job_store.keep(pin, target)
    else:
        job_store.savepoints.copy(pin, savepoint, call_uid)
    record = job_store.begin_rewind(OWNER, pin, target.id)
    made = job_store.finish_rewind(record)
    job_store.savepoints.discard(pin)
    left = made.rewound_from or newest.ref  # a query that ran until now may have completed more than was seen above
    return replace(
        report,
        is_written=True,
        newest=left.to_text(),
        target=made.ref.to_text(),
        savepoint=before_rewind(left),
        epoch=record.epoch,
    )


def find_target(
    job_store: JobStore, job: str, checkpoints_max: int, *, savepoint: str | None, checkpoint_id: int | None
) -> Manifest:
    """
    Return a savepoint, or else a retained checkpoint.

    Raises:
        NotFoundError: There is none of this name or id.
        InvalidInputError: The savepoint only keeps objects for a fork, or the tables are to be rewritten.
    """
    found = _found_target(job_store, job, checkpoints_max, savepoint, checkpoint_id)
    if found.forked_from is not None and found.forked_from.is_before_rewriting(found.ref):
        raise InvalidInputError(
            f"checkpoint {found.id} of job {job!r} has the tables of job {found.forked_from.job!r}, in its "
            f"{found.forked_from.max_parallelism} key groups: start the query once, which rewrites them, and choose "
            f"checkpoint {found.id + 1} or a later one",
            job=job,
        )
    return found


def _found_target(
    job_store: JobStore, job: str, checkpoints_max: int, savepoint: str | None, checkpoint_id: int | None
) -> Manifest:
    if savepoint is not None:
        found = job_store.savepoints.load(savepoint)
        if found.held_for:
            raise InvalidInputError(
                f"savepoint {savepoint!r} of job {job!r} keeps objects for fork {found.held_for}, and may be of no "
                "checkpoint: choose another one",
                job=job,
            )
        return found
    for manifest in retained_manifests(job_store, checkpoints_max):
        if manifest.id == checkpoint_id:
            return manifest
    raise NotFoundError(
        f"checkpoint {checkpoint_id} of job {job!r} is not retained: choose one of the newest that "
        "`dstl checkpoints` lists, or a savepoint",
        job=job,
    )


def describe_rewind(report: RewindReport) -> str:
    """Return a report as text."""
    left = "".join(_left_behind(report, sink) for sink in report.sinks)
    if not report.is_written:
        return (
            f"job {report.job} would be rewound from checkpoint {report.newest} to {report.target}; "
            f"{report.given_up} checkpoints after it would be given up, and the newest of them kept as savepoint "
            f"{report.savepoint}{left}. To do it, stop the query and pass --write"
        )
    return (
        f"job {report.job} was rewound from checkpoint {report.newest} to {report.target}; {report.newest} is kept as "
        f"savepoint {report.savepoint}{left}. Start the query with its checkpointLocation, which it rewinds too"
    )


def _left_behind(report: RewindReport, sink: str) -> str:
    """Return the output that stays in a sink's system. The newest checkpoint knows the output published before it."""
    target, newest = (CheckpointRef.parse(text).id for text in (report.target, report.newest))
    if newest <= target:
        return ""
    known = report.published.get(sink)
    if known is None:
        return (
            f"; sink {sink} may have published output of checkpoints {target + 1} to {newest}, which stays where it is"
        )
    return (
        f"; sink {sink} has published output up to checkpoint {known} at least, and maybe up to {newest}, which stays "
        "where it is"
    )
