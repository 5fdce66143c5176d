"""
The first start of a fork that has other key groups than its parent: it rewrites the tables before its first batch.

The fork's first checkpoint names the parent's objects, whose keys have the parent's key groups. The next checkpoint has
the same state under new tables, and the old tables as removed ones; sources, time and operators are as they were. It
is completed as any other: until then nothing has changed, and a start that was killed is simply repeated. No manifest
then names the objects that it has stored, and they are collected.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from pyspark.sql import SparkSession

from backend_client.service.job_session import JobSession, connect
from backend_client.service.keep_awake import kept_awake
from backend_client.settings import BackendSettings
from backend_client.spark.own_session import own_session
from backend_client.spark.start.operator_tables import removed_entries, unused_name
from backend_client.spark.start.table_rewriting import REWRITTEN, TableRewriting
from backend_client.state.key_hash import KeyHash
from dstl_service.wire import REMOVED, ChangeSetRef, CheckpointInfo, OperatorInfo
from storage.errors import DstlError, InternalError, InvalidInputError

logger = logging.getLogger("backend_client")

_RANGES_MAX = 64
"""Into how many ranges of key groups a task divides what it writes, at most: of more, change sets were too small."""
_ALL_RANGES_MAX = 10_000
"""About how many ranges all tasks divide it into, so that small state with many partitions has few change sets."""
_SETS_MAX = 40_000
"""Most change sets of the checkpoint, whose request has about 700 bytes for each."""


def rewritten_from(latest: CheckpointInfo | None) -> int | None:
    """Return the number of key groups that a checkpoint's tables have if they have to be rewritten; else None."""
    if latest is None or latest.forked_from is None or not latest.forked_from.is_before_rewriting(latest.ref):
        return None
    return latest.forked_from.max_parallelism


def check_rewriting(latest: CheckpointInfo | None) -> None:
    """
    Check that the tables of a job's newest checkpoint can be rewritten, if they have to be.

    Raises:
        InvalidInputError: An operator has a key column of a type whose hash only Spark knows.
    """
    if latest is not None and rewritten_from(latest) is not None:
        for info in _with_tables(latest):
            KeyHash(info.key_schema)


def rewrite_tables(spark: SparkSession, session: JobSession, settings: BackendSettings) -> None:
    """
    Rewrite the tables of the newest checkpoint if they have another number of key groups than the job.

    Afterwards the session's newest checkpoint is the one that has the result. May be repeated after a failure.

    Raises:
        CorruptDataError: A stored entry cannot be read, or has not its key's key group.
        DstlError: The service or its store does not answer, or another driver took the job over.
    """
    latest, before = session.latest, rewritten_from(session.latest)
    if latest is None or before is None:
        return
    after, checkpoint_id = session.max_parallelism, latest.ref.id + 1
    logger.info("job %s: the state of its parent is rewritten from %d to %d key groups", settings.job, before, after)
    session.begin(checkpoint_id)
    try:
        with kept_awake(settings.sidecar_idle_exit_s, partial(connect, settings, 0.0)):
            _complete(spark, session, settings, latest, before)
    except BaseException:
        with suppress(DstlError):  # it must not hide the error
            session.abort(checkpoint_id)
        raise


def _complete(
    spark: SparkSession, session: JobSession, settings: BackendSettings, latest: CheckpointInfo, before: int
) -> None:
    after = session.max_parallelism
    former = _with_tables(latest)
    new = new_operators(latest.operators, after)
    refs: list[ChangeSetRef] = []
    for old, info in zip(former, new, strict=True):
        ranges = max(1, min(after, _RANGES_MAX, _ALL_RANGES_MAX // (len(former) * old.parallelism)))
        task = TableRewriting(
            settings, session.job_uid, session.epoch, latest.ref, old, info.name, before, after, ranges
        )
        entries, added = _run(spark, task, old.parallelism)
        refs += added
        if len(refs) > _SETS_MAX:
            raise InvalidInputError(
                f"the state of job {settings.job!r} has more than {_SETS_MAX} change sets when it is rewritten, which "
                "one checkpoint cannot name: use fork_of without another max_parallelism"
            )
        size_bytes = sum(ref.size_bytes for ref in added)
        logger.info("operator %s: %d entries rewritten, %d bytes logged", info.label, entries, size_bytes)
    gone = [info for info in latest.operators if info.kind == REMOVED]
    # Entries of the old tables, so that no other table gets their names.
    gone += [entry for info in former for entry in removed_entries(info, latest.operators)]
    plan = session.plan(refs, [*new, *gone], latest.query_id, latest.offsets, closed_ms=latest.closed_ms)
    session.complete(latest.ref.id + 1, plan)
    assert session.latest is not None
    session.latest = replace(session.latest, forked_from=latest.forked_from)


def _run(spark: SparkSession, task: TableRewriting, parallelism: int) -> tuple[int, list[ChangeSetRef]]:
    """Rewrite an operator's tables, each by a task; return the number of entries, and the change sets by partition."""
    numbers = own_session(spark).range(0, parallelism, 1, parallelism).selectExpr("cast(id as int) as id")
    rows = numbers.mapInArrow(task.__call__, REWRITTEN).collect()
    found = {row.partition: row for row in rows}
    if len(rows) != len(found) or found.keys() != set(range(parallelism)):
        raise InternalError(
            f"tables {sorted(found)} of {task.operator.label!r} were rewritten, not 0..{parallelism - 1}"
        )
    texts = [found[number].refs for number in range(parallelism)]
    return sum(row.entries for row in rows), [ChangeSetRef(**ref) for text in texts for ref in json.loads(text)]


def new_operators(stored: Sequence[OperatorInfo], max_parallelism: int) -> list[OperatorInfo]:
    """Return the entries of the operators with tables, each with a new table, whose name has never been one."""
    made: list[OperatorInfo] = []
    labels = [info.label for info in stored if info.has_table]
    for info in stored:
        if info.has_table:
            name = unused_name(info.label, [*(other.name for other in (*stored, *made))], labels)
            called = None if name == info.label else info.label
            parallelism = min(info.parallelism, max_parallelism)
            made.append(replace(info, name=name, called=called, parallelism=parallelism))
    return made


def _with_tables(latest: CheckpointInfo) -> list[OperatorInfo]:
    return [info for info in latest.operators if info.has_table]
