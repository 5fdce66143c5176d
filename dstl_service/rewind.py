"""
Sets a job back to a savepoint or a retained checkpoint, as after a deployment that computed nonsense.

1. The newest checkpoint becomes a savepoint: nothing is lost, and the job can be set forward again.
2. A new epoch begins, so that whoever still writes is fenced (I4).
3. What the job is set back to is written once more, as a complete manifest of a new generation.
4. Fences take the places of the checkpoints behind it: the job stands where it is set back to.

The query's driver sees `rewound_from` when it starts, and sets the Spark checkpoint back too. A rewind that was
interrupted is simply repeated. Blocking I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dstl_service.job_store import JobStore
from dstl_service.manifest import ManifestKind
from dstl_service.under_way import NOTHING
from storage.clock import Clock, IdSource
from storage.errors import ConflictError, InvalidInputError, NotFoundError

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
    jobs: JobStore,
    job: str,
    clock: Clock,
    ids: IdSource,
    *,
    savepoint: str | None = None,
    checkpoint_id: int | None = None,
    write: bool = False,
) -> RewindReport:
    """
    Set a job back to a savepoint or to a retained checkpoint; give exactly one of the two.

    No query of the job may run; one that does is fenced, and stops with its next checkpoint.

    Args:
        jobs: The job's objects, opened.
        job: Its name.
        clock: Dates the new manifest.
        ids: Names it.
        savepoint: Name of the savepoint.
        checkpoint_id: Id of the checkpoint.
        write: Do it; without it only say what would be done.

    Raises:
        NotFoundError: There is no such savepoint or checkpoint, or no checkpoint at all.
        InvalidInputError: None or both are given, or the job stands there already.
        ConflictError: A query of the job runs. It is fenced now: wait for its end, and repeat.
        FencedError: A query of the job was started meanwhile: stop it, and repeat.
    """
    if (savepoint is None) == (checkpoint_id is None):
        raise InvalidInputError("give a savepoint or a checkpoint to set the job back to, one of the two")
    newest = jobs.newest()
    if newest is None:
        raise NotFoundError(f"job {job!r} has no checkpoint", job=job)
    target = jobs.newest_of(checkpoint_id) if checkpoint_id is not None else jobs.savepoints.load(savepoint or "")
    if target is None:
        raise NotFoundError(
            f"checkpoint {checkpoint_id} of job {job!r} is not retained; `dstl checkpoints` lists those that are",
            job=job,
        )
    if target.ref == newest.ref:
        raise InvalidInputError(f"job {job!r} stands at checkpoint {target.ref.to_text()} already")
    behind = [manifest.ref for manifest in jobs.manifests() if manifest.id > target.id]
    kept_as = f"before-rewind-{newest.id}-{newest.uid[:8]}"
    report = RewindReport(job, False, newest.ref.to_text(), target.ref.to_text(), len(behind), kept_as)
    if not write:
        return report
    jobs.make_savepoint(kept_as, None)
    state = jobs.state(target.ref)
    epoch, latest = jobs.claim(OWNER, target.id)
    if latest is None or latest.ref != newest.ref:
        raise ConflictError(
            f"a query of job {job!r} runs, and is fenced now: wait for its end, and repeat this", job=job
        )
    restored = replace(
        target,
        kind=ManifestKind.COMPLETE,
        uid=ids.unique_id(),
        epoch=epoch,
        created_ms=clock.now_ms(),
        earlier=tuple(state.log[: len(state.log) - len(target.segments)]),
        materializations=state.materializations,
        rewound_from=newest.ref,
        under_way=NOTHING,  # what was under way belongs to what is given up
    )
    made, _ = jobs.create(restored)
    # A driver that is started meanwhile may have seen what is given up here, and build on it.
    jobs.check_still_newest(epoch)
    jobs.give_up(behind, epoch)
    jobs.check_still_newest(epoch)
    return replace(report, is_written=True, target=made.ref.to_text(), epoch=epoch)


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
