"""
One query on the driver: runs every batch through the operators and turns it into a checkpoint.

Life of a batch: begin - each operator's job, whose result are the receipts of the accepted attempts - once more for
what the rows have made due (`closing`) - start of the upload - the user's function, meanwhile - complete: the manifest,
and with it the checkpoint, exists - only then does ``foreachBatch`` return and Spark commit.

An operator's output is computed once and kept for all who read it. A block that was lost is an error, and every read
checks the marker rows: output of another attempt than the one whose receipt was taken (a speculative copy's) is
refused. The whole batch is executed again then (I18).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.streaming import StreamingQuery

from backend_client.batch_time import BatchTime, TimeMode
from backend_client.progress import BatchProgress
from backend_client.service.job_session import JobSession, connect
from backend_client.service.keep_awake import kept_awake
from backend_client.spark.api.plan import Operator, Step
from backend_client.spark.driver.closing import SecondPass, second_pass
from backend_client.spark.driver.kept_output import LOST_BLOCK, KeptOutput
from backend_client.spark.driver.pinning import Anchors
from backend_client.spark.driver.session_settings import set_for
from backend_client.spark.driver.sinks import BatchFunction, ForeachRows
from backend_client.spark.driver.spark_checkpoint import CheckpointLog
from backend_client.spark.driver.start_checks import check_plan, check_start
from backend_client.spark.private.batch_clock import at_batch_time
from backend_client.spark.private.session import setting
from backend_client.spark.private.stream_plan import StreamPlan
from backend_client.spark.shipping import Shipments
from backend_client.spark.source_watermark import behind, time_behind
from backend_client.spark.task.columnar_calls import ColumnarPlan
from backend_client.spark.task.pandas_settings import PandasSettings
from backend_client.spark.task.task import MARKER_COLUMN, BatchContext, OperatorTask, Receipt
from backend_client.state.declared_states import ids_to_delete
from dstl_service.wire import ChangeSetRef, CompleteRequest, CompleteResponse, OperatorInfo
from storage.errors import (
    ConflictError,
    DstlError,
    InternalError,
    LostChangesError,
    UnavailableError,
)

if TYPE_CHECKING:
    from backend_client.service.client import ServiceClient
    from backend_client.spark.api.plan import StatefulDataFrame

logger = logging.getLogger("backend_client")

_WITHOUT_DATA = "spark.sql.streaming.noDataMicroBatches.enabled"
STALE_OUTPUT = "DSTL_STALE_OUTPUT"


@dataclass(frozen=True, slots=True)
class _Work:
    """One try at a batch: its context, Spark's offsets entry, and the outputs that are kept until it ends."""

    context: BatchContext
    offsets: str
    kept: list[KeptOutput] = field(default_factory=list)


class BatchRunner:
    """The function that Spark calls for every batch."""

    def __init__(
        self,
        frame: StatefulDataFrame,
        function: BatchFunction | ForeachRows,
        log: CheckpointLog,
        client: ServiceClient,
        session: JobSession,
        infos: list[OperatorInfo],
        shipments: Shipments,
    ) -> None:
        self._operators = tuple(
            replace(operator, steps=_shipped(operator.steps, shipments)) for operator in frame.operators
        )
        self._final_steps = _shipped(frame.steps, shipments)
        self._function = function.shipped(shipments) if isinstance(function, ForeachRows) else function
        self._shipments = shipments
        self._log = log
        self._client = client
        self._session = session
        self._settings = frame.backend.settings
        self._report = frame.backend.report
        self._infos = infos
        self._plan = StreamPlan(frame.source.sparkSession, log.query_id)
        self._closes = setting(frame.source.sparkSession, _WITHOUT_DATA, "true").lower() == "true"
        self._anchors = Anchors.of(frame.source.sparkSession)
        self._anchors.take()

    @classmethod
    def open(cls, frame: StatefulDataFrame, function: BatchFunction | ForeachRows, log: CheckpointLog) -> BatchRunner:
        """
        Take the job over, if the query fits what is stored of it.

        Raises:
            InvalidInputError: The Spark checkpoint, a key schema or a state schema is not that of the stored state, or
                what is to run in tasks cannot be sent to them.
            ConflictError: The Spark checkpoint and the state went apart.
        """
        settings = frame.backend.settings
        client = connect(settings)
        shipments = Shipments(frame.source.sparkSession.sparkContext)
        try:
            _pack(frame, function, shipments)
            known = JobSession.look(client, settings)
            if known is not None:  # a start that is refused must leave the query that runs alone
                check_start(frame, log, known.latest, known.max_parallelism)
            session = JobSession.open(client, settings)
            infos = check_start(frame, log, session.latest, session.max_parallelism)
            if session.latest is not None and session.latest.rewound_from is not None:
                latest = session.latest
                log.set_back(latest.ref.id, latest.offsets, latest.ref.uid, latest.closed_ms)
            return cls(frame, function, log, client, session, infos, shipments)
        except BaseException:
            shipments.close()
            client.close()
            raise

    def close(self) -> None:
        """Give back what the query has on driver and executors, and close the connection to the coordinator."""
        self._shipments.close()
        self._anchors.release()
        self._client.close()

    def close_behind(self, query: StreamingQuery) -> None:
        """Close when the query has ended, however it ends."""

        def wait() -> None:
            with suppress(Exception):  # the query's own, which is reported to who waits for it, or no Spark any more
                query.awaitTermination()
            with suppress(Exception):  # a Spark that has stopped keeps nothing
                self.close()

        threading.Thread(target=wait, name="dstl-end-of-query", daemon=True).start()

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Execute one batch; return when its checkpoint exists."""
        if self._is_done(batch_id):
            logger.info("batch %d is in checkpoint %s already", batch_id, self._session.base)
            # Spark's own stateful operators have to see the rows, and the tracker of its watermark, too: both would be
            # behind those of an undisturbed run.
            frame.write.format("noop").mode("overwrite").save()
            return
        tries = 1
        while True:
            try:
                with kept_awake(self._settings.sidecar_idle_exit_s, partial(connect, self._settings, 0.0)):
                    progress = self._execute(frame, batch_id, tries)
            except Exception as error:
                if tries >= self._settings.batch_tries_max or not _helps_to_repeat(error):
                    self._abort(batch_id)
                    raise
                logger.warning("batch %d is executed again (try %d failed): %s", batch_id, tries, error)
                tries += 1
            else:
                self._session.tell(progress)
                self._report(progress)
                return

    def _execute(self, frame: DataFrame, batch_id: int, tries: int) -> BatchProgress:
        session, offsets = self._session, self._log.offsets(batch_id) or ""
        context = BatchContext(
            settings=self._settings,
            job_uid=session.job_uid,
            epoch=session.epoch,
            checkpoint_id=batch_id,
            base=session.base,
            coordinator_id=session.begin(batch_id),
            time=self._time(offsets),
        )
        work = _Work(context, offsets)
        inputs: list[DataFrame] = []
        started = time.perf_counter()
        try:
            frame, receipts = self._first_pass(frame, work, inputs)
            closed_ms, seen_ms = self._closed_ms(context.time)
            closing = second_pass(context.time, seen_ms, receipts)
            if closing is not None:
                more, others = self._second_pass(inputs, work, closing)
                frame, receipts = frame.unionAll(more), receipts + others
            refs = [ref for receipt in receipts for ref in receipt.refs]
            snapshots = [receipt.materialized for receipt in receipts if receipt.materialized is not None]
            plan = session.plan(refs, self._infos, self._log.query_id() or "", offsets, snapshots, closed_ms)
            self._flush(batch_id, plan)
            computed = time.perf_counter()
            self._function(_apply(self._final_steps, frame, offsets), batch_id)
            called = time.perf_counter()
            response = session.complete(batch_id, plan)
            done = time.perf_counter()
        finally:
            for output in work.kept:
                output.release()
        return _progress(context, receipts, response, (started, computed, called, done), tries)

    def _first_pass(self, frame: DataFrame, work: _Work, inputs: list[DataFrame]) -> tuple[DataFrame, list[Receipt]]:
        """Run the rows through all operators; note what each one's steps began with."""
        receipts: list[Receipt] = []
        for operator, info in zip(self._operators, self._infos, strict=True):
            inputs.append(frame)
            frame, accepted = self._computed(operator, info, frame, work)
            receipts += accepted
        return frame, receipts

    def _second_pass(
        self, inputs: Sequence[DataFrame], work: _Work, closing: SecondPass
    ) -> tuple[DataFrame, list[Receipt]]:
        """Run those operators again in which something is due, and those behind them."""
        work = replace(work, context=replace(work.context, time=closing.time, is_second_pass=True))
        receipts: list[Receipt] = []
        frame: DataFrame | None = None
        for operator, info, earlier in zip(self._operators, self._infos, inputs, strict=True):
            if frame is None and operator.name not in closing.due:
                continue
            if frame is None:
                spark = earlier.sparkSession
                frame = spark.createDataFrame(spark.sparkContext.emptyRDD(), earlier.schema)
            frame, accepted = self._computed(operator, info, frame, work, closing)
            receipts += accepted
        assert frame is not None
        return frame, receipts

    def _computed(
        self,
        operator: Operator,
        info: OperatorInfo,
        frame: DataFrame,
        work: _Work,
        closing: SecondPass | None = None,
    ) -> tuple[DataFrame, list[Receipt]]:
        """Run an operator, and keep its output; return that and its receipts."""
        earlier = {} if closing is None else closing.earlier[operator.name]
        with set_for(frame.sparkSession, operator):
            rows = _apply(operator.steps, frame, work.offsets)
            output = KeptOutput(self._run_operator(operator, info, rows, work.context, earlier))
            work.kept.append(output)
            accepted = _collect_receipts(output.frame, info)
            return _checked(output.frame, accepted), accepted

    def _closed_ms(self, time: BatchTime | None) -> tuple[int | None, int | None]:
        """
        Return the watermark at which the batch that was read is closed, and what it is behind the query's input.

        Both are None for a batch that is left open: where Spark runs one without data, which operators of its own ask
        for, and where it is told to run none.
        """
        if time is None or not self._closes:
            return None, None
        tree, next_ms = self._plan.tree(), self._plan.next_watermark_ms()
        if tree is None or next_ms is None:
            return None, None
        closed_ms = max(next_ms, time.watermark_ms)
        if not tree.is_stateful:
            return closed_ms, closed_ms
        return (None, None) if tree.asks_at(next_ms) else (closed_ms, behind(tree, closed_ms))

    def _flush(self, batch_id: int, plan: CompleteRequest) -> None:
        """Start the upload of what the operators have sent, if the coordinator can; `complete` waits for it anyway."""
        try:
            self._session.flush(batch_id, plan)
        except UnavailableError as error:
            logger.warning("the upload of batch %d begins with its checkpoint: %s", batch_id, error)

    def _run_operator(
        self,
        operator: Operator,
        info: OperatorInfo,
        frame: DataFrame,
        context: BatchContext,
        earlier: Mapping[int, Sequence[ChangeSetRef]],
    ) -> DataFrame:
        max_parallelism = self._session.max_parallelism
        latest = self._session.latest
        stored = {known.name: known.states for known in latest.operators} if latest else {}
        is_new = operator.name not in stored and not context.is_second_pass
        initial = operator.initial if is_new else None
        row_names, initial_rows = tuple(frame.columns), None
        if initial is not None:
            initial_rows = initial.rows(len(operator.key_columns), row_names)
            operator, frame = initial.joined(operator, frame)
        task = OperatorTask(
            operator=operator.name,
            processor=self._shipments.parcel(operator.processor),
            states=info.states,
            key_schema=info.key_schema,
            key_places=operator.key_places,
            row_names=row_names,
            output=operator.output_schema,
            parallelism=info.parallelism,
            max_parallelism=max_parallelism,
            batch=context,
            pandas=PandasSettings.of(frame.sparkSession) if operator.pandas else None,
            time_mode=operator.time_mode,
            fires_first=self._fires_first(operator, context),
            initial=initial_rows,
            # The first pass deletes; the second one sees that.
            deleted=()
            if context.is_second_pass
            else ids_to_delete(stored.get(operator.name, {}), info.states, operator.begin_anew),
            earlier=earlier,
        )
        pin = self._anchors.pin if self._anchors.are_of_use else None
        placed = operator.place(frame, info.parallelism, max_parallelism, pin, _late_until_ms(operator, context))
        return placed.mapInArrow(task.__call__, task.output_schema())

    def _time(self, offsets: str) -> BatchTime | None:
        """Return a batch's time, which Spark wrote into its offsets entry; None if no operator asks for it."""
        if all(
            operator.time_mode is TimeMode.NONE and not isinstance(operator.processor, ColumnarPlan)
            for operator in self._operators
        ):
            return None
        latest = self._session.latest
        closed_ms = latest.closed_ms if latest else None
        time = BatchTime.read(offsets, latest.offsets if latest else None, closed_ms)
        tree = self._plan.tree()
        return time if tree is None or not tree.is_stateful else time_behind(tree, time)

    def _fires_first(self, operator: Operator, context: BatchContext) -> bool:
        """
        Say whether timers that are due fire before the rows.

        By event time they never do: the batch before was closed, or else Spark has run none between it and this one.
        By processing time there are batches without data all the time, which are not run here.
        """
        return operator.time_mode is TimeMode.PROCESSING and self._closes and not context.is_second_pass

    def _is_done(self, batch_id: int) -> bool:
        """
        Compare Spark's batch with the newest checkpoint.

        Raises:
            ConflictError: They do not fit: one of the two was set back without the other.
        """
        latest = self._session.latest
        expected = latest.ref.id + 1 if latest else 0
        if latest is not None and batch_id == latest.ref.id:
            check_plan(self._log, latest, self._settings)
            return True
        if batch_id != expected:
            raise ConflictError(
                f"Spark executes batch {batch_id}, but the state of job {self._settings.job!r} stands "
                + (f"behind batch {latest.ref.id}" if latest else "before batch 0")
                + f". The Spark checkpoint {self._log.location} and the state do not belong together, or one of them "
                "was deleted or set back: restore the one that is missing, or start with a new checkpointLocation "
                "and a new job name"
            )
        return False

    def _abort(self, batch_id: int) -> None:
        try:
            self._session.abort(batch_id)
        except DstlError as error:  # the error that led here matters more
            logger.warning("checkpoint %d could not be aborted: %s", batch_id, error)


def _apply(steps: Sequence[Step], frame: DataFrame, offsets: str) -> DataFrame:
    for step in steps:
        frame = step(frame)
    return at_batch_time(frame, offsets) if steps else frame


def _pack(frame: StatefulDataFrame, function: BatchFunction | ForeachRows, shipments: Shipments) -> None:
    """Pack what is sent to tasks, so that what cannot be is found before the job is taken over."""
    for operator in frame.operators:
        shipments.parcel(operator.processor)
        _shipped(operator.steps, shipments)
    _shipped(frame.steps, shipments)
    if isinstance(function, ForeachRows):
        function.shipped(shipments)


def _shipped(steps: Sequence[Step], shipments: Shipments) -> tuple[Step, ...]:
    return tuple(step.with_function(shipments.function) for step in steps)


def _late_until_ms(operator: Operator, context: BatchContext) -> int | None:
    """
    Return up to which moment an operator's rows are late; None where they never are.

    As on Spark it is the watermark of the batch before: the batch's own where that was closed at it.
    """
    if context.time is None or operator.event_time is None:
        return None
    return context.time.previous_watermark_ms


def _collect_receipts(output: DataFrame, info: OperatorInfo) -> list[Receipt]:
    """Compute an operator's output, keep it, and return one receipt per partition."""
    rows = output.where(f"{MARKER_COLUMN} is not null").select(MARKER_COLUMN).collect()
    texts = [text for row in rows if (text := row[0].partition(" ")[2])]
    receipts = sorted(map(Receipt.from_json, texts), key=lambda receipt: receipt.partition)
    if [receipt.partition for receipt in receipts] != list(range(info.parallelism)):
        raise InternalError(
            f"operator {info.name!r} ran with partitions {[receipt.partition for receipt in receipts]} instead of "
            f"0..{info.parallelism - 1}"
        )
    return receipts


def _checked(output: DataFrame, receipts: Sequence[Receipt]) -> DataFrame:
    """
    Return the output's rows without the marker rows, failing where a marker is not of an accepted attempt.

    The condition asks for the partition's id to be non-deterministic in Spark's eyes: it must neither be merged with a
    user's filter nor moved behind it, or a marker could be dropped before it is checked. The attempts are one array,
    for single numbers would be part of the code that Spark generates and compiles: each batch anew.
    """
    attempts = ", ".join(f"'{receipt.attempt}'" for receipt in receipts)
    attempt = f"substring_index({MARKER_COLUMN}, ' ', 1)"
    condition = (
        f"case when {MARKER_COLUMN} is null then true "
        f"when array_contains(array({attempts}), {attempt}) and spark_partition_id() >= 0 then false "
        f"else raise_error(concat('{STALE_OUTPUT} of attempt ', {attempt})) end"
    )
    return output.where(condition).drop(MARKER_COLUMN)


def _helps_to_repeat(error: Exception) -> bool:
    if isinstance(error, LostChangesError):
        return True
    if not isinstance(error, PySparkException) and "Py4J" not in type(error).__name__:
        return False
    text = str(error)
    # A task that lost its sidecar in the middle of something finds another one when it runs again.
    signs = (STALE_OUTPUT, LOST_BLOCK, LostChangesError.__name__, UnavailableError.__name__)
    return any(sign in text for sign in signs)


def _progress(
    context: BatchContext,
    receipts: Sequence[Receipt],
    response: CompleteResponse,
    marks: tuple[float, float, float, float],
    tries: int,
) -> BatchProgress:
    started, computed, called, done = marks
    return BatchProgress(
        job=context.settings.job,
        batch_id=context.checkpoint_id,
        rows=sum(receipt.rows for receipt in receipts),
        keys=sum(receipt.keys for receipt in receipts),
        changes=sum(receipt.changes for receipt in receipts),
        state_ms=(computed - started) * 1000,
        function_ms=(called - computed) * 1000,
        checkpoint_ms=(done - called) * 1000,
        bytes_written=response.bytes_written,
        objects_written=response.objects_written,
        tries=tries,
        state_reads=sum(receipt.state_reads for receipt in receipts),
        log_bytes=sum(ref.size_bytes for receipt in receipts for ref in receipt.refs),
        table_bytes=sum(receipt.table_bytes for receipt in receipts),
        upload_ms=response.persist_ms,
        manifest_ms=response.manifest_ms,
        late_rows=sum(receipt.late_rows for receipt in receipts),
        watermark_ms=None if context.time is None else context.time.watermark_ms,
    )
