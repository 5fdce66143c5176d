"""
A Spark task: one partition of one operator in one batch.

The task advances its table to the base, runs the user's processor key by key, sends its changes to the sidecar and
yields the output rows. Two marker rows frame each attempt's output: the first names the attempt, the last also carries
its *receipt* (references of its change sets, counts). The receipt travels in the same block as the rows, so the driver
always gets the receipt of exactly the rows that Spark kept (I2, I18).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StringType, StructField, StructType

from backend_client.batch_time import BatchTime, TimeMode
from backend_client.portions import pieces
from backend_client.service.hand_over import hand_over_snapshot
from backend_client.service.host_link import linked_coordinator
from backend_client.service.job_session import kept_client
from backend_client.service.log_writer import LogWriter
from backend_client.service.partition_table import open_partition
from backend_client.service.restore import read_change_sets
from backend_client.settings import BackendSettings
from backend_client.spark.columnar_plan import ColumnarPlan
from backend_client.spark.shipping import Parcel
from backend_client.spark.task.columnar_calls import ColumnarCalls, with_types
from backend_client.spark.task.initial_rows import InitialRows
from backend_client.spark.task.late_rows import LateRowFilter
from backend_client.spark.task.mixed_keys import KeySeparator, with_key_groups, with_keys
from backend_client.spark.task.pandas_settings import PandasSettings
from backend_client.spark.task.row_calls import RowCalls, Timing
from backend_client.spark.task.rows import GroupedRows, RowsToArrow
from backend_client.spark.task.worker import rare_garbage_collection, spare_garbage_collection
from backend_client.state.codec import KeyCodec
from backend_client.state.keyed_state import CountedReads, KeyedState
from backend_client.state.state_deletion import deletions, hide
from backend_client.state.timers import Upcoming
from backend_client.table.local_disk import is_useless
from backend_client.table.state_table import StateTable
from dstl_service.wire import ChangeSetRef, CheckpointRef, LinkAddress, LogTarget, StateInfo
from storage.key_groups import KeyGroupRange, key_group_range

if TYPE_CHECKING:
    from backend_client.spark.task.frames import FramesToArrow, GroupedFrames

MARKER_COLUMN = "__dstl_marker"
_SECOND_PASS_PARTS = 1 << 31
"""Above the numbers of all list parts that a first pass may have written."""


@dataclass(frozen=True, slots=True)
class BatchContext:
    """The driver's information for all tasks of one execution of a batch."""

    settings: BackendSettings
    job_uid: str
    epoch: int
    checkpoint_id: int
    base: CheckpointRef | None
    coordinator_id: str
    links: LinkAddress | None = None
    """Where the coordinator accepts links of other hosts; None if it does not."""
    time: BatchTime | None = None
    """None if no operator of the query uses time."""
    is_second_pass: bool = False
    """Whether this is the second pass, for what is due after the batch's rows; see `closing`."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """
    An attempt's result; `refs` name its change sets in order, `materialized` is its sidecar's report of a snapshot.

    `late_rows` counts dropped late rows. `next_due_ms` is a lower bound on when the first remaining timer is due or
    state ends; None without any, or if they do not use event time.
    """

    operator: str
    partition: int
    attempt: int
    rows: int
    keys: int
    changes: int
    refs: list[ChangeSetRef]
    materialized: dict[str, Any] | None = None
    late_rows: int = 0
    state_reads: int = 0
    table_bytes: int = 0
    next_due_ms: int | None = None

    @classmethod
    def from_json(cls, text: str) -> Receipt:
        """Parse the receipt in a task's last row."""
        document = json.loads(text)
        return cls(**{**document, "refs": [ChangeSetRef(**ref) for ref in document["refs"]]})

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        return json.dumps(asdict(self), separators=(",", ":"))


def is_reachable(batch: BatchContext, refs: Sequence[ChangeSetRef]) -> bool:
    """Say whether the coordinator reaches the sidecar that took in these change sets of a task of the batch."""
    if all(ref.service_id == batch.coordinator_id or ref.service_url is not None for ref in refs):
        return True
    if batch.links is None:
        return False
    client, job = kept_client(batch.settings), batch.settings.job
    return linked_coordinator(client, job, batch.links, refs[-1].service_id) == batch.coordinator_id


@dataclass(frozen=True)
class OperatorTask:
    """
    The function that ``mapInArrow`` runs.

    Input columns: those of `placement.place`, with row columns `row_names`, or with `initial` the unioned columns that
    it separates. `deleted` holds the ids of variables whose entries are to be deleted. `earlier` holds the change sets
    of the batch's first pass, by partition, on which the second pass builds.
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

    def output_schema(self) -> StructType:
        """Return the schema of the yielded batches; marker rows make every field nullable."""
        fields = [StructField(field.name, field.dataType, True, field.metadata) for field in self.output.fields]
        return StructType([*fields, StructField(MARKER_COLUMN, StringType())])

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Process one partition: open its table, run the processor over its rows, commit its changes."""
        context = TaskContext.get()
        assert context is not None
        to_arrow = RowsToArrow(self.output)
        with self._opened(context.partitionId(), context.taskAttemptId()) as part:
            yield self._marker(to_arrow, str(part.attempt))
            work = self._work(part, batches, to_arrow)
            yield from self._run(work, to_arrow)
            receipt = self._commit(part, work)
            yield self._marker(to_arrow, f"{part.attempt} {receipt.to_json()}")

    @contextmanager
    def _opened(self, partition: int, attempt: int) -> Iterator[_Partition]:
        """Open a partition's table at the batch's base, overlaid with the changes of an earlier pass."""
        batch, settings = self.batch, self.batch.settings
        key_groups = key_group_range(partition, self.parallelism, self.max_parallelism)
        client, job, base = kept_client(settings), settings.job, batch.base
        earlier = self.earlier.get(partition)
        target = LogTarget(
            job, self.operator, batch.checkpoint_id, batch.epoch, attempt, partition, key_groups, batch.job_uid
        )
        writer = LogWriter(client, target, first_sqn=len(earlier or ()))
        table, advance = open_partition(settings, batch.job_uid, self.operator, key_groups, base)
        try:
            if advance.materialize and base is not None:
                hand_over_snapshot(table, client, job, self.operator, key_groups, base)
            if earlier is not None:
                table.overlay(read_change_sets(client, job, batch.epoch, earlier, batch.links))
            yield _Partition(partition, attempt, key_groups, table, writer, advance.materialized)
        except Exception as error:
            if is_useless(error):
                table.discard()
            raise
        finally:
            table.close()
            spare_garbage_collection()

    def _work(self, part: _Partition, batches: Iterable[pa.RecordBatch], to_arrow: RowsToArrow) -> _Work:
        """Delete the entries of deleted variables; return the work on the rows."""
        deleted = deletions(part.table.scan, part.key_groups, self.deleted, self.batch.settings.preemptive_bytes)
        for changes in deleted:
            part.writer.append(changes, preemptive=True)
        on_time = LateRowFilter(with_keys(batches, self.key_places))
        separated = KeySeparator(on_time, len(self.key_places), KeyCodec(self.key_schema).encode)
        processor: StatefulProcessor | ColumnarPlan = self.processor.unpack()
        if isinstance(processor, ColumnarPlan):
            return self._columnar_work(processor, part, with_key_groups(separated), to_arrow)
        return self._row_work(processor, part, with_key_groups(separated), on_time, to_arrow)

    def _run(self, work: _Work, to_arrow: RowsToArrow) -> Iterator[pa.RecordBatch]:
        """Yield the processor's output."""
        for columns in work.outputs:
            for part in pieces(columns):
                yield self._batch(part, pa.nulls(len(part[0]), pa.string()), to_arrow)

    def _commit(self, part: _Partition, work: _Work) -> Receipt:
        """Make the changes reachable for the coordinator; return the receipt."""
        writer = part.writer
        if not is_reachable(self.batch, writer.refs):
            # The coordinator cannot reach the sidecar that holds these change sets, so they must be stored now.
            writer.make_durable()
        return Receipt(
            operator=self.operator,
            partition=part.number,
            attempt=part.attempt,
            rows=work.input.rows_seen,
            keys=work.input.keys_seen,
            changes=writer.changes,
            refs=writer.refs,
            materialized=part.materialized,
            late_rows=work.late_rows(),
            state_reads=work.state_reads(),
            table_bytes=part.table.size_bytes(),
            next_due_ms=work.next_due_ms(),
        )

    def _columnar_work(
        self, plan: ColumnarPlan, part: _Partition, batches: Iterator[pa.RecordBatch], to_arrow: RowsToArrow
    ) -> _Work:
        moments = plan.moments(self.batch.time)
        columnar = ColumnarCalls(
            plan, self.key_schema, self.states, part.key_groups, moments, self.batch.settings.preemptive_bytes
        )
        outputs = columnar.run(batches, part.table, part.writer)
        fit = (with_types(output, to_arrow.names, to_arrow.types) for output in outputs)
        return _Work(
            columnar, fit, lambda: columnar.late_rows, lambda: columnar.keys_seen, lambda: columnar.next_end_ms
        )

    def _row_work(
        self,
        processor: StatefulProcessor,
        part: _Partition,
        batches: Iterator[pa.RecordBatch],
        on_time: LateRowFilter,
        to_arrow: RowsToArrow,
    ) -> _Work:
        table, writer = part.table, part.writer
        time = self.batch.time if self.time_mode is not TimeMode.NONE else None
        reads = CountedReads(table.get)
        get, scan = hide(reads, table.scan, self.deleted)
        timestamp_ms = 0 if time is None else time.timestamp_ms
        parts_from = _SECOND_PASS_PARTS if self.batch.is_second_pass else 0
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
        return _Work(grouped, run(), lambda: on_time.late_rows, lambda: reads.count, lambda: upcoming.ms)

    def _marker(self, to_arrow: RowsToArrow, text: str) -> pa.RecordBatch:
        return self._batch([pa.nulls(1, kind) for kind in to_arrow.types], pa.array([text], pa.string()), to_arrow)

    def _batch(self, columns: list[pa.Array], markers: pa.Array, to_arrow: RowsToArrow) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([*columns, markers], [*to_arrow.names, MARKER_COLUMN])


class _Partition(NamedTuple):
    """An attempt's open partition: its table at the base, and the writer of its changes."""

    number: int
    attempt: int
    key_groups: KeyGroupRange
    table: StateTable
    writer: LogWriter
    materialized: dict[str, Any] | None


class _Work(NamedTuple):
    """A partition's work: its input with counters, its lazy output, and figures that are valid once that is read."""

    input: GroupedRows | GroupedFrames | ColumnarCalls
    outputs: Iterator[list[pa.Array]]
    late_rows: Callable[[], int]
    state_reads: Callable[[], int]
    next_due_ms: Callable[[], int | None]
