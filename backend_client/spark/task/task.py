"""
A Spark task: one partition of one operator in one batch.

The task advances its table to the base, runs the user's processor key by key, sends its changes to the sidecar and
yields the output rows. Two marker rows frame each attempt's output: the first names the attempt, the last also carries
its *receipt* (references of its change sets, counts). The receipt travels in the same block as the rows, so the driver
always gets the receipt of exactly the rows that Spark kept (I2, I18).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StringType, StructField, StructType

from backend_client.batch_time import TimeMode
from backend_client.failover.patience import Patience, TaskFailover
from backend_client.failover.set_aside_entries import Waiting, by_partition, closing_time, time_of
from backend_client.failover.set_aside_log import log_rows, read_logged, with_rows
from backend_client.portions import pieces
from backend_client.service.hand_over import hand_over_snapshot
from backend_client.service.job_session import kept_client
from backend_client.service.log_writer import LogWriter
from backend_client.service.partition_table import open_partition
from backend_client.service.restore import SlowRestoreError, read_change_sets
from backend_client.spark.batch import BatchContext, Receipt, is_reachable
from backend_client.spark.columnar_plan import ColumnarPlan
from backend_client.spark.combining import combining_of
from backend_client.spark.private.worker_connection import without_delay
from backend_client.spark.shipping import Parcel
from backend_client.spark.task.columnar_calls import ColumnarCalls, with_types
from backend_client.spark.task.initial_rows import InitialRows
from backend_client.spark.task.late_rows import LateRowFilter
from backend_client.spark.task.mixed_keys import KeySeparator, key_encoding, with_key_groups, with_keys
from backend_client.spark.task.pandas_settings import PandasSettings
from backend_client.spark.task.row_calls import RowCalls, Timing
from backend_client.spark.task.rows import GroupedRows, RowsToArrow
from backend_client.spark.task.worker import rare_garbage_collection, spare_garbage_collection
from backend_client.standby.tending import tended
from backend_client.state.keyed_state import CountedReads, KeyedState
from backend_client.state.state_deletion import deletions, hide
from backend_client.state.timers import Upcoming
from backend_client.table.local_disk import is_useless
from backend_client.table.state_table import StateTable
from dstl_service.wire import ChangeSetRef, LogTarget, StateInfo
from storage.key_groups import KeyGroupRange, key_group_range

if TYPE_CHECKING:
    from backend_client.spark.task.frames import FramesToArrow, GroupedFrames

MARKER_COLUMN = "__dstl_marker"
_REPLAY_PARTS, _SECOND_PASS_PARTS = 1 << 30, 1 << 31
"""Where the numbers of list parts begin: above those that the earlier pass, or the batch itself, may have written."""


@dataclass(frozen=True)
class OperatorTask:
    """
    The function that ``mapInArrow`` runs.

    Input columns: those of `placement.place`, with row columns `row_names`, or with `initial` the unioned columns that
    it separates. `deleted` holds the ids of variables whose entries are to be deleted. `earlier` holds the change sets
    of the batch's first pass, by partition, on which the second pass builds. What `failover` lists for a partition is
    run before its rows.
    Output columns: those of `output`, then `MARKER_COLUMN`, which is null except in marker rows: there it is the
    attempt's number, in the last row followed by a space and the receipt.
    """

    operator: str
    processor: Parcel
    """Contains a `StatefulProcessor` or a `ColumnarPlan`."""
    states: dict[str, StateInfo]
    key_schema: str
    key_places: tuple[int | None, ...]
    """Each key column's position among the row columns; None for a separate column before them."""
    row_names: tuple[str, ...]
    output: StructType
    parallelism: int
    max_parallelism: int
    batch: BatchContext
    time_mode: TimeMode = TimeMode.NONE
    fires_first: bool = False
    """Whether stored due timers fire before the rows of their key (`row_calls.Timing`)."""
    initial: InitialRows | None = None
    deleted: tuple[int, ...] = ()
    earlier: Mapping[int, Sequence[ChangeSetRef]] = field(default_factory=dict)
    pandas: PandasSettings | None = None
    """Set for a processor of the pandas API."""
    failover: TaskFailover = field(default_factory=TaskFailover)
    is_combined: bool = False
    """Whether Spark has combined the rows; those of a columnar operator."""
    removed_ms: int | None = None
    """See `ColumnarCalls`."""
    is_replay: bool = False
    """Whether the rows are of a batch of which the rest ran before."""

    def output_schema(self) -> StructType:
        """Return the schema of the yielded batches; marker rows make every field nullable."""
        fields = [StructField(field.name, field.dataType, True, field.metadata) for field in self.output.fields]
        return StructType([*fields, StructField(MARKER_COLUMN, StringType())])

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """
        Process one partition: open its table, run the processor over its rows, commit its changes.

        If the table is not there within the partition's patience, the rows are set aside.
        """
        context = TaskContext.get()
        assert context is not None
        number, attempt, to_arrow = context.partitionId(), context.taskAttemptId(), RowsToArrow(self.output)
        batches = without_delay(batches)
        rows: Iterable[pa.RecordBatch] | None = batches
        patience = self.failover.patience.get(number)
        if patience is not None and not patience.sets_aside:
            rows = with_rows(batches)
            patience = patience if rows is None else None
        yield self._marker(to_arrow, str(attempt))
        try:
            with self._opened(number, attempt, patience) as part:
                works = []
                for work in self.works(part, rows or (), to_arrow):
                    yield from self._run(work, to_arrow)
                    works.append(work)
                receipt = self._commit(part, works)
        except SlowRestoreError:
            receipt = self._stalled(number, attempt, rows or ())
        yield self._marker(to_arrow, f"{attempt} {receipt.to_json()}")

    @contextmanager
    def _opened(self, partition: int, attempt: int, patience: Patience | None) -> Iterator[Partition]:
        """Open a partition's table at the batch's base, overlaid with the changes of an earlier pass."""
        batch, settings = self.batch, self.batch.settings
        client, job, base = kept_client(settings), settings.job, batch.base
        earlier = self.earlier.get(partition)
        target = self._target(self.operator, partition, attempt)
        writer, key_groups = LogWriter(client, target, first_sqn=len(earlier or ())), target.key_groups
        patience_s = None if patience is None else patience.seconds
        standby = tended(settings, batch.standby, batch.job_uid, batch.epoch, base)
        table, advance = open_partition(settings, batch.job_uid, self.operator, key_groups, base, patience_s)
        try:
            if advance.materialize and base is not None:
                hand_over_snapshot(table, client, job, self.operator, key_groups, base)
            if earlier is not None:
                table.overlay(read_change_sets(client, job, batch.epoch, earlier, batch.links))
            yield Partition(partition, attempt, key_groups, table, writer, advance.materialized, standby)
        except Exception as error:
            if is_useless(error):
                table.discard()
            raise
        finally:
            table.close()
            spare_garbage_collection()

    def _target(self, operator: str, partition: int, attempt: int) -> LogTarget:
        """Return the log of an attempt; `operator` is this one or its companion."""
        batch = self.batch
        job, checkpoint_id, epoch = batch.settings.job, batch.checkpoint_id, batch.epoch
        key_groups = key_group_range(partition, self.parallelism, self.max_parallelism)
        return LogTarget(job, operator, checkpoint_id, epoch, attempt, partition, key_groups, batch.job_uid)

    def _stalled(self, partition: int, attempt: int, rows: Iterable[pa.RecordBatch]) -> Receipt:
        """Set the rows aside; return the receipt. Late rows are late whenever the others run."""
        batch, on_time = self.batch, LateRowFilter(rows)
        target = self._target(self.failover.companion, partition, attempt)
        writer = LogWriter(kept_client(batch.settings), target)
        count = log_rows(on_time, target.key_groups, batch.epoch, writer, batch.settings.preemptive_bytes)
        if not is_reachable(batch, writer.refs):
            writer.make_durable()
        return Receipt(
            operator=self.operator,
            partition=partition,
            attempt=attempt,
            rows=0,
            keys=0,
            changes=0,
            refs=[],
            late_rows=on_time.late_rows,
            is_stalled=True,
            rows_set_aside=count,
            set_aside=writer.refs,
        )

    def works(self, part: Partition, rows: Iterable[pa.RecordBatch], to_arrow: RowsToArrow) -> Iterator[Work]:
        """
        Yield the work on rows of earlier batches, in order of arrival, then that on the batch's own rows.

        Each is to be done before the next one is asked for, which then builds on its changes.
        """
        batch, deleted, done = self.batch, self.deleted, 0
        client, refs = kept_client(batch.settings), part.writer.refs
        for entries in by_partition(self.failover.waiting.get(part.number, ())):
            # Time passes only for key groups that were stalled; after a rescale a partition has others, too.
            those = part._replace(key_groups=part.key_groups.within(entries[0].key_groups))
            for earlier, waiting_rows in self._of_earlier(those, entries):
                self._delete(part, deleted)
                yield replace(earlier, deleted=deleted).work(those, waiting_rows, to_arrow)
                part.table.overlay(read_change_sets(client, batch.settings.job, batch.epoch, refs[done:], batch.links))
                deleted, done = (), len(refs)  # the first work deletes; the others see the deletions
        self._delete(part, deleted)
        yield replace(self, deleted=deleted).work(part, rows, to_arrow)

    def _of_earlier(self, part: Partition, entries: Waiting) -> Iterator[tuple[OperatorTask, Iterable[pa.RecordBatch]]]:
        """Yield the passes over an earlier batch: the task as it would have been then, and its rows."""
        batch, entry = self.batch, entries[0]
        assert batch.base is not None  # it lists the rows
        client, job = kept_client(batch.settings), batch.settings.job
        then = replace(batch, checkpoint_id=entry.checkpoint_id, time=time_of(entry))
        rows = read_logged(client, job, self.failover.companion, part.key_groups, entries, batch.base)
        task = replace(self, batch=then, is_replay=all(entry.is_lost for entry in entries))
        yield task, rows
        closing = closing_time(entry)
        if closing is not None:
            yield replace(task, batch=replace(then, time=closing, is_second_pass=True), fires_first=False), ()

    def _delete(self, part: Partition, states: tuple[int, ...]) -> None:
        """Delete the entries of these variables."""
        for changes in deletions(part.table.scan, part.key_groups, states, self.batch.settings.preemptive_bytes):
            part.writer.append(changes, preemptive=True)

    def work(self, part: Partition, batches: Iterable[pa.RecordBatch], to_arrow: RowsToArrow) -> Work:
        """Return the work on these rows in the partition's key groups; it does not see deleted variables."""
        on_time = LateRowFilter(with_keys(batches, self.key_places))
        processor: StatefulProcessor | ColumnarPlan = self.processor.unpack()
        encode = key_encoding(self.key_schema, processor.keys if isinstance(processor, ColumnarPlan) else None)
        separated = KeySeparator(on_time, len(self.key_places), encode)
        if isinstance(processor, ColumnarPlan):
            return self._columnar_work(processor, part, with_key_groups(separated), to_arrow)
        return self._row_work(processor, part, with_key_groups(separated), on_time, to_arrow)

    def _run(self, work: Work, to_arrow: RowsToArrow) -> Iterator[pa.RecordBatch]:
        """Yield the processor's output."""
        for columns in work.outputs:
            for part in pieces(columns):
                yield self._batch(part, pa.nulls(len(part[0]), pa.string()), to_arrow)

    def _commit(self, part: Partition, works: Sequence[Work]) -> Receipt:
        """Make the changes reachable for the coordinator; return the receipt."""
        writer, own = part.writer, works[-1]
        if not is_reachable(self.batch, writer.refs):
            # The coordinator cannot reach the sidecar that holds these change sets, so they must be stored now.
            writer.make_durable()
        return Receipt(
            operator=self.operator,
            partition=part.number,
            attempt=part.attempt,
            rows=sum(work.input.rows_seen for work in works),
            keys=sum(work.input.keys_seen for work in works),
            changes=writer.changes,
            refs=writer.refs,
            materialized=part.materialized,
            late_rows=sum(work.late_rows() for work in works),
            groups=own.input.groups if isinstance(own.input, ColumnarCalls) else 0,
            state_reads=sum(work.state_reads() for work in works),
            table_bytes=part.table.size_bytes(),
            next_due_ms=own.next_due_ms(),
            standby=part.standby,
        )

    def _columnar_work(
        self, plan: ColumnarPlan, part: Partition, batches: Iterator[pa.RecordBatch], to_arrow: RowsToArrow
    ) -> Work:
        moments = plan.moments(self.batch.time)
        sent_bytes, known = self.batch.settings.preemptive_bytes, (part.key_groups, moments)
        combining = combining_of(plan) if self.is_combined else None
        columnar = ColumnarCalls(
            plan, self.key_schema, self.states, *known, sent_bytes, combining=combining, removed_ms=self.removed_ms
        )
        outputs = columnar.run(batches, part.table, part.writer)
        fit = (with_types(output, to_arrow.names, to_arrow.types) for output in outputs)
        return Work(columnar, fit, lambda: columnar.late_rows, lambda: columnar.keys_seen, lambda: columnar.next_end_ms)

    def _row_work(
        self,
        processor: StatefulProcessor,
        part: Partition,
        batches: Iterator[pa.RecordBatch],
        on_time: LateRowFilter,
        to_arrow: RowsToArrow,
    ) -> Work:
        table, writer = part.table, part.writer
        time = self.batch.time if self.time_mode is not TimeMode.NONE else None
        reads = CountedReads(table.get)
        get, scan = hide(reads, table.scan, self.deleted)
        timestamp_ms = 0 if time is None else time.timestamp_ms
        parts_from = _SECOND_PASS_PARTS * self.batch.is_second_pass + _REPLAY_PARTS * self.is_replay
        state = KeyedState(get, part.key_groups, scan, self.batch.checkpoint_id, timestamp_ms, parts_from)
        calls = RowCalls(
            operator=self.operator,
            processor=processor,
            states=self.states,
            key_schema=self.key_schema,
            preemptive_bytes=self.batch.settings.preemptive_bytes,
            timing=None if time is None else Timing(self.time_mode, time, self.fires_first),
            initial=self.initial,
            take=to_arrow.taken,
        )
        key_count = len(self.key_places)
        names = self.row_names if self.initial is None else self.initial.names
        grouped: GroupedRows | GroupedFrames = GroupedRows(batches, key_count, names)
        convert: RowsToArrow | FramesToArrow = to_arrow
        if self.pandas is not None:
            from backend_client.spark.task.pandas_calls import pandas_calls  # pandas is optional

            calls, grouped, convert = pandas_calls(calls, batches, key_count, names, self.output, self.pandas)

        def run() -> Iterator[list[pa.Array]]:
            # Frames can amount to gigabytes of garbage while still being few objects.
            with rare_garbage_collection() if self.pandas is None else nullcontext():
                for rows in calls.run(grouped, state, writer):
                    columns = convert.columns(rows)
                    calls.portion.measure(len(rows), columns)
                    yield columns
            writer.append(state.take_changes(), preemptive=False)

        upcoming = calls.upcoming if self.time_mode is TimeMode.EVENT else Upcoming()
        return Work(grouped, run(), lambda: on_time.late_rows, lambda: reads.count, lambda: upcoming.ms)

    def _marker(self, to_arrow: RowsToArrow, text: str) -> pa.RecordBatch:
        return self._batch([pa.nulls(1, kind) for kind in to_arrow.types], pa.array([text], pa.string()), to_arrow)

    def _batch(self, columns: list[pa.Array], markers: pa.Array, to_arrow: RowsToArrow) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([*columns, markers], [*to_arrow.names, MARKER_COLUMN])


class Partition(NamedTuple):
    """An attempt's open partition: its table at the base, and the writer of its changes."""

    number: int
    attempt: int
    key_groups: KeyGroupRange
    table: StateTable
    writer: LogWriter
    materialized: dict[str, Any] | None
    standby: dict[str, Any] | None


class Work(NamedTuple):
    """A partition's work: its input with counters, its lazy output, and figures that are valid once that is read."""

    input: GroupedRows | GroupedFrames | ColumnarCalls
    outputs: Iterator[list[pa.Array]]
    late_rows: Callable[[], int]
    state_reads: Callable[[], int]
    next_due_ms: Callable[[], int | None]
