"""
One query on the driver: runs every batch through the operators and turns it into a checkpoint.

Life of a batch: begin - each operator's job, which returns the receipts of the accepted attempts - a second pass for
what the rows have made due (`closing`) - start of the upload - the user's function, meanwhile - complete: the manifest
exists, and with it the checkpoint - only then does ``foreachBatch`` return and Spark commit.

If output is lost, or comes from another attempt than the one whose receipt was taken (`receipts`), the whole batch is
executed again (I18).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from pyspark.sql import DataFrame
from pyspark.sql.streaming import StreamingQuery

from backend_client.progress import BatchProgress
from backend_client.service.client import ServiceClient
from backend_client.service.job_session import JobSession, connect
from backend_client.service.keep_awake import kept_awake
from backend_client.spark.batch import BatchContext, Receipt
from backend_client.spark.driver.batch_times import BatchTimes, late_until_ms
from backend_client.spark.driver.closing import SecondPass, second_pass
from backend_client.spark.driver.host_links import HostLinks
from backend_client.spark.driver.initial_state import initial_rows, joined
from backend_client.spark.driver.kept_output import KeptOutput
from backend_client.spark.driver.pinning import Anchors, warn_of_failover
from backend_client.spark.driver.placement import Pin, key_places, place, slots_placer
from backend_client.spark.driver.receipts import checked, collect_receipts, progress_of
from backend_client.spark.driver.repeating import helps_to_repeat
from backend_client.spark.driver.rescaling import Rescaling
from backend_client.spark.driver.stateless_steps import apply_steps, check_shippable, shipped_steps
from backend_client.spark.driver.table_preparation import TablePreparer
from backend_client.spark.failover.failover import BatchFailover, BatchMustWaitError, Failover
from backend_client.spark.failover.restoring import Restoring
from backend_client.spark.output.outputs import LostOutputError, Output, OutputPlan
from backend_client.spark.own_session import no_rows
from backend_client.spark.query import Operator, Query
from backend_client.spark.session_settings import set_for
from backend_client.spark.shipping import Shipments
from backend_client.spark.standby.standby import Standby
from backend_client.spark.start.checks import check_start, is_done
from backend_client.spark.start.fork_start import find_or_fork, follow
from backend_client.spark.start.spark_checkpoint import CheckpointLog
from backend_client.spark.task.pandas_settings import PandasSettings
from backend_client.spark.task.task import OperatorTask
from backend_client.state.declared_states import ids_to_delete
from dstl_service.wire import ChangeSetRef, CompleteRequest, OperatorInfo
from storage.errors import DstlError, LostChangesError, UnavailableError

logger = logging.getLogger("backend_client")

Report = Callable[[BatchProgress], None]


@dataclass(frozen=True, slots=True)
class _Work:
    """One try of a batch: its context, Spark's offsets entry, and the outputs that are kept until it ends."""

    context: BatchContext
    offsets: str
    failover: BatchFailover
    kept: list[KeptOutput] = field(default_factory=list)


class BatchRunner:
    """The function that Spark calls for every batch."""

    def __init__(
        self,
        query: Query,
        output: OutputPlan,
        log: CheckpointLog,
        report: Report,
        client: ServiceClient,
        session: JobSession,
        infos: list[OperatorInfo],
        shipments: Shipments,
    ) -> None:
        self._operators = tuple(
            replace(operator, steps=shipped_steps(operator.steps, shipments)) for operator in query.operators
        )
        self._final_steps = shipped_steps(query.steps, shipments)
        self._shipments = shipments
        self._log = log
        self._client = client
        self._session = session
        self._settings = query.settings
        self._report = report
        self._infos = infos
        self._times = BatchTimes(query.spark, log.query_id, self._operators)
        self._anchors = Anchors.of(query.spark, query.settings.standby_replicas)
        self._anchors.acquire()
        self._standby = Standby(session, query.settings, self._anchors.hosts)
        prepare = TablePreparer(query.spark, session, query.settings, self._pin)
        self._failover = Failover(query.settings, self._operators, session.max_parallelism, Restoring(prepare.prepare))
        self._links = HostLinks(query.spark, session, query.settings)
        self.rescaling = Rescaling(infos, session.max_parallelism, prepare)
        place_slots = slots_placer(query.spark, self._pin)
        self.output: Output = output.open(query.settings, session, shipments, place_slots, log.given_up())

    @classmethod
    def open(cls, query: Query, output: OutputPlan, log: CheckpointLog, report: Report) -> BatchRunner:
        """
        Take the job over, if the query fits the stored state.

        Raises:
            InvalidInputError: The Spark checkpoint, a key schema or a state schema is not that of the stored state, or
                a processor or function cannot be sent to tasks.
            ConflictError: The Spark checkpoint and the state have diverged.
        """
        settings = query.settings
        client = connect(settings)
        shipments = Shipments(query.spark.sparkContext)
        try:
            check_shippable(query, shipments)
            warn_of_failover(query.spark, settings.failover)
            known = find_or_fork(client, settings)
            if known is not None:  # a refused start must leave the running query alone
                check_start(query, log, known.latest, known.max_parallelism)
            output.check(settings, known, shipments)
            session = JobSession.open(client, settings)
            infos = check_start(query, log, session.latest, session.max_parallelism)
            follow(query.spark, log, session.latest, settings)
            return cls(query, output, log, report, client, session, infos, shipments)
        except BaseException:
            shipments.close()
            client.close()
            raise

    def close(self) -> None:
        """Release the query's resources on driver and executors, and close the connection to the coordinator."""
        self.rescaling.close()
        self._links.close()
        self._failover.close()
        self.output.close()
        self._shipments.close()
        self._anchors.release()
        self._client.close()

    def close_behind(self, query: StreamingQuery) -> None:
        """Close when the query has ended, however it ends."""

        def wait() -> None:
            with suppress(Exception):  # the query's own error, which its other waiters get, or a stopped Spark
                query.awaitTermination()
            with suppress(DstlError):  # `stop` raises it, too; the next start publishes the rest
                self.output.drain()
            with suppress(Exception):  # a stopped Spark has released everything
                self.close()

        threading.Thread(target=wait, name="dstl-end-of-query", daemon=True).start()

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Execute one batch; returns only when its checkpoint exists."""
        if is_done(self._log, self._session.latest, batch_id, self._settings):
            logger.info("batch %d is already in checkpoint %s", batch_id, self._session.base)
            # Spark's own stateful operators and its watermark tracker must see the rows; otherwise both would lag
            # behind those of an undisturbed run.
            frame.write.format("noop").mode("overwrite").save()
            return
        self._infos = self.rescaling.taken(self._infos)
        self.output.before_batch(self._infos[-1].parallelism)
        tries, must_wait = 1, False
        while True:
            try:
                with kept_awake(self._settings.sidecar_idle_exit_s, partial(connect, self._settings, 0.0)):
                    progress = self._execute(frame, batch_id, tries, must_wait=must_wait)
            except LostOutputError:
                raise  # the checkpoint exists
            except BatchMustWaitError as error:
                logger.warning("batch %d waits for the tables that are being restored: %s", batch_id, error)
                must_wait = True
            except Exception as error:
                if tries >= self._settings.batch_tries_max or not helps_to_repeat(error):
                    self._abort(batch_id)
                    raise
                logger.warning("batch %d is executed again (try %d failed): %s", batch_id, tries, error)
                tries += 1
            else:
                self._session.report(progress)
                self._report(progress)
                return

    def _execute(self, frame: DataFrame, batch_id: int, tries: int, *, must_wait: bool) -> BatchProgress:
        session, offsets = self._session, self._log.offsets(batch_id) or ""
        begun = session.begin(batch_id)
        self.rescaling.follow(begun.parallelism)
        at = self._times.time(offsets, session.latest)
        failover = self._failover.begin(batch_id, session.latest, self._infos, at, must_wait=must_wait)
        context = BatchContext(
            settings=self._settings,
            job_uid=session.job_uid,
            epoch=session.epoch,
            checkpoint_id=batch_id,
            base=session.base,
            coordinator_id=begun.service_id,
            links=self._links.address(begun.service_id),
            standby=self._standby.plan(self._infos),
            time=at,
        )
        work = _Work(context, offsets, failover)
        inputs: list[DataFrame] = []
        started = time.perf_counter()
        try:
            frame, receipts = self._first_pass(frame, work, inputs)
            closed_ms, seen_ms = self._times.closed_ms(context.time)
            closing = second_pass(context.time, seen_ms, receipts)
            if closing is not None:
                more, others = self._second_pass(inputs, work, closing)
                frame, receipts = frame.unionAll(more), receipts + others
            failover.close(seen_ms)
            frame = apply_steps(self._final_steps, frame, offsets)
            refs = [*(ref for receipt in receipts for ref in receipt.refs), *failover.refs]
            refs += self.output.log(frame, context)
            infos = [*self._infos, *failover.companions, *self.output.operators]
            snapshots = [receipt.materialized for receipt in receipts if receipt.materialized is not None]
            plan = session.plan(refs, infos, self._log.query_id() or "", offsets, snapshots, closed_ms)
            self._flush(batch_id, plan)
            computed = time.perf_counter()
            self.output.before_checkpoint(frame, batch_id)
            for reason in chain.from_iterable(output.failed_reads() for output in work.kept):
                raise LostChangesError(f"the function went on although it could not read its batch: {reason}")
            called = time.perf_counter()
            response = session.complete(batch_id, plan)
            done = time.perf_counter()
            failover.completed()
            unpublished = self.output.unpublished
            self.output.after_checkpoint(frame, response.ref)
        finally:
            for output in work.kept:
                output.release()
        progress = progress_of(context, receipts, response, (started, computed, called, done), tries)
        waiting, lost = failover.rows_waiting, failover.rows_lost
        progress = replace(progress, unpublished=unpublished, rows_waiting=waiting, rows_lost=lost)
        return self._standby.heard(receipts, progress)

    def _first_pass(self, frame: DataFrame, work: _Work, inputs: list[DataFrame]) -> tuple[DataFrame, list[Receipt]]:
        """Run the rows through all operators; append each operator's input, before its steps, to `inputs`."""
        receipts: list[Receipt] = []
        for operator, info in zip(self._operators, self._infos, strict=True):
            inputs.append(frame)
            frame, accepted = self._computed(operator, info, frame, work)
            receipts += work.failover.took(info, accepted)
        return frame, receipts

    def _second_pass(
        self, inputs: Sequence[DataFrame], work: _Work, closing: SecondPass
    ) -> tuple[DataFrame, list[Receipt]]:
        """Run the operators in which something is due again, and all operators after them."""
        work = replace(work, context=replace(work.context, time=closing.time, is_second_pass=True))
        receipts: list[Receipt] = []
        frame: DataFrame | None = None
        for operator, info, earlier in zip(self._operators, self._infos, inputs, strict=True):
            if frame is None and operator.name not in closing.due:
                continue
            if frame is None:
                frame = no_rows(earlier)
            frame, accepted = self._computed(operator, info, frame, work, closing)
            work.failover.took_again(info, accepted)
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
        """Run an operator and keep its output; return the output and its receipts."""
        earlier = {} if closing is None else closing.earlier[operator.name]
        with set_for(frame.sparkSession, operator):
            rows = self._run_operator(operator, info, apply_steps(operator.steps, frame, work.offsets), work, earlier)
            output = KeptOutput(rows, self._standby.output_replicas)
            work.kept.append(output)
            accepted = collect_receipts(output.frame, info)
            return checked(output.frame, accepted), accepted

    def _flush(self, batch_id: int, plan: CompleteRequest) -> None:
        """Start the upload of the operators' changes, if the coordinator is up; `complete` waits for it anyway."""
        try:
            self._session.flush(batch_id, plan)
        except UnavailableError as error:
            logger.warning("the upload of batch %d could not start early, it starts at complete: %s", batch_id, error)

    def _run_operator(
        self,
        operator: Operator,
        info: OperatorInfo,
        frame: DataFrame,
        work: _Work,
        earlier: Mapping[int, Sequence[ChangeSetRef]],
    ) -> DataFrame:
        context, latest = work.context, self._session.latest
        max_parallelism = self._session.max_parallelism
        stored = {known.name: known.states for known in latest.operators} if latest else {}
        is_new = operator.name not in stored and not context.is_second_pass
        initial = operator.initial if is_new else None
        row_names, initial_of_task = tuple(frame.columns), None
        if initial is not None:
            initial_of_task = initial_rows(initial, len(operator.key_columns), row_names)
            operator, frame = joined(initial, operator, frame)
        # The first pass deletes; the second sees the deletions.
        deleted = ids_to_delete(stored.get(operator.name, {}), info.states, operator.recreated_states)
        task = OperatorTask(
            operator=operator.name,
            processor=self._shipments.parcel(operator.processor),
            states=info.states,
            key_schema=info.key_schema,
            key_places=key_places(operator),
            row_names=row_names,
            output=operator.output_schema,
            parallelism=info.parallelism,
            max_parallelism=max_parallelism,
            batch=context,
            pandas=PandasSettings.of(frame.sparkSession) if operator.pandas else None,
            time_mode=operator.time_mode,
            fires_first=self._times.fires_first(operator, context),
            initial=initial_of_task,
            deleted=() if context.is_second_pass else deleted,
            earlier=earlier,
            failover=work.failover.for_second_pass(info, context.time.watermark_ms)
            if context.is_second_pass and context.time is not None
            else work.failover.for_tasks(info, can_stall=stored.keys() >= {operator.name} and not deleted),
        )
        placed = place(operator, frame, info.parallelism, max_parallelism, self._pin, late_until_ms(operator, context))
        return placed.mapInArrow(task.__call__, task.output_schema())

    @property
    def _pin(self) -> Pin | None:
        return self._anchors.pin if self._anchors.are_of_use else None

    def _abort(self, batch_id: int) -> None:
        try:
            self._session.abort(batch_id)
        except DstlError as error:  # must not hide the batch's own error
            logger.warning("checkpoint %d could not be aborted: %s", batch_id, error)
