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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain

from pyspark.sql import DataFrame
from pyspark.sql.streaming import StreamingQuery

from backend_client.batch_time import BatchTime
from backend_client.progress import BatchProgress
from backend_client.service.client import ServiceClient
from backend_client.service.job_session import JobSession, connect
from backend_client.service.keep_awake import kept_awake
from backend_client.spark.batch import BatchContext
from backend_client.spark.driver.batch_times import BatchTimes
from backend_client.spark.driver.closing import second_pass
from backend_client.spark.driver.closings import Closings
from backend_client.spark.driver.host_links import HostLinks
from backend_client.spark.driver.passes import BatchTry, Passes
from backend_client.spark.driver.placement import slots_placer
from backend_client.spark.driver.receipts import progress_of
from backend_client.spark.driver.repeating import ending_as_errors, helps_to_repeat
from backend_client.spark.failover.failover import BatchMustWaitError, Failover
from backend_client.spark.failover.host_watch import watch_of
from backend_client.spark.failover.operator_jobs import OperatorJobs
from backend_client.spark.failover.rehearsal import rehearse
from backend_client.spark.failover.restoring import Restoring
from backend_client.spark.output.end_of_query import await_end
from backend_client.spark.output.outputs import LostOutputError, Output, OutputPlan
from backend_client.spark.output.spark_sinks import BatchIds
from backend_client.spark.places.lost_executors import LostExecutors
from backend_client.spark.places.newcomers import Newcomers
from backend_client.spark.places.pinning import hosts_of
from backend_client.spark.places.table_preparation import TablePreparer
from backend_client.spark.private.interruption import interruption
from backend_client.spark.private.py4j_lookups import keep_lookups
from backend_client.spark.private.worker_error import FailedTaskError
from backend_client.spark.query import Query
from backend_client.spark.scaling.autoscaler import Autoscaler
from backend_client.spark.scaling.rescaling import Rescaling
from backend_client.spark.shipping import Shipments
from backend_client.spark.standby.standby import Standby
from backend_client.spark.start.checks import StartOperators, check_commits, check_names, check_start, is_done
from backend_client.spark.start.fork_start import find_or_fork, follow
from backend_client.spark.start.rewriting import check_rewriting, rewrite_tables
from backend_client.spark.start.spark_checkpoint import CheckpointLog
from backend_client.spark.stateless_steps import apply_steps, check_shippable, shipped_steps
from dstl_service.wire import CompleteRequest
from storage.errors import DstlError, LostChangesError, UnavailableError

logger = logging.getLogger("backend_client")

Report = Callable[[BatchProgress], None]


class BatchRunner:
    """The function that Spark calls for every batch."""

    passes_type = Passes

    def __init__(
        self,
        query: Query,
        output: OutputPlan,
        log: CheckpointLog,
        report: Report,
        client: ServiceClient,
        session: JobSession,
        start: StartOperators,
        shipments: Shipments,
    ) -> None:
        operators = tuple(
            replace(operator, name=info.name, steps=shipped_steps(operator.steps, shipments))
            for operator, info in zip(query.operators, start.infos, strict=True)
        )
        self._final_steps = shipped_steps(query.steps, shipments)
        self._shipments = shipments
        self._spark = query.spark
        self._log = log
        self._client = client
        self._session = session
        self._settings = query.settings
        self._report = report
        self._infos = start.infos
        self._removed = start.removed
        self._times = BatchTimes(query.spark, log.query_id, operators)
        self._hosts = hosts_of(query.spark, query.settings)
        has_standbys = bool(query.settings.standby_replicas)
        self._standby = Standby(session, query.settings, self._hosts if has_standbys else None)
        prepare = TablePreparer(query.spark, session, query.settings, self._hosts)
        pin = self._hosts.pin if self._hosts else None
        self._newcomers = Newcomers(None if has_standbys else self._hosts, prepare.prepare_takeover)
        self._failover = Failover(query.settings, operators, session.max_parallelism, Restoring(prepare.prepare))
        self._lost_executors = LostExecutors.of(query.spark, self._hosts)
        jobs = OperatorJobs(query.spark.sparkContext.cancelJobGroup)
        self._links = HostLinks(query.spark, session, query.settings, watch_of(query.spark, query.settings, jobs))
        self.rescaling = Rescaling(start.infos, session.max_parallelism, prepare)
        self._autoscaler = Autoscaler(
            query.spark, log.query_id, query.settings, session.max_parallelism, self.rescaling
        )
        self._passes = self.passes_type(operators, session, self._times, shipments, self._standby, pin, jobs)
        place_slots = slots_placer(query.spark, self._hosts)
        next_id, given_up = log.next_id(), log.given_up()
        ids = BatchIds(given_up, next_id + given_up)
        self.output: Output = output.open(query.settings, session, shipments, place_slots, ids)
        self._closings = Closings(self._times, log, is_seen_early=self.output.is_seen_early)
        check_names([*start.infos, *self.output.operators, *start.removed])

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
        keep_lookups(query.spark)
        client = connect(settings)
        shipments = Shipments(query.spark.sparkContext)
        try:
            check_shippable(query, shipments)
            committed = log.committed()
            known = find_or_fork(client, settings)
            if known is not None:  # a refused start must leave the running query alone
                check_start(query, log, known.latest, known.max_parallelism)
                check_commits(log, committed, known.latest, settings)
                check_rewriting(known.latest)
            output.check(settings, known, shipments)
            session = JobSession.open(client, settings)
            rewrite_tables(query.spark, session, settings)
            start = check_start(query, log, session.latest, session.max_parallelism)
            follow(query.spark, log, session.latest, settings)
            return cls(query, output, log, report, client, session, start, shipments)
        except BaseException:
            shipments.close()
            client.close()
            raise

    def close(self) -> None:
        """Release the query's resources on driver and executors, and close the connection to the coordinator."""
        self.rescaling.close()
        self._newcomers.close()
        self._lost_executors.close()
        self._links.close()
        self._failover.close()
        self.output.close()
        self._shipments.close()
        self._client.close()

    def close_behind(self, query: StreamingQuery) -> None:
        """Close when the query has ended, however it ends."""

        def wait() -> None:
            await_end(query, self._stop_waiting)
            with suppress(DstlError):  # `stop` raises it, too; the next start publishes the rest
                self.output.drain()
            with suppress(Exception):  # a stopped Spark has released everything
                self.close()

        threading.Thread(target=wait, name="dstl-end-of-query", daemon=True).start()

    def _stop_waiting(self) -> None:
        self.output.stop_waiting()
        self._failover.close()

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Execute one batch; returns only when its checkpoint exists."""
        if is_done(self._log, self._session.latest, batch_id, self._settings):
            logger.info("batch %d is already in checkpoint %s", batch_id, self._session.base)
            # Spark's own stateful operators and its watermark tracker must see the rows; otherwise both would lag
            # behind those of an undisturbed run.
            frame.write.format("noop").mode("overwrite").save()
            return
        self._infos = self.rescaling.taken(self._infos)
        self.output.before_batch(self._infos[-1])
        tries, must_wait = 1, False
        while True:
            try:
                with (
                    kept_awake(self._settings.sidecar_idle_exit_s, partial(connect, self._settings, 0.0)),
                    self._lost_executors.watched(),
                    ending_as_errors(),
                ):
                    progress = self._execute(frame, batch_id, tries, must_wait=must_wait)
            except LostOutputError:
                raise  # the checkpoint exists
            except BatchMustWaitError as error:
                logger.warning("batch %d waits for the tables that are being restored: %s", batch_id, error)
                must_wait = True
            except Exception as error:
                if tries >= self._settings.batch_tries_max or not helps_to_repeat(error):
                    self._abort(batch_id)
                    short = interruption(error)
                    if short is not None:
                        raise short from None
                    if isinstance(error, FailedTaskError):
                        raise error.with_traceback(None) from None  # nothing on the driver is to blame
                    raise
                logger.warning("batch %d is executed again (try %d failed): %s", batch_id, tries, error)
                tries += 1
            else:
                self._session.report(progress)
                self._report(progress)
                self._autoscaler.after(progress)
                rehearse(self._spark)
                self.rescaling.batch_ended()
                return

    def _execute(self, frame: DataFrame, batch_id: int, tries: int, *, must_wait: bool) -> BatchProgress:
        session, offsets = self._session, self._log.planned(batch_id)
        begun = session.begin(batch_id)
        self.rescaling.follow(begun.parallelism, begun.requests)
        at = self._times.time(offsets, session.latest)
        self._newcomers.look(self._infos)
        failover = self._failover.begin(batch_id, session.latest, self._infos, at, must_wait=must_wait)
        context = self._context(batch_id, begun.service_id, at)
        work = BatchTry(context, offsets, self._infos, failover)
        started = time.perf_counter()
        try:
            frame, receipts = self._passes.first(frame, work)
            closed_ms, seen_ms = self._closings.closed_ms(batch_id, session.base, context.time, session.epoch)
            if self._closings.needs_owner:
                session.check_owned(None)
            closing = second_pass(context.time, seen_ms, receipts)
            if closing is not None:
                more, others = self._passes.second(work, closing)
                frame, receipts = frame.unionAll(more), receipts + others
            failover.close(seen_ms)
            frame = apply_steps(self._final_steps, frame, offsets)
            refs = [*(ref for receipt in receipts for ref in receipt.refs), *failover.refs]
            refs += self.output.log(frame, context)
            infos = [*self._infos, *failover.companions, *self.output.operators, *self._removed]
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
        self._newcomers.ran(self._infos, receipts)
        progress = progress_of(context, receipts, response, (started, computed, called, done), tries)
        waiting, lost = failover.rows_waiting, failover.rows_lost
        progress = replace(progress, unpublished=unpublished, rows_waiting=waiting, rows_lost=lost)
        return self._standby.heard(receipts, progress)

    def _context(self, batch_id: int, coordinator_id: str, at: BatchTime | None) -> BatchContext:
        session = self._session
        return BatchContext(
            settings=self._settings,
            job_uid=session.job_uid,
            epoch=session.epoch,
            checkpoint_id=batch_id,
            base=session.base,
            coordinator_id=coordinator_id,
            links=self._links.address(coordinator_id),
            standby=self._standby.plan(self._infos),
            time=at,
        )

    def _flush(self, batch_id: int, plan: CompleteRequest) -> None:
        """Start the upload of the operators' changes, if the coordinator is up; `complete` waits for it anyway."""
        try:
            self._session.flush(batch_id, plan)
        except UnavailableError as error:
            logger.warning("the upload of batch %d could not start early, it starts at complete: %s", batch_id, error)

    def _abort(self, batch_id: int) -> None:
        try:
            self._session.abort(batch_id)
        except DstlError as error:  # must not hide the batch's own error
            logger.warning("checkpoint %d could not be aborted: %s", batch_id, error)
