"""The entry point for users: `ChangelogStateBackend`."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import DataFrame, GroupedData, SparkSession
from pyspark.sql.streaming import StatefulProcessor, StreamingQuery
from pyspark.sql.types import DataType, StructType

from backend_client.batch_time import TimeMode
from backend_client.columnar.processor import ColumnarProcessor
from backend_client.progress import BatchProgress
from backend_client.progress_line import ProgressLine
from backend_client.service.job_session import embedded_service
from backend_client.service.launcher import EmbeddedService
from backend_client.settings import BackendSettings
from backend_client.spark.api.install import Installation, install
from backend_client.spark.api.plan import Operator, StatefulDataFrame, StatefulGroupedData, Step, grouping_columns
from backend_client.spark.driver.initial_state import initial_state_of
from backend_client.spark.private.session import grouped_frame, is_classic_grouped
from backend_client.spark.task.columnar_calls import ColumnarPlan
from backend_client.spark.task.late_rows import mark_event_time
from backend_client.spark.task.state_handle import declare_states
from backend_client.state.codec import KeyCodec
from dstl_service.wire import validate_operator
from storage.errors import InvalidInputError

logger = logging.getLogger("backend_client")

_PROGRESS_KEPT = 1000


class ChangelogStateBackend:
    """
    Keeps the state of a streaming query in local tables, and its changes in a shared log.

    Args:
        storage: Where checkpoints are kept: ``s3://bucket/prefix``, or ``file:///path`` of a disk that all hosts see.
        job: Name of the query's state; one running query per job, a newer one takes it over.
        on_progress: Called on the driver after every batch.
        options: See `backend_client.settings.BackendSettings`.

    Raises:
        InvalidInputError: An option is unknown or impossible.
    """

    def __init__(
        self,
        storage: str,
        *,
        job: str,
        on_progress: Callable[[BatchProgress], None] | None = None,
        **options: Any,
    ) -> None:
        self.settings = BackendSettings.of(storage, job, options)
        self._listeners = [] if on_progress is None else [on_progress]
        self._progress: deque[BatchProgress] = deque(maxlen=_PROGRESS_KEPT)
        self._job_per_query = False
        self._unnamed: list[StreamingQuery] = []

    @property
    def recent_progress(self) -> list[BatchProgress]:
        """The figures of the last batches, oldest first."""
        return list(self._progress)

    @property
    def embedded_service(self) -> EmbeddedService:
        """The sidecar of this host that starts itself; of no interest if the option ``service`` is set."""
        return embedded_service(self.settings)

    def install(self, spark: SparkSession) -> Installation:
        """
        Lead the session's own ``transformWithState`` and ``transformWithStateInPandas`` to this backend.

        Each query with a name (``queryName``) has a job of its own, called after the backend's job and the query; one
        query may have no name. The result undoes it: ``uninstall()``, or as a context manager.

        Raises:
            InvalidInputError: It is a session of Spark Connect, or has another backend installed.
        """
        installed = copy.copy(self)
        installed._job_per_query = True  # noqa: SLF001 - a backend of its own class
        return install(spark, installed)

    def for_query(self, name: str | None) -> ChangelogStateBackend:
        """
        Return the backend that a query is to use: this one, or where installed, one with the query's own job.

        Raises:
            InvalidInputError: The name cannot be part of a job's, or another query without a name runs.
        """
        if not self._job_per_query:
            return self
        if name is None:
            if any(query.isActive for query in self._unnamed):
                raise InvalidInputError(
                    f"a query without a name keeps its state in job {self.settings.job!r} already; name queries with "
                    "queryName(…), each then has a job of its own"
                )
            return self
        own = copy.copy(self)
        own.settings = replace(self.settings, job=f"{self.settings.job}.{name}")
        return own

    def started(self, query: StreamingQuery) -> None:
        """Take note of a running query."""
        if not query.name:
            self._unnamed[:] = [known for known in (*self._unnamed, query) if known.isActive]

    def report(self, progress: BatchProgress) -> None:
        """Take in a batch's figures. The batch is done: what a listener raises is logged, and fails nothing."""
        self._progress.append(progress)
        logger.info("%s", progress.to_text())
        for listener in self._listeners:
            try:
                listener(progress)
            except Exception:
                logger.exception("a listener of on_progress failed behind batch %d", progress.batch_id)

    def on_progress(self, listener: Callable[[BatchProgress], None]) -> None:
        """Call `listener` on the driver after every further batch."""
        self._listeners.append(listener)

    def show_progress(self, console: Any = None) -> ProgressLine:
        """
        Show batches as they finish: a line that changes on a terminal, a line for each batch elsewhere.

        Args:
            console: A ``rich.console.Console``; by default the terminal's.

        Raises:
            InvalidInputError: The package rich is not installed.
        """
        line = ProgressLine(console)
        self.on_progress(line)
        return line

    def transform_with_state(
        self,
        grouped: GroupedData | StatefulGroupedData,
        statefulProcessor: StatefulProcessor,
        outputStructType: StructType | str,
        outputMode: str,
        timeMode: str,
        initialState: Any = None,
        eventTimeColumnName: str = "",
        *,
        name: str | None = None,
        parallelism: int | None = None,
    ) -> StatefulDataFrame:
        """
        Run a processor over grouped rows: Spark's ``transformWithState`` with its state in this backend.

        Args:
            grouped: ``df.groupBy(columns)`` of a streaming DataFrame or of another operator's result.
            statefulProcessor: An ordinary ``pyspark.sql.streaming.StatefulProcessor``.
            outputStructType: Schema of the rows that it yields.
            outputMode: "Update" or "Append".
            timeMode: "None", "ProcessingTime" or "EventTime"; see docs/time.md.
            initialState: A batch DataFrame grouped by the same key; the processor's ``handleInitialState`` gets its
                rows in the operator's first batch, before the input's.
            eventTimeColumnName: Column of the output with the event time, for the next operator of a chain.
            name: Names the operator's state within the job; by default the processor's class name.
            parallelism: Number of partitions; may differ from run to run. By default the backend's.

        Raises:
            InvalidInputError: An argument is impossible, or asks for what is not served yet.
        """
        return self._transform(
            grouped,
            statefulProcessor,
            outputStructType,
            outputMode,
            timeMode,
            initialState,
            eventTimeColumnName,
            name=name,
            parallelism=parallelism,
        )

    def transform_with_state_in_pandas(
        self,
        grouped: GroupedData | StatefulGroupedData,
        statefulProcessor: StatefulProcessor,
        outputStructType: StructType | str,
        outputMode: str,
        timeMode: str,
        initialState: Any = None,
        eventTimeColumnName: str = "",
        *,
        name: str | None = None,
        parallelism: int | None = None,
    ) -> StatefulDataFrame:
        """
        Run a processor of the pandas API: Spark's ``transformWithStateInPandas``; otherwise as `transform_with_state`.

        The processor gets the rows of a key as ``pandas.DataFrame``s and yields such. State is the same in both APIs.
        """
        return self._transform(
            grouped,
            statefulProcessor,
            outputStructType,
            outputMode,
            timeMode,
            initialState,
            eventTimeColumnName,
            name=name,
            parallelism=parallelism,
            pandas=True,
        )

    def transform_columns(
        self,
        grouped: GroupedData | StatefulGroupedData,
        processor: ColumnarProcessor,
        outputStructType: StructType | str | None = None,
        outputMode: str = "Update",
        *,
        name: str | None = None,
        parallelism: int | None = None,
    ) -> StatefulDataFrame:
        """
        Run a columnar processor over grouped rows; see docs/columnar.md.

        Args:
            grouped: ``df.groupBy(columns)`` of a streaming DataFrame or of another operator's result.
            processor: Of `backend_client.columnar`: a ready-made one, or the user's.
            outputStructType: Schema of its output; only for processors that do not know it themselves.
            outputMode: "Update" or "Append".
            name: Names the operator's state within the job; by default the processor's class name.
            parallelism: Number of partitions; may differ from run to run. By default the backend's.

        Raises:
            InvalidInputError: An argument is impossible, or the processor does not fit the input.
        """
        output_mode = _output_mode(outputMode)
        name = name or type(processor).__name__
        validate_operator(name)
        given = self._input(grouped, name)
        plan = ColumnarPlan.of(processor, output_mode, given.schema, given.key_columns, is_first=not given.operators)
        output_schema = outputStructType or plan.output_schema()
        if isinstance(output_schema, str):
            output_schema = _parse(output_schema)
        operator = Operator(
            name=name,
            processor=plan,
            key_columns=given.key_columns,
            input_schema=given.schema,
            output_schema=output_schema,
            states=plan.states(),
            parallelism=parallelism,
            steps=given.steps,
            output_mode=output_mode,
        )
        return self._result(given, operator)

    def _transform(
        self,
        grouped: GroupedData | StatefulGroupedData,
        statefulProcessor: StatefulProcessor,
        outputStructType: StructType | str,
        outputMode: str,
        timeMode: str,
        initialState: Any,
        eventTimeColumnName: str,
        *,
        name: str | None,
        parallelism: int | None,
        pandas: bool = False,
    ) -> StatefulDataFrame:
        output_mode = _output_mode(outputMode)
        time_mode = TimeMode.of(timeMode)
        name = name or type(statefulProcessor).__name__
        validate_operator(name)
        given = self._input(grouped, name)
        output_schema = _parse(outputStructType) if isinstance(outputStructType, str) else outputStructType
        if eventTimeColumnName:
            output_schema = mark_event_time(output_schema, eventTimeColumnName, given.schema)
        states, begin_anew = declare_states(name, statefulProcessor, _parse, time_mode)
        key_types = [given.schema[column].dataType for column in given.key_columns]
        operator = Operator(
            name=name,
            processor=statefulProcessor,
            key_columns=given.key_columns,
            input_schema=given.schema,
            output_schema=output_schema,
            states=states,
            begin_anew=begin_anew,
            parallelism=parallelism,
            steps=given.steps,
            pandas=pandas,
            time_mode=time_mode,
            output_mode=output_mode,
            initial=None if initialState is None else initial_state_of(initialState, key_types, grouping_columns),
        )
        if time_mode is TimeMode.EVENT and operator.event_time is None:
            logger.warning(
                "operator %r has timeMode 'EventTime', but its input has no watermark: timers never fire. Call "
                "withWatermark before groupBy; behind another operator, name its eventTimeColumnName",
                name,
            )
        return self._result(given, operator)

    def _input(self, grouped: GroupedData | StatefulGroupedData, name: str) -> _Input:
        """Return what an operator of this name gets its rows from."""
        if isinstance(grouped, StatefulGroupedData):
            upstream = grouped.frame
            if upstream.backend is not self:
                raise InvalidInputError("operators in a chain must be of one backend: they share their checkpoints")
            given = _Input(upstream.source, upstream.operators, upstream.steps, grouped.key_columns, upstream.schema)
        else:
            source = _streaming_source(grouped)
            given = _Input(source, (), (), grouping_columns(grouped), source.schema)
        if any(operator.name == name for operator in given.operators):
            raise InvalidInputError(f"two operators are called {name!r}; give one of them another name=…")
        return given

    def _result(self, given: _Input, operator: Operator) -> StatefulDataFrame:
        KeyCodec(operator.key_schema.json())  # refuses keys that cannot be grouped by
        template = given.source.sparkSession.createDataFrame([], operator.output_schema)
        return StatefulDataFrame(self, given.source, (*given.operators, operator), template)


@dataclass(frozen=True, slots=True)
class _Input:
    """Where an operator gets its rows from: the stream, the operators before it, and the steps behind those."""

    source: DataFrame
    operators: tuple[Operator, ...]
    steps: tuple[Step, ...]
    key_columns: tuple[str, ...]
    schema: StructType


def _parse(text: str) -> StructType:
    parsed = DataType.fromDDL(text)
    if not isinstance(parsed, StructType):
        raise InvalidInputError(f"{text!r} is no schema of named columns")
    return parsed


def _output_mode(text: str) -> str:
    """Return a mode by Spark's name; `InvalidInputError` for others than are served."""
    if text.lower() not in ("update", "append"):
        raise InvalidInputError(f"outputMode must be 'Update' or 'Append', it is {text!r}")
    return text.capitalize()


def _streaming_source(grouped: Any) -> DataFrame:
    if not isinstance(grouped, GroupedData) or not is_classic_grouped(grouped):
        raise InvalidInputError(
            f"transform_with_state takes the result of df.groupBy(…) of a Spark session in this process, "
            f"not {type(grouped).__name__}; Spark Connect is not served"
        )
    source = grouped_frame(grouped)
    if not source.isStreaming:
        raise InvalidInputError(
            "the DataFrame is not a stream: read it with spark.readStream, or use Spark's own operator for a batch "
            "(uninstall() gives it back)"
        )
    return source
