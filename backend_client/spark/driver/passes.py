"""
One try of a batch on Spark: its rows go through the operators, and what they have made due fires in a second pass.

Each operator is one job, whose output is kept for all its readers, and which returns the receipts of the accepted
attempts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pyspark.errors import PythonException
from pyspark.sql import DataFrame, SparkSession

from backend_client.failover.patience import TaskFailover
from backend_client.service.job_session import JobSession
from backend_client.spark.batch import BatchContext, Receipt
from backend_client.spark.combining import Combining
from backend_client.spark.driver.batch_times import BatchTimes, late_until_ms
from backend_client.spark.driver.closing import SecondPass
from backend_client.spark.driver.columnar_history import ColumnarHistory
from backend_client.spark.driver.initial_state import joined
from backend_client.spark.driver.kept_output import KeptOutput
from backend_client.spark.driver.placement import (
    Pin,
    combined_names,
    finds_combined_in_place,
    key_places,
    place,
    place_combined,
    placed_names,
)
from backend_client.spark.driver.receipts import checked, collect_receipts
from backend_client.spark.failover.failover import BatchFailover
from backend_client.spark.failover.operator_jobs import OperatorJobs
from backend_client.spark.own_session import no_rows
from backend_client.spark.private.worker_error import failed_task
from backend_client.spark.query import Operator
from backend_client.spark.session_settings import set_for
from backend_client.spark.shipping import Shipments
from backend_client.spark.standby.standby import Standby
from backend_client.spark.stateless_steps import apply_steps
from backend_client.spark.task.initial_rows import InitialRows
from backend_client.spark.task.pandas_settings import PandasSettings
from backend_client.spark.task.task import OperatorTask
from backend_client.state.declared_states import ids_to_delete
from dstl_service.wire import ChangeSetRef, OperatorInfo


@dataclass(frozen=True, slots=True)
class BatchTry:
    """
    One try of a batch.

    Args:
        context: Its context.
        offsets: Spark's offsets entry.
        infos: The operators, with the batch's parallelism.
        failover: What its tasks do while tables are being restored.
        inputs: Each operator's input in the first pass, before its steps.
        kept: The outputs that are kept until it ends.
    """

    context: BatchContext
    offsets: str
    infos: Sequence[OperatorInfo]
    failover: BatchFailover
    inputs: list[DataFrame] = field(default_factory=list)
    kept: list[KeptOutput] = field(default_factory=list)


class Passes:
    """
    Runs the operators of a query.

    Args:
        operators: The operators, each with the name of its table, and with steps that can be sent to tasks.
        session: The query's ownership of its job.
        times: The time of its batches.
        shipments: Sends processors to tasks.
        standby: Says how often output is kept.
        pin: Pins partitions to executors; None to leave them unpinned.
        jobs: Notes when an operator's job runs.
    """

    def __init__(
        self,
        operators: Sequence[Operator],
        session: JobSession,
        times: BatchTimes,
        shipments: Shipments,
        standby: Standby,
        pin: Pin | None,
        jobs: OperatorJobs,
    ) -> None:
        self._jobs = jobs
        self._operators = operators
        self._session = session
        self._times = times
        self._shipments = shipments
        self._standby = standby
        self._pin = pin
        self._history = ColumnarHistory(operators)

    def first(self, frame: DataFrame, work: BatchTry) -> tuple[DataFrame, list[Receipt]]:
        """Run the rows through all operators; return the last one's output, and the receipts."""
        receipts: list[Receipt] = []
        for operator, info in zip(self._operators, work.infos, strict=True):
            work.inputs.append(frame)
            frame, accepted = self._computed(operator, info, frame, work)
            receipts += work.failover.took(info, accepted)
        return frame, receipts

    def second(self, work: BatchTry, closing: SecondPass) -> tuple[DataFrame, list[Receipt]]:
        """Run the operators in which something is due again, and all operators after them."""
        work = replace(work, context=replace(work.context, time=closing.time, is_second_pass=True))
        receipts: list[Receipt] = []
        frame: DataFrame | None = None
        for operator, info, earlier in zip(self._operators, work.infos, work.inputs, strict=True):
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
        work: BatchTry,
        closing: SecondPass | None = None,
    ) -> tuple[DataFrame, list[Receipt]]:
        """Run an operator and keep its output; return the output and its receipts."""
        earlier = {} if closing is None else closing.earlier[operator.name]
        with set_for(frame.sparkSession, operator):
            rows = self._run(operator, info, apply_steps(operator.steps, frame, work.offsets), work, earlier)
            output = KeptOutput(rows, self._standby.output_replicas)
            work.kept.append(output)
            try:
                with self._jobs.running():
                    accepted = collect_receipts(output.frame, info)
            except PythonException as error:
                raise failed_task(error, info.label) from None
            if closing is None:
                self._history.took(operator.name, work.context, accepted)
            return checked(output.frame, accepted), accepted

    def _run(
        self,
        operator: Operator,
        info: OperatorInfo,
        frame: DataFrame,
        work: BatchTry,
        earlier: Mapping[int, Sequence[ChangeSetRef]],
    ) -> DataFrame:
        context, latest = work.context, self._session.latest
        max_parallelism = self._session.max_parallelism
        stored = {known.name: known.states for known in latest.operators} if latest else {}
        is_new = operator.name not in stored and not context.is_second_pass
        initial = operator.initial if is_new else None
        row_names, initial_of_task = tuple(operator.input_schema.names), None
        if initial is not None:
            initial_names = tuple(initial.frame.columns)
            initial_of_task = InitialRows(len(operator.key_columns), row_names, initial_names)
            operator, frame = joined(initial, operator, frame)
        # The first pass deletes; the second sees the deletions.
        deleted = ids_to_delete(stored.get(operator.name, {}), info.states, operator.recreated_states)
        failover = (
            work.failover.for_second_pass(info, context.time.watermark_ms)
            if context.is_second_pass and context.time is not None
            else work.failover.for_tasks(info, can_stall=stored.keys() >= {operator.name} and not deleted)
        )
        combining = self._combining(operator, failover, frame.sparkSession, context)
        task = OperatorTask(
            operator=operator.name,
            processor=self._shipments.parcel(operator.processor),
            states=info.states,
            key_schema=info.key_schema,
            key_places=key_places(operator) if combining is None else (None,) * len(operator.key_columns),
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
            failover=failover,
            is_combined=combining is not None,
            removed_ms=self._history.removed_ms(operator.name, context, failover),
        )
        partitions = info.parallelism, max_parallelism, self._pin
        if combining is None:
            placed = place(operator, frame, *partitions, late_until_ms(operator, context))
            names = placed_names(operator)
        else:
            per_group = self._history.rows_per_group(operator.name)
            placed = place_combined(operator, combining, frame, *partitions, per_group)
            names = combined_names(operator, combining)
        return placed.map_in_arrow(names, task.__call__, task.output_schema())

    def _combining(
        self, operator: Operator, failover: TaskFailover, spark: SparkSession, context: BatchContext
    ) -> Combining | None:
        """Return how Spark combines the operator's rows before they reach Python; None for not at all."""
        if context.is_second_pass:  # which has no rows
            return None
        combining = self._history.combining(operator.name, failover)
        return combining if combining is not None and finds_combined_in_place(spark) else None
