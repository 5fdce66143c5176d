"""
Sets a job back to a savepoint or a retained checkpoint, as after a deployment that computed nonsense.

1. What the job is set back to becomes a savepoint, so that nobody deletes it in the meantime.
2. A new epoch begins, whose record names it: from here on the job is going to be set back, whoever does the rest.
3. A fence ends the branch of manifests, so that whoever still writes is fenced (I4).
4. The newest checkpoint becomes a savepoint: nothing is lost, and the job can be set forward again.
5. What the job is set back to is written once more, as the first manifest of a new branch. It is done.
6. The savepoint of step 1 is deleted, unless the next owner was quicker.

Who dies before step 2 leaves a savepoint behind, and the job as it was. Behind step 2, whoever claims the job next,
collects its garbage or sets it back does the rest; see `takeover`. The query's driver sees `rewound_from` when it
starts, and sets the Spark checkpoint back too. Blocking I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dstl_service.collection.retention import CHECKPOINTS_MAX, retained_manifests
from dstl_service.formats.manifest import Manifest
from dstl_service.registry.job_store import JobStore
from dstl_service.registry.takeover import before_rewind
from storage.clock import IdSource
from storage.errors import InvalidInputError, NotFoundError

OWNER = "dstl rewind"


@dataclass(frozen=True, slots=True)
class RewindReport:
    """
    What a rewind did, or would do.

    Args:
        job: Name of the job.
        is_written: Whether it was done.
        newest: The checkpoint at which the job stood, as ``id.generation.uid``.
        target: The one to which it is set back; once that is done, the new generation of it.
        given_up: Checkpoints behind it that are no longer part of the job.
        savepoint: Name of the savepoint that keeps what the job was set back from.
        epoch: The new epoch; 0 if nothing was written.
    """

    job: str
    is_written: bool
    newest: str
    target: str
    given_up: int
    savepoint: str
    epoch: int = 0


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
    Set a job back to a savepoint or to a retained checkpoint; give exactly one of the two.

    No query of the job may run; one that does is fenced, and stops with its next checkpoint.

    Args:
        job_store: The job's objects, opened.
        job: Its name.
        ids: Names the savepoint that holds the target meanwhile.
        savepoint: Name of the savepoint.
        checkpoint_id: Id of the checkpoint.
        checkpoints_max: How many checkpoints are retained.
        write: Do it; without it only say what would be done.

    Raises:
        NotFoundError: There is no such savepoint or retained checkpoint, or no checkpoint at all.
        InvalidInputError: None or both are given, or the job stands there already.
    """
    if (savepoint is None) == (checkpoint_id is None):
        raise InvalidInputError("give a savepoint or a checkpoint to set the job back to, one of the two")
    if write:
        job_store.settled_epoch()
    newest = job_store.newest()
    if newest is None:
        raise NotFoundError(f"job {job!r} has no checkpoint", job=job)
    retained = retained_manifests(job_store, checkpoints_max)
    target = _retained(job, retained, checkpoint_id) if savepoint is None else job_store.savepoints.load(savepoint)
    if target.ref == newest.ref:
        raise InvalidInputError(f"job {job!r} stands at checkpoint {target.ref.to_text()} already")
    behind = sum(manifest.id > target.id for manifest in job_store.completed())
    report = RewindReport(job, False, newest.ref.to_text(), target.ref.to_text(), behind, before_rewind(newest.ref))
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


def _retained(job: str, retained: Sequence[Manifest], checkpoint_id: int | None) -> Manifest:
    for manifest in retained:
        if manifest.id == checkpoint_id:
            return manifest
    raise NotFoundError(
        f"checkpoint {checkpoint_id} of job {job!r} is not retained: `dstl checkpoints` lists what is stored, of which "
        "only the newest are",
        job=job,
    )


def describe_rewind(report: RewindReport) -> str:
    """Return a report as text."""
    if not report.is_written:
        return (
            f"job {report.job} would be set back from checkpoint {report.newest} to {report.target}; "
            f"{report.given_up} checkpoints behind it would be given up, and the newest of them kept as savepoint "
            f"{report.savepoint}. Stop the query; --write does it"
        )
    return (
        f"job {report.job} was set back from checkpoint {report.newest} to {report.target}; what it was set back from "
        f"is kept as savepoint {report.savepoint}. Start the query with its checkpointLocation: it sets that back too"
    )
