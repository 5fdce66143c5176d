"""
Forks a job: creates another one that begins with its state at a retained checkpoint or a savepoint.

1. The checkpoint becomes a savepoint of the parent, so that it is not deleted meanwhile.
2. The fork's ``job.json`` is created, which names parent, checkpoint and savepoint: the fork is decided.
3. A copy of the savepoint, the *hold*, keeps the parent's objects for the fork.
4. The checkpoint is written as the first manifest of the fork, complete and without sinks. The fork is done.
5. The savepoint of step 1 is deleted.

A process that dies before step 2 leaves a savepoint, which the parent's collector deletes. After step 2, the next
fork, claim, rewind or collection of the forked job does the rest; see `dstl_service.registry.forks`. The query's driver
finds `forked_from` in the first checkpoint, and makes a Spark checkpoint that begins there.

A fork may have another number of key groups than its parent: its driver rewrites the tables first, see
`backend_client.spark.start.rewriting`. Blocking I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dstl_service.checkpoints.rewind import find_target
from dstl_service.collection.retention import CHECKPOINTS_MAX
from dstl_service.collection.tombstones import Deletions
from dstl_service.formats.manifest import Manifest
from dstl_service.registry.job_store import JobStore
from dstl_service.registry.lives import Lives
from dstl_service.wire import ForkOrigin
from storage.clock import Clock, IdSource
from storage.errors import ConflictError, InvalidInputError, NotFoundError
from storage.object_store import ObjectStore
from storage.validation import KEY_GROUP_MAX, validate_name


@dataclass(frozen=True, slots=True)
class ForkReport:
    """
    Result of a fork.

    Args:
        job: Name of the parent.
        fork: Name of the new job.
        checkpoint: The parent's checkpoint at which it begins, as ``id.generation.uid``.
        first: Its own first checkpoint, likewise; ids go on from there.
        is_new: Whether this call created it; else an earlier one did, and maybe died.
        max_parallelism: Its number of key groups.
        rewritten_from: The parent's, if it is another one; else None.
    """

    job: str
    fork: str
    checkpoint: str
    first: str
    is_new: bool
    max_parallelism: int
    rewritten_from: int | None = None


def fork_job(
    store: ObjectStore,
    parent: JobStore,
    job: str,
    fork: str,
    clock: Clock,
    ids: IdSource,
    *,
    savepoint: str | None = None,
    checkpoint_id: int | None = None,
    max_parallelism: int | None = None,
    checkpoints_max: int = CHECKPOINTS_MAX,
) -> ForkReport:
    """
    Fork a job. The job may be running, and continues.

    A repeated call for the same checkpoint finishes an earlier one that died. Until a driver has opened the fork, so
    does a call for the newest checkpoint, or for one that is gone: the parent may have continued since.

    Args:
        store: Holds both jobs.
        parent: The parent's objects, opened.
        job: The parent's name.
        fork: Name of the new job.
        clock: For the registry.
        ids: Likewise.
        savepoint: Name of the parent's savepoint.
        checkpoint_id: Id of the parent's retained checkpoint; by default the newest.
        max_parallelism: The fork's number of key groups; by default the parent's.
        checkpoints_max: How many checkpoints are retained.

    Raises:
        NotFoundError: The parent has no such savepoint or retained checkpoint.
        ConflictError: Another job has the name, or one of the two is deleted.
        InvalidInputError: The name is not allowed or the parent's, both savepoint and checkpoint are given, or the
            state cannot have another number of key groups.
    """
    if savepoint is not None and checkpoint_id is not None:
        raise InvalidInputError("a fork begins at a savepoint or at a checkpoint: give one of the two, not both")
    if validate_name("job", fork) == job:
        raise InvalidInputError(f"a fork of job {job!r} needs another name")
    deletions = Deletions(store, clock, ids)
    deletions.check(job)
    deletions.check(fork)
    parent.settled_epoch()
    made = JobStore(store, fork, clock, ids)
    life = Lives(store, fork).current()
    try:
        made.open_life(life)
    except NotFoundError:
        is_new = True
    else:
        is_new = False
    begins = None if is_new else _unopened(made, job, parent.life)
    target = _target(parent, job, checkpoints_max, savepoint, checkpoint_id, begins)
    if target is not None:
        if is_new:
            wanted = parent.max_parallelism if max_parallelism is None else max_parallelism
            rewritten_from = None if wanted == parent.max_parallelism else parent.max_parallelism
            if rewritten_from is not None:
                _check_rewritable(target, job, wanted)
            origin = replace(parent.offer(target, savepoint, fork, life), max_parallelism=rewritten_from)
            made.open(wanted, origin)
            is_new = made.origin == origin
            if not is_new:  # another call was quicker
                parent.savepoints.discard(origin.savepoint)
        begins = _checked(made.origin, job, fork, parent.life, target.ref.to_text())
    assert begins is not None
    if max_parallelism not in (None, made.max_parallelism):
        raise ConflictError(
            f"fork {fork!r} exists with max_parallelism {made.max_parallelism}, not {max_parallelism}: choose another "
            "name for the fork",
            job=fork,
        )
    deletions.check(fork)
    made.finish_fork()
    first = made.newest()
    made.check_not_ended()  # a deletion ends the life before it takes manifests
    parent.savepoints.discard(begins.savepoint)
    assert first is not None
    return ForkReport(
        job,
        fork,
        begins.checkpoint.to_text(),
        first.ref.to_text(),
        is_new,
        made.max_parallelism,
        begins.max_parallelism,
    )


def _unopened(made: JobStore, job: str, life: int) -> ForkOrigin | None:
    """Return where a fork of a job begins that no driver has opened; None if this one is none."""
    origin = made.origin
    return origin if origin and (origin.job, origin.life) == (job, life) and made.never_began() else None


def _target(
    parent: JobStore,
    job: str,
    checkpoints_max: int,
    savepoint: str | None,
    checkpoint_id: int | None,
    begun: ForkOrigin | None,
) -> Manifest | None:
    """Return the checkpoint that is asked for; None if any will do, or if it is gone, and the fork has begun before."""
    if savepoint is None and checkpoint_id is None:
        if begun is not None:
            return None
        newest = parent.newest()
        if newest is None:
            raise NotFoundError(f"job {job!r} has no checkpoint: there is nothing to fork", job=job)
        checkpoint_id = newest.id
    try:
        return find_target(parent, job, checkpoints_max, savepoint=savepoint, checkpoint_id=checkpoint_id)
    except NotFoundError:
        if begun is None or checkpoint_id not in (None, begun.checkpoint.id):
            raise
        return None


def _checked(origin: ForkOrigin | None, job: str, fork: str, life: int, checkpoint: str) -> ForkOrigin:
    """Return where a job begins; raise `ConflictError` if it is not the fork that was asked for."""
    if origin is not None and (origin.job, origin.life, origin.checkpoint.to_text()) == (job, life, checkpoint):
        return origin
    what = "is not a fork" if origin is None else f"was forked from {origin.job!r} at {origin.checkpoint.to_text()}"
    raise ConflictError(f"job {fork!r} exists and {what}: choose another name for the fork", job=fork)


def _check_rewritable(target: Manifest, job: str, max_parallelism: int) -> None:
    """
    Check that a checkpoint's state can be rewritten to another number of key groups.

    Raises:
        InvalidInputError: The number is out of bounds, or rows are set aside, whose key groups the log has.
    """
    if not 1 <= max_parallelism <= KEY_GROUP_MAX + 1:
        raise InvalidInputError(f"max_parallelism must be within 1..{KEY_GROUP_MAX + 1}, got {max_parallelism}")
    aside = [part for operator in target.operators for part in operator.set_aside]
    if aside:
        rows, lost = (sum(part.rows for part in aside if part.is_lost == is_lost) for is_lost in (False, True))
        raise InvalidInputError(
            f"checkpoint {target.id} of job {job!r} has partitions whose tables were being restored, with {rows} rows "
            f"set aside and {lost} lost: they cannot get other key groups. Let the query run until none waits, with "
            "lost_rows='replay' or 'forget' if some are lost, and fork it then",
            job=job,
        )


def describe_fork(report: ForkReport) -> str:
    """Return a report as text."""
    groups = f"{report.rewritten_from} key groups to {report.max_parallelism}"
    rewrites = "" if report.rewritten_from is None else f". Its first start rewrites the state from {groups}"
    return (
        f"job {report.fork} {'begins' if report.is_new else 'began'} with the state of job {report.job} at checkpoint "
        f"{report.checkpoint}. Start its query with a new checkpointLocation and outputs of its own{rewrites}"
    )
