"""The entry point for users: `ChangelogStateBackend`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from pyspark.sql import DataFrame, GroupedData, SparkSession
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StructType

from backend_client.columnar.processor import ColumnarProcessor
from backend_client.progress import BatchProgress
from backend_client.progress_line import ProgressLine
from backend_client.service.job_session import auto_started_sidecar
from backend_client.service.launcher import AutoStartedSidecar
from backend_client.settings import BackendSettings
from backend_client.spark.api.install import Installation, install, uninstall
from backend_client.spark.api.operators import OperatorInput, TransformOptions, columnar_operator, row_operator
from backend_client.spark.api.plan import StatefulDataFrame, StatefulGroupedData
from backend_client.spark.api.query_jobs import ProgressReports, QueryJobs
from backend_client.spark.api.recommended_settings import RecommendedSetting, recommended_settings
from backend_client.spark.columns import grouping_columns
from backend_client.spark.private.session import grouped_frame, is_classic_grouped
from backend_client.spark.query import Query
from storage.errors import InvalidInputError


class ChangelogStateBackend:
    """
    Keeps the state of a streaming query in local tables, and its changes in a shared log.

    Args:
        storage: Where checkpoints are kept: ``s3://bucket/prefix``, or ``file:///path`` of a disk that all hosts see.
        job: Name of the query's state. A job has one running query; a newer one takes it over.
        on_progress: Called on the driver after every batch.
        options: See `backend_client.settings.BackendSettings`.

    Raises:
        InvalidInputError: An option is unknown or has an invalid value.
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
        self._reports = ProgressReports()
        self._jobs = QueryJobs(self.settings, self._reports)
        if on_progress is not None:
            self.on_progress(on_progress)

    @property
    def recent_progress(self) -> list[BatchProgress]:
        """The figures of the most recent batches, oldest first."""
        return list(self._reports.recent)

    @property
    def auto_started_sidecar(self) -> AutoStartedSidecar:
        """This host's auto-started sidecar; unused if the option ``service`` is set."""
        return auto_started_sidecar(self.settings)

    def install(self, spark: SparkSession) -> Installation:
        """
        Route the session's own ``transformWithState`` and ``transformWithStateInPandas`` to this backend.

        Each named query (``queryName``) has its own job, named after the backend's job and the query. At most one
        query may be unnamed. The returned `Installation` undoes this: call ``uninstall()``, or use it in ``with``.

        Raises:
            InvalidInputError: The session is one of Spark Connect, or a backend is already installed in it.
        """
        installed = copy.copy(self)
        installed._jobs = self._jobs.one_per_query()  # noqa: SLF001 - a backend of its own class
        return install(
            spark,
            {
                "transformWithState": installed.transform_with_state,
                "transformWithStateInPandas": installed.transform_with_state_in_pandas,
            },
        )

    @staticmethod
    def uninstall(spark: SparkSession) -> None:
        """
        Restore Spark's own operator in a session, whichever backend is installed there; no effect without one.

        A cell of a notebook that calls `install` can be run again after it, although the `Installation` is gone.
        """
        uninstall(spark)

    @staticmethod
    def recommended_settings(spark: SparkSession | None = None) -> list[RecommendedSetting]:
        """
        Return the settings of Spark that a query on several hosts needs for pinned partitions and fast recovery.

        Each has its reason, and the application's own value if `spark` is given. Spark reads them when an application
        starts: ``python -m backend_client recommended-settings`` prints them as options of ``spark-submit``.
        """
        return recommended_settings() if spark is None else recommended_settings(spark.sparkContext.getConf().get)

    def rescale(self, operator: str, parallelism: int, *, query: str | None = None) -> None:
        """
        Change the number of partitions of an operator while its query runs; returns at once.

        The tables of the new partitions are prepared beside the batches; the first batch after that switches, and the
        log says so. Manifests record the number; a restart uses the one that the program names.

        Args:
            operator: The operator's name.
            parallelism: Its new number of partitions, 1 to the job's ``max_parallelism``.
            query: The query's name; needed if several running queries have such an operator.

        Raises:
            InvalidInputError: No running query has the name or the operator, several have it, or the number is too
                large.
        """
        self._jobs.rescale(operator, parallelism, query)

    def parallelism(self, query: str | None = None) -> dict[str, int]:
        """
        Return the number of partitions in the newest batch by operator, over all running queries or one by name.

        Raises:
            InvalidInputError: No running query has the name.
        """
        return self._jobs.parallelism(query)

    def on_progress(self, listener: Callable[[BatchProgress], None]) -> None:
        """Call `listener` on the driver after every later batch."""
        if not callable(listener):
            raise InvalidInputError(f"on_progress takes a function of a BatchProgress, not {listener!r}")
        self._reports.listeners.append(listener)

    def show_progress(self, console: Any = None) -> ProgressLine:
        """
        Show batches as they finish: one updating line on a terminal, one line per batch elsewhere.

        Args:
            console: A ``rich.console.Console``; the terminal's by default.

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
        Run a processor over grouped rows: Spark's ``transformWithState``, with the state in this backend.

        Args:
            grouped: ``df.groupBy(columns)`` of a streaming DataFrame or of another operator's result.
            statefulProcessor: An ordinary ``pyspark.sql.streaming.StatefulProcessor``.
            outputStructType: Schema of the rows that the processor yields.
            outputMode: "Update" or "Append".
            timeMode: "None", "ProcessingTime" or "EventTime"; see docs/time.md.
            initialState: A batch DataFrame grouped by the same key; the processor's ``handleInitialState`` gets its
                rows in the operator's first batch, before the input rows.
            eventTimeColumnName: Output column that holds the event time, for the next operator of a chain.
            name: Names the operator's state within the job; the processor's class name by default.
            parallelism: Number of partitions; may differ from run to run. The backend's by default.

        Raises:
            InvalidInputError: An argument is invalid or asks for an unsupported feature.
        """
        options = TransformOptions(
            statefulProcessor,
            outputStructType,
            outputMode,
            timeMode,
            initialState,
            eventTimeColumnName,
            name=name,
            parallelism=parallelism,
        )
        return self._transform(grouped, options)

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
        Run a pandas processor: Spark's ``transformWithStateInPandas``; otherwise like `transform_with_state`.

        The processor gets a key's rows as ``pandas.DataFrame``s and yields such frames. Both APIs share stored state.
        """
        options = TransformOptions(
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
        return self._transform(grouped, options)

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
            processor: A ready-made processor of `backend_client.columnar`, or the user's own.
            outputStructType: Schema of its output; needed only if the processor does not know it.
            outputMode: "Update" or "Append".
            name: Names the operator's state within the job; the processor's class name by default.
            parallelism: Number of partitions; may differ from run to run. The backend's by default.

        Raises:
            InvalidInputError: An argument is invalid, or the processor does not fit the input.
        """
        given = self._grouped(grouped)
        operator = columnar_operator(
            given.input, processor, outputStructType, outputMode, name=name, parallelism=parallelism
        )
        return given.followed_by(operator)

    def _transform(self, grouped: GroupedData | StatefulGroupedData, options: TransformOptions) -> StatefulDataFrame:
        given = self._grouped(grouped)
        return given.followed_by(row_operator(given.input, options))

    def _grouped(self, grouped: GroupedData | StatefulGroupedData) -> StatefulGroupedData:
        """Return an operator's input: a stream or the result of another operator."""
        if isinstance(grouped, StatefulGroupedData):
            if not grouped.jobs.are_those_of(self._jobs):
                raise InvalidInputError(
                    "this operator and the one before it belong to different backends; use one backend for a whole "
                    "chain, because its operators share their checkpoints"
                )
            return grouped
        source = _streaming_source(grouped)
        query = Query(source, (), (), self.settings)
        return StatefulGroupedData(OperatorInput(query, source.schema, grouping_columns(grouped)), self._jobs)


def _streaming_source(grouped: Any) -> DataFrame:
    if not isinstance(grouped, GroupedData) or not is_classic_grouped(grouped):
        raise InvalidInputError(
            f"transform_with_state takes the result of df.groupBy(…) from a Spark session of this process, "
            f"not {type(grouped).__name__}; Spark Connect is not supported"
        )
    source = grouped_frame(grouped)
    if not source.isStreaming:
        raise InvalidInputError(
            "the grouped DataFrame is not a stream: read it with spark.readStream, or use Spark's own operator for "
            "batch data (call uninstall() on the Installation first)"
        )
    return source
