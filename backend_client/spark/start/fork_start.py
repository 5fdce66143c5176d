"""
The first start of a fork: its Spark checkpoint is new, and begins where the parent's sources stood.

A manifest has the offsets of its batch, so a fork's first checkpoint suffices for sources such as Kafka, whose offsets
say all. A source that numbers files keeps a log of them in Spark's checkpoint: that is copied from the parent's.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession

from backend_client.service.client import ServiceClient
from backend_client.service.job_session import JobSession
from backend_client.settings import BackendSettings
from backend_client.spark.private.stream_plan import stateful_operators
from backend_client.spark.start.spark_checkpoint import CheckpointLog
from dstl_service.wire import CheckpointInfo, JobInfo, source_offsets
from storage.errors import ConflictError, InvalidInputError

_FILES = "logOffset"
"""The field in the offset of a file source: the number of an entry in its log."""


def find_or_fork(client: ServiceClient, settings: BackendSettings) -> JobInfo | None:
    """
    Return the stored job, None if it does not exist; create it before if it is to be a fork.

    Raises:
        NotFoundError: The parent has no such checkpoint or savepoint.
        ConflictError: The job exists, and is not a fork of that parent.
    """
    known = JobSession.find(client, settings)
    if settings.fork_of is None:
        return known
    if known is None or known.latest is None:
        JobSession.fork(client, settings)
        return JobSession.find(client, settings)
    origin = known.latest.forked_from
    if origin is None or origin.job != settings.fork_of:
        what = "is not a fork" if origin is None else f"is a fork of job {origin.job!r}"
        raise ConflictError(
            f"job {settings.job!r} exists and {what}, but fork_of names {settings.fork_of!r}: choose another job name, "
            "or leave fork_of out"
        )
    return known


def is_at_fork(latest: CheckpointInfo) -> bool:
    """Return whether a fork has had no batch: its newest checkpoint is its first, or that one rewritten."""
    origin = latest.forked_from
    if origin is None:
        return False
    return latest.ref.id <= origin.checkpoint.id + (origin.max_parallelism is not None)


def parent_log(spark: SparkSession, settings: BackendSettings) -> CheckpointLog | None:
    """Return the Spark checkpoint of the query of a fork's parent; None if it is not known."""
    return None if settings.fork_location is None else CheckpointLog(spark, settings.fork_location)


def check_fork_input(source: DataFrame, settings: BackendSettings) -> None:
    """
    Check what the first operator of a fork that has had no batch yet reads.

    Raises:
        InvalidInputError: Spark's own operators with state are in it; a manifest does not contain that.
    """
    if own := stateful_operators(source):
        raise InvalidInputError(
            f"job {settings.job!r} is a fork, and its query has Spark's own stateful operators ({', '.join(own)}) "
            "before those of this backend: their state is in the checkpointLocation of the parent's query and cannot "
            "be forked. Replace them by operators of this backend in both queries, or start a job without fork_of, "
            "which reads its sources from their beginning"
        )


def check_fork(
    log: CheckpointLog, latest: CheckpointInfo, settings: BackendSettings, parent: CheckpointLog | None
) -> None:
    """
    Check that the Spark checkpoint of a fork that has had no batch yet is a new one, or one made for it.

    A fork that was rewound to where it began has had batches: in a new one they would have the same ids again.

    Args:
        log: The Spark checkpoint.
        latest: The checkpoint with which the fork begins.
        settings: Its settings.
        parent: The result of `parent_log`.

    Raises:
        InvalidInputError: It is the parent's or another query's, or `fork_location` is missing or another query's.
    """
    query_id = log.query_id()
    if query_id is None and latest.rewound_from is not None:
        raise InvalidInputError(
            f"job {settings.job!r} is a fork that was set back to where it began, but the Spark checkpoint "
            f"{log.location} is new: its batches would have the ids of those that were given up, which Spark's sinks "
            "leave out as written before. Use the checkpointLocation that the fork was started with, or fork again "
            "under another name"
        )
    if query_id is None:
        if logs_of(latest.offsets):
            _check_parent(parent, latest, settings)
        return
    origin = latest.forked_from
    if origin is None or not log.is_of_fork(origin.savepoint):
        raise InvalidInputError(
            f"job {settings.job!r} is a fork and has had no batch yet, but the Spark checkpoint {log.location} is of "
            "another query: use a new checkpointLocation, or the one that it was started with"
        )


def _check_parent(parent: CheckpointLog | None, latest: CheckpointInfo, settings: BackendSettings) -> None:
    """Refuse to take what a source has read from another query's notes: rows would be read twice, or never."""
    if parent is None:
        raise InvalidInputError(
            f"fork {settings.job!r} reads files or another source that notes in Spark's checkpoint what it has "
            "read: set fork_location to the checkpointLocation of the parent's query"
        )
    origin = latest.forked_from
    assert origin is not None
    # A parent that is a fork itself and has had no batch has the checkpoint of its own parent's query.
    if parent.query_id() != latest.query_id and not parent.begins_at(origin.checkpoint.uid):
        raise InvalidInputError(
            f"fork_location {parent.location} is not the Spark checkpoint of the query that job {origin.job!r} had "
            f"at checkpoint {origin.checkpoint.id}, so it does not say what fork {settings.job!r} has read: set "
            "fork_location to the checkpointLocation of that query"
        )


def follow(spark: SparkSession, log: CheckpointLog, latest: CheckpointInfo | None, settings: BackendSettings) -> None:
    """
    Have the Spark checkpoint follow the state: fill a fork's new one, and set that of a rewound job back.

    A fork that has had no batch may have been rewound before its tables were rewritten.
    """
    if latest is None:
        return
    origin = latest.forked_from
    if origin is not None and is_at_fork(latest) and log.query_id() is None:
        logs, parent = logs_of(latest.offsets), parent_log(spark, settings)
        log.fork(latest.ref.id, latest.offsets, latest.ref.uid, latest.closed_ms, origin.savepoint, parent, logs)
    elif latest.rewound_from is not None or is_at_fork(latest):
        newest = None if latest.rewound_from is None else latest.rewound_from.id
        log.rewind(latest.ref.id, latest.offsets, latest.ref.uid, latest.closed_ms, newest)


def logs_of(offsets: str) -> dict[int, int | None]:
    """
    Return the sources by number that keep a log in Spark's checkpoint, and up to which entry they had read.

    None for a source by time, whose log says only when it began.
    """
    found: dict[int, int | None] = {}
    for number, offset in enumerate(source_offsets(offsets) or ()):
        if isinstance(offset, dict) and isinstance(offset.get(_FILES), int):
            found[number] = offset[_FILES]
        elif isinstance(offset, int):
            found[number] = None
    return found
