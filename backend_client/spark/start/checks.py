"""
Checks before a query takes its job over: the query, its Spark checkpoint and the stored state belong together.

Reads only. The checks run before the takeover, so that a refused start leaves a running query alone, and again after
it, for what was stored in between.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from backend_client.autoscaling import AutoscaleRule
from backend_client.failover.set_aside_entries import companion_of
from backend_client.settings import BackendSettings
from backend_client.spark.columnar_plan import ColumnarPlan
from backend_client.spark.query import Operator, Query
from backend_client.spark.start.failover_checks import check_failover
from backend_client.spark.start.fork_start import check_fork, check_fork_input, is_at_fork, parent_log
from backend_client.spark.start.idle_ticks import check_idle_ticks
from backend_client.spark.start.operator_modes import COLUMNS, ROWS, check_modes
from backend_client.spark.start.operator_tables import OperatorTables, assign_tables, check_numbers
from backend_client.spark.start.planned_batch import is_same_plan
from backend_client.spark.start.spark_checkpoint import CheckpointLog
from backend_client.state.declared_states import merge_states
from backend_client.state.schema_change import key_difference
from dstl_service.wire import CheckpointInfo, OperatorInfo
from storage.errors import ConflictError, InvalidInputError
from storage.key_groups import check_parallelism


@dataclass(frozen=True, slots=True)
class StartOperators:
    """
    The operators with which a query starts.

    Args:
        infos: The query's own, in its order.
        removed: The entries of operators that it no longer has.
    """

    infos: list[OperatorInfo]
    removed: tuple[OperatorInfo, ...] = ()


def check_start(
    query: Query, log: CheckpointLog, latest: CheckpointInfo | None, max_parallelism: int
) -> StartOperators:
    """
    Return the query's operators, merged with what the newest checkpoint records of them.

    Args:
        query: The query to start.
        log: Its Spark checkpoint.
        latest: The job's newest checkpoint, None for a new job.
        max_parallelism: The job's number of key groups.

    Raises:
        InvalidInputError: The Spark checkpoint belongs to another query; a key, a state schema or a mode differs; or
            an operator with stored state is missing; see `check_numbers` and `assign_tables`.
        ConflictError: The Spark checkpoint and the state have diverged.
    """
    names = [operator.name for operator in query.operators]
    unnamed = [operator.name for operator in query.operators if not operator.is_named]
    check_numbers(names, unnamed, latest.operators if latest else (), query.settings.job)
    tables = assign_tables(names, latest.operators if latest else None, query.settings)
    check_failover(query, latest, tables.names)
    infos = _operator_infos(query, tables, max_parallelism)
    _check_checkpoint(query, log, latest)
    return StartOperators(infos, tables.removed)


def check_names(infos: Iterable[OperatorInfo]) -> None:
    """
    Raise `InvalidInputError` if a sink has the name of an operator's table, or of its companion.

    The table may be new and have a number.
    """
    infos = list(infos)
    names = [info.name for info in infos] + [companion_of(info.name) for info in infos if info.has_table]
    for name, number in Counter(names).items():
        if number > 1:
            raise InvalidInputError(
                f"an operator has its state, or rows set aside, under the name {name!r}: give the sink another name"
            )


def _check_checkpoint(query: Query, log: CheckpointLog, latest: CheckpointInfo | None) -> None:
    """Refuse a Spark checkpoint that does not belong to the query that wrote the state, and the reverse."""
    settings, query_id = query.settings, log.query_id()
    job, location = settings.job, log.location
    check_idle_ticks(latest.offsets if latest else log.offsets(0), settings.idle_timers, job)
    if latest is None:
        newest = log.newest()  # Spark deletes old entries: batch 1 may be gone
        # The first batch may have been planned, but not committed: each batch was in a checkpoint before.
        if query_id is not None and newest is not None and (newest > 0 or log.committed() is not None):
            raise InvalidInputError(
                f"the Spark checkpoint {location} already has batches, but job {job!r} has no state in "
                f"{settings.storage}: use a new checkpointLocation, or the storage and job name that it belongs to"
            )
        return
    if is_at_fork(latest):
        check_fork_input(query.source, settings)
        check_fork(log, latest, settings, parent_log(query.spark, settings))
        return
    if query_id is None:
        raise InvalidInputError(
            f"job {job!r} has state up to batch {latest.ref.id}, but the Spark checkpoint {location} is new: "
            "use the checkpointLocation that this job was started with, or another job name"
        )
    if latest.query_id and query_id != latest.query_id:
        raise InvalidInputError(
            f"the Spark checkpoint {location} belongs to query {query_id}, the state of job {job!r} to query "
            f"{latest.query_id}: use the checkpointLocation that this job was started with, or another job name"
        )
    # After a rewind, the start sets the Spark checkpoint back, too; see `CheckpointLog.rewind`.
    if latest.rewound_from is None:
        check_plan(log, latest, settings)


def check_commits(
    log: CheckpointLog, committed: int | None, latest: CheckpointInfo | None, settings: BackendSettings
) -> None:
    """
    Check that the state has all batches that Spark has committed: each was in a checkpoint before.

    A takeover fences what follows the newest checkpoint, so it must not happen while a lost one can still be found.

    Args:
        log: The Spark checkpoint.
        committed: The last batch that it had committed before the newest checkpoint was read: a query may be running.
        latest: The job's newest checkpoint.
        settings: The job's settings.

    Raises:
        ConflictError: Checkpoints are lost.
    """
    newest = -1 if latest is None else latest.ref.id
    if committed is None or committed <= newest:
        return
    if latest is not None and latest.rewound_from is not None and not log.begins_at(latest.ref.uid):
        return  # the start sets it back
    repair = f"dstl fsck --storage {settings.storage} --rebuild --up-to {committed} --write {settings.job}"
    raise ConflictError(
        f"Spark has committed batch {committed} in {log.location}, but the state of job {settings.job!r} "
        + ("has no checkpoint" if latest is None else f"ends with checkpoint {newest}")
        + ": newer ones are lost, or the storage is an older copy. Bring its newest copy back; if only manifests are "
        f"lost, stop the job's services and run {repair}{_or_rewind(settings, newest - 1)}"
    )


def is_done(log: CheckpointLog, latest: CheckpointInfo | None, batch_id: int, settings: BackendSettings) -> bool:
    """
    Return whether the newest checkpoint already contains Spark's batch.

    Raises:
        ConflictError: Batch and checkpoint do not fit: one of the two was set back without the other.
    """
    expected = latest.ref.id + 1 if latest else 0
    if latest is not None and batch_id == latest.ref.id:
        check_plan(log, latest, settings)
        return True
    if batch_id != expected:
        raise ConflictError(
            f"Spark executes batch {batch_id}, but the state of job {settings.job!r} "
            + (f"ends with batch {latest.ref.id}" if latest else "has no batch")
            + f". The Spark checkpoint {log.location} and the state do not belong together, or one of them "
            "was deleted or set back: restore the missing one, or start with a new checkpointLocation and a new "
            "job name"
        )
    return False


def check_plan(log: CheckpointLog, latest: CheckpointInfo, settings: BackendSettings) -> None:
    """
    Check that Spark's offsets entry of the newest batch is the executed one, so that Spark continues after it.

    Raises:
        ConflictError: The entry is lost or differs: the rows that Spark plans, or has planned, under this batch number
            are not those that the state contains. If the batch counted as done, those rows would be lost.
    """
    offsets, batch_id, job = log.offsets(latest.ref.id), latest.ref.id, settings.job
    if offsets is None:
        newest = log.newest()
        stands = "has no batch" if newest is None else f"ends with batch {newest}"
        raise ConflictError(
            f"the state of job {job!r} contains batch {batch_id}, but the Spark checkpoint {log.location} {stands}: it "
            f"is older than the state, or some of its files were lost. Spark would plan batch {batch_id} again with "
            f"other rows, which would be skipped as done. Restore its newest copy{_or_rewind(settings, newest)}"
        )
    if latest.offsets and not is_same_plan(offsets, latest.offsets):
        raise ConflictError(
            f"the Spark checkpoint {log.location} does not belong to the state of job {job!r}: batch {batch_id} has "
            "different offsets there, so its rows are not those that the state contains. Use the checkpointLocation "
            "that this job was started with, or another job name; if the Spark checkpoint was restored from an older "
            f"copy or lost files, restore its newest copy{_or_rewind(settings, batch_id - 1)}"
        )


def _or_rewind(settings: BackendSettings, batch_id: int | None) -> str:
    if batch_id is None or batch_id < 0:
        return ""
    command = f"dstl rewind --storage {settings.storage} --checkpoint {batch_id} --write {settings.job}"
    return f", or rewind the state as well: {command}"


def _operator_infos(query: Query, tables: OperatorTables, max_parallelism: int) -> list[OperatorInfo]:
    cores, default = query.spark.sparkContext.defaultParallelism, query.settings.parallelism
    if default is None:
        default = min(cores, max_parallelism)
    rule = AutoscaleRule.of(query.settings, cores, max_parallelism)
    return [_operator_info(operator, tables, default, max_parallelism, rule) for operator in query.operators]


def _operator_info(
    operator: Operator,
    tables: OperatorTables,
    parallelism_default: int,
    max_parallelism: int,
    rule: AutoscaleRule | None,
) -> OperatorInfo:
    known = tables.stored.get(operator.name)
    parallelism = parallelism_default if operator.parallelism is None else operator.parallelism
    check_parallelism(parallelism, max_parallelism)
    if rule is not None:
        parallelism = rule.start(known.parallelism if known is not None else None, parallelism)
    is_columnar = isinstance(operator.processor, ColumnarPlan)
    modes = (operator.time_mode.value, operator.output_mode, COLUMNS if is_columnar else ROWS)
    info = OperatorInfo(operator.name, parallelism, operator.key_schema.json(), operator.states, *modes)
    if known is not None:
        check_modes(known, info)
        if isinstance(operator.processor, ColumnarPlan):
            operator.processor.check_stored(operator.name, known.states)
    info = replace(info, states=merge_states(operator.name, known.states if known else {}, operator.states))
    table = tables.names[operator.name]
    info = replace(info, name=table, called=None if table == operator.name else operator.name)
    if known is None:
        return info
    difference = key_difference(json.loads(known.key_schema), json.loads(info.key_schema))
    if difference is not None:
        raise InvalidInputError(
            f"the key of operator {operator.name!r} {difference}; "
            "an operator's key cannot change: group by the columns that it was started with, or use another job name"
        )
    return replace(info, key_schema=known.key_schema, renamed_from=known.renamed_from)
