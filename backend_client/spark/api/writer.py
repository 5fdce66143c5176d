"""
The writer of a stateful result: the methods of Spark's ``DataStreamWriter``; `start` returns Spark's query.

The query is a ``foreachBatch`` query on the first operator's input. A user's function gets each batch of the result as
an ordinary DataFrame; the same batch id always means the same input. `guarantee` says how often output is written, and
`sink` names a system to which it is published exactly once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming import DataStreamWriter, StreamingQuery
from pyspark.sql.types import StructType

from backend_client.settings import EXACT, BackendSettings
from backend_client.sinks.protocol import Sink
from backend_client.spark.api.published_query import PublishedQuery
from backend_client.spark.api.query_jobs import QueryJobs
from backend_client.spark.driver.driver import BatchRunner
from backend_client.spark.output.guarantees import EXACTLY_ONCE, check_guarantee, function_plan
from backend_client.spark.output.outputs import FunctionPlan, OutputPlan, SinkPlan
from backend_client.spark.output.publisher import BacklogLimits
from backend_client.spark.output.source_group import with_group
from backend_client.spark.output.spark_sinks import (
    BatchFunction,
    ForeachRows,
    SinkRequest,
    open_sink,
    open_table,
    option_texts,
    partition_names,
    skips_batches,
    writes_once,
)
from backend_client.spark.output.stored_sinks import check_columns
from backend_client.spark.output.writer_options import (
    check_beside_function,
    check_beside_sink,
    check_beside_table,
    check_names,
    check_trigger,
    is_own,
    location_of,
    path_option,
)
from backend_client.spark.private.session import setting
from backend_client.spark.query import Query
from backend_client.spark.start.idle_ticks import with_idle_ticks
from backend_client.spark.start.spark_checkpoint import CheckpointLog
from backend_client.spark.start.worker_python import check_worker_python
from storage.errors import InvalidInputError

_OUTPUT_MODES = ("append", "update")
_SLOTS = 2


class StatefulStreamWriter:
    """Collects a query's sink and options; `start` starts the query."""

    def __init__(self, query: Query, schema: StructType, jobs: QueryJobs) -> None:
        self._query = query
        self._schema = schema
        self._jobs = jobs
        self._source = with_idle_ticks(query.source, query.settings.idle_timers)
        self._writer: DataStreamWriter = self._source.writeStream
        self._format: str | None = None
        self._options: dict[str, Any] = {}
        self._function: BatchFunction | ForeachRows | None = None
        self._sink: SinkPlan | None = None
        self._output_mode = "append"
        self._query_name: str | None = None
        self._ends = False
        self._partition_by: tuple[str, ...] = ()

    def outputMode(self, outputMode: str) -> StatefulStreamWriter:
        """Set "append" or "update"; both write each batch's output rows."""
        if outputMode.lower() not in _OUTPUT_MODES:
            raise InvalidInputError(
                f"output mode {outputMode!r} is not supported on a stateful result; use one of {_OUTPUT_MODES}"
            )
        self._output_mode = outputMode.lower()
        return self

    def format(self, source: str) -> StatefulStreamWriter:
        """Choose one of Spark's sinks: a file format, "kafka", "memory", "console", "noop", or one from a package."""
        self._format = source
        return self

    def option(self, key: str, value: Any) -> StatefulStreamWriter:
        """
        Set an option; ``checkpointLocation`` is required. Case does not count, and ``queryName`` names the query.

        ``consumerGroup`` names the consumer group of Kafka to which the offsets of a checkpoint are committed when it
        exists, so that monitoring shows the query's lag; see docs/sinks.md.
        """
        if key.lower() == "queryname":
            return self.queryName(value)
        self._options = {name: of_name for name, of_name in self._options.items() if name.lower() != key.lower()}
        self._options[key] = value
        return self

    def options(self, **options: Any) -> StatefulStreamWriter:
        """Set several options."""
        for key, value in options.items():
            self.option(key, value)
        return self

    def queryName(self, queryName: str) -> StatefulStreamWriter:
        """Name the query."""
        self._writer = self._writer.queryName(queryName)
        self._query_name = queryName
        return self

    def trigger(self, **kwargs: Any) -> StatefulStreamWriter:
        """
        Set the trigger as in Spark: ``processingTime``, ``availableNow`` or ``once``.

        With ``availableNow`` and ``once`` a batch waits for all tables, whatever `failover` is: no later batch would
        run waiting rows.
        """
        check_trigger(kwargs)
        self._writer = self._writer.trigger(**kwargs)
        self._ends = bool(kwargs.get("availableNow") or kwargs.get("once"))
        return self

    def partitionBy(self, *cols: Any) -> StatefulStreamWriter:
        """Partition the files of a file sink or of a new table by columns."""
        self._partition_by = partition_names(cols)
        return self

    def clusterBy(self, *_: Any) -> StatefulStreamWriter:
        """Refuse: no sink of a stateful result supports clustering."""
        raise InvalidInputError("clusterBy is not supported on a stateful result; use partitionBy, or foreachBatch")

    def foreachBatch(self, func: BatchFunction) -> StatefulStreamWriter:
        """Call `func(batch, batch_id)` for every batch; it may run several actions on the batch."""
        if not callable(func):
            raise InvalidInputError("foreachBatch takes a function of a DataFrame and a batch id")
        return self._with_function(func)

    def foreach(self, f: Any) -> StatefulStreamWriter:
        """Call `f` for every row in the workers; an object gets ``open`` and ``close`` around each partition's rows."""
        return self._with_function(ForeachRows(f))

    def guarantee(self, guarantee: str) -> StatefulStreamWriter:
        """
        Choose how often output is written under failures; the state is exactly once in any case.

        Args:
            guarantee: "at-least-once": before the checkpoint exists, and again if the batch is executed again, the
                default of functions and of most sinks. "at-most-once": after the checkpoint exists, and never again.
                "exactly-once": file formats write each batch once; "kafka" and `sink` publish what the checkpoint
                holds.
        """
        self._options["guarantee"] = check_guarantee(guarantee)
        return self

    def sink(
        self,
        sink: Sink,
        *,
        name: str = "output",
        slots: int = _SLOTS,
        backlog_checkpoints: int = 8,
        backlog_bytes: int = 1 << 30,
        patience_s: float = 600.0,
    ) -> StatefulStreamWriter:
        """
        Publish the result to a system exactly once: each checkpoint's rows when it exists, in the background.

        Args:
            sink: The system, for example a `KafkaSink`.
            name: Names the sink within the job; markers in the system belong to it. Keep it over restarts.
            slots: Number of transactions per checkpoint, which run at the same time, each on a core; 1..1024. One if
                the result was joined, repartitioned or coalesced, or has a subquery.
            backlog_checkpoints: Batches wait while this many checkpoints are unpublished.
            backlog_bytes: Batches wait while their output takes this much in the log.
            patience_s: How long `stop` and the end of the query wait for the last publish.
        """
        if self._sink is not None:
            raise InvalidInputError(
                "the query has a sink(…) already, and publishes to one: KafkaSink writes to several topics by a column "
                "topic; another system can be filled from what the first one has"
            )
        if not isinstance(sink, Sink):
            raise InvalidInputError(f"sink takes a backend_client.sinks.protocol.Sink, got {type(sink).__name__}")
        limits = BacklogLimits(backlog_checkpoints, backlog_bytes, patience_s)
        self._sink = SinkPlan(sink, name, slots, self._schema, limits)
        return self

    def toTable(
        self,
        tableName: str,
        format: str | None = None,  # noqa: A002 - Spark's name
        outputMode: str | None = None,
        partitionBy: Any = None,
        queryName: str | None = None,
        **options: Any,
    ) -> StreamingQuery:
        """Start the query, appending to a table that is created if it does not exist. Raises as `start` does."""
        self._take(format, outputMode, partitionBy, queryName, options)
        self._location()
        check_names(self._options)
        check_beside_table(has_sink=self._sink is not None, has_function=self._function is not None)
        spark = self._query.spark
        request = self._request(self._format or _default_format(spark))
        return self._start(self._function_plan(open_table(spark, tableName, request), request))

    def start(
        self,
        path: str | None = None,
        format: str | None = None,  # noqa: A002 - Spark's name
        outputMode: str | None = None,
        partitionBy: Any = None,
        queryName: str | None = None,
        **options: Any,
    ) -> StreamingQuery:
        """
        Take the job over and start the query.

        Raises:
            InvalidInputError: An option is missing or invalid, or the Spark checkpoint does not belong to the state.
            DstlError: The storage cannot be written, or the sidecar does not start.
        """
        self._take(format, outputMode, partitionBy, queryName, options)
        self._options |= path_option(path, self._option("path"))
        self._location()
        check_names(self._options)
        if self._sink is not None:
            return self._start(self._sink_plan(self._sink))
        if self._function is not None:
            check_beside_function(self._format, self._option("path"), self._partition_by)
            return self._start(self._function_plan(self._function, None))
        spark = self._query.spark
        if self._format is None and self._option("path") is None:
            raise InvalidInputError(
                "the query has no sink; name one: foreachBatch(…), foreach(…), format(…), toTable(…) or start(path)"
            )
        request = self._request(self._format or _default_format(spark))
        if request.format.lower() == "kafka" and self._guarantee() == EXACTLY_ONCE:
            from backend_client.sinks.kafka import KafkaSink  # confluent-kafka is optional

            sink = KafkaSink.from_spark_options(dict(request.options))
            return self._start(SinkPlan(sink, "output", _SLOTS, self._schema, abandoned=self._abandoned()))
        return self._start(self._function_plan(open_sink(spark, request), request))

    def _take(
        self, source: str | None, mode: str | None, partition_by: Any, query_name: str | None, options: dict[str, Any]
    ) -> None:
        self.options(**options)
        if source is not None:
            self.format(source)
        if mode is not None:
            self.outputMode(mode)
        if partition_by is not None:
            self.partitionBy(partition_by)
        if query_name is not None:
            self.queryName(query_name)

    def _with_function(self, function: BatchFunction | ForeachRows) -> StatefulStreamWriter:
        if self._function is not None:
            raise InvalidInputError("the query has a function already: call both in one, foreachBatch(…)")
        self._function, self._format = function, None  # as on Spark, the function replaces a format before it
        return self

    def _request(self, source: str) -> SinkRequest:
        options = option_texts({name: value for name, value in self._options.items() if not is_own(name)})
        return SinkRequest(source, self._schema, self._output_mode, self._query_name, self._partition_by, options)

    def _option(self, name: str) -> Any:
        return {key.lower(): value for key, value in self._options.items()}.get(name)

    def _guarantee(self) -> str | None:
        asked = self._option("guarantee")
        return None if asked is None else check_guarantee(asked)

    def _abandoned(self) -> frozenset[str]:
        """Return the names of the sinks whose unpublished output the user gives up, separated by commas."""
        return frozenset(filter(None, map(str.strip, str(self._option("abandonoutput") or "").split(","))))

    def _function_plan(self, function: BatchFunction | ForeachRows, request: SinkRequest | None) -> OutputPlan:
        return function_plan(
            function,
            self._guarantee(),
            self._abandoned(),
            writes_once=request is not None and writes_once(self._query.spark, request),
            numbers_batches=request is not None,
            skips_batches=request is not None and skips_batches(request),
            failover=self._settings.failover,
        )

    def _sink_plan(self, plan: SinkPlan) -> SinkPlan:
        if self._guarantee() not in (None, EXACTLY_ONCE):
            raise InvalidInputError(f"sink(…) publishes exactly once; it cannot be {self._guarantee()!r}")
        if self._function is not None or self._format is not None:
            raise InvalidInputError("the query has a sink(…) and another output; use one of them")
        check_beside_sink(self._options, self._partition_by)
        return replace(plan, abandoned=self._abandoned())

    @property
    def _settings(self) -> BackendSettings:
        settings = self._jobs.settings_for(self._query_name)
        return replace(settings, failover=EXACT) if self._ends else settings

    def _location(self) -> str:
        root = self._query.spark.conf.get("spark.sql.streaming.checkpointLocation", None)
        return location_of(self._option("checkpointlocation"), root, self._query_name)

    def _fitting(self, plan: SinkPlan) -> SinkPlan:
        """Return a sink's plan as it fits the query; `InvalidInputError` if it does not."""
        if any(operator.name == plan.name for operator in self._query.operators):
            raise InvalidInputError(f"the query has an operator {plan.name!r}: give the sink another name, name=…")
        check_columns(plan.schema.names)
        # A slot is a range of the operator's partitions. If rows move, one slot keeps the order of checkpoints.
        return plan if self._query.keeps_places else replace(plan, slots=1)

    def _start(self, output: OutputPlan) -> StreamingQuery:
        location = self._location()
        output = self._fitting(output) if isinstance(output, SinkPlan) else output
        spark = self._query.spark
        output = with_group(output, self._source, dict(option_texts(self._options)))
        if self._query_name and any(query.name == self._query_name for query in spark.streams.active):
            # Spark refuses this too, but only after this query has taken the job from the running one.
            raise InvalidInputError(
                f"a query named {self._query_name!r} is already active in this session; stop it first, or use another "
                "queryName"
            )
        query = replace(self._query, settings=self._settings)
        check_worker_python(spark)
        log = CheckpointLog(spark, location)
        runner = BatchRunner.open(query, output, log, self._jobs.reports)
        try:
            runner.output.start()
            log.remove_unfinished_start()
            running = (
                self._writer.option("checkpointLocation", location).outputMode("append").foreachBatch(runner).start()
            )
        except BaseException:
            runner.close()
            raise
        runner.close_behind(running)
        self._jobs.started(running, runner.rescaling)
        return running if isinstance(output, FunctionPlan) else PublishedQuery(running, runner.output)


def _default_format(spark: SparkSession) -> str:
    return setting(spark, "spark.sql.sources.default", "parquet")
