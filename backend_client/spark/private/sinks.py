"""Spark's sinks without a public interface below ``writeStream``, opened by the same classes as in Spark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from backend_client.spark.private.session import (
    hadoop_folder,
    hadoop_path,
    is_a,
    java_frame,
    java_session,
    jvm_of,
    needed,
)
from storage.errors import ConflictError, InvalidInputError

_FOREACH_BATCH = "use foreachBatch and write the batch there, for example batch.write.format({!r})…"
_FILE_FORMAT = "org.apache.spark.sql.execution.datasources.FileFormat"
_FILE_SOURCE = "org.apache.spark.sql.execution.datasources.v2.FileDataSourceV2"
_LOG, _LOG_HEAD = "_spark_metadata", b"v1"
_MERGED_EVERY = "spark.sql.streaming.fileSink.log.compactInterval"
_STREAM_SINK = "org.apache.spark.sql.sources.StreamSinkProvider"


class Format:
    """
    The provider of a named format.

    Raises:
        InvalidInputError: Spark does not know the format.
    """

    def __init__(self, spark: SparkSession, name: str) -> None:
        self._spark = spark
        self._name = name
        self._provider = self._find()
        self.is_of_files = is_a(spark, self._provider, _FILE_FORMAT)
        self.is_stream_sink = is_a(spark, self._provider, _STREAM_SINK)

    def file_sink(self, path: str, columns: Sequence[str], options: Mapping[str, str]) -> FileSink:
        """Return the function that writes a batch into a folder, by Spark's ``FileStreamSink``."""
        with self._needed("FileStreamSink"):
            streaming = jvm_of(self._spark).org.apache.spark.sql.execution.streaming
            sink = streaming.sinks.FileStreamSink(
                java_session(self._spark), path, self._provider, self._seq(columns), self._options(options)
            )
        return FileSink(self._spark, path, _adding(sink))

    def stream_sink(
        self, columns: Sequence[str], options: Mapping[str, str], output_mode: str
    ) -> Callable[[DataFrame, int], None]:
        """Return the function that writes a batch, by the format's own streaming sink."""
        with self._needed("StreamSinkProvider.createSink"):
            modes = jvm_of(self._spark).org.apache.spark.sql.streaming.OutputMode
            sink = self._provider.createSink(
                java_session(self._spark).sqlContext(),
                self._options(options),
                self._seq(columns),
                getattr(modes, output_mode.capitalize())(),
            )
        return _adding(sink)

    def _find(self) -> Any:
        with self._needed("DataSource.lookupDataSource"):
            datasources = jvm_of(self._spark).org.apache.spark.sql.execution.datasources
            conf = java_session(self._spark).sessionState().conf()
            try:
                found = datasources.DataSource.lookupDataSource(self._name, conf)
            except (PySparkException, Py4JJavaError) as error:
                raise InvalidInputError(
                    f"Spark does not find the format {self._name!r}: add its package to spark.jars.packages. {error}"
                ) from error
            provider = found.getDeclaredConstructor(None).newInstance(None)
            if is_a(self._spark, provider, _FILE_SOURCE):
                provider = provider.fallbackFileFormat().getDeclaredConstructor(None).newInstance(None)
            return provider

    def _needed(self, interface: str) -> Any:
        return needed(interface, _FOREACH_BATCH.format(self._name))

    def _seq(self, columns: Sequence[str]) -> Any:
        return jvm_of(self._spark).PythonUtils.toSeq(list(columns))

    def _options(self, options: Mapping[str, str]) -> Any:
        jvm = jvm_of(self._spark)
        ignoring_case = getattr(getattr(jvm.org.apache.spark.sql.catalyst.util, "CaseInsensitiveMap$"), "MODULE$")
        return ignoring_case.apply(jvm.PythonUtils.toScalaMap(dict(options)))


def memory_sink(spark: SparkSession, schema: StructType, table: str) -> Callable[[DataFrame, int], None]:
    """Return the function that adds a batch to a table in memory, by Spark's ``MemorySink``."""
    with needed("MemorySink", "collect the batches in foreachBatch"):
        sql, session = jvm_of(spark).org.apache.spark.sql, java_session(spark)
        sink = sql.execution.streaming.sources.MemorySink()
        attributes = sql.catalyst.types.DataTypeUtils.toAttributes(session.parseDataType(schema.json()))
        plan = sql.execution.streaming.sources.MemoryPlan(sink, attributes)
        sql.classic.Dataset.ofRows(session, plan).createOrReplaceTempView(table)
    return lambda batch, batch_id: sink.write(batch_id, False, java_frame(batch).collect())


class FileSink:
    """
    Writes batches into a folder, and first what is missing before one: Spark's log of files must have no gap.

    Args:
        spark: The session.
        path: The folder.
        add: Adds a batch, unless the log has its id or a later one.
    """

    def __init__(self, spark: SparkSession, path: str, add: Callable[[DataFrame, int], None]) -> None:
        self._spark = spark
        self._path = path
        self._add = add
        self._first: int | None = None
        self._tried: int | None = None

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """
        Write a batch.

        Raises:
            ConflictError: The log has later batches, or another query's of the same id.
        """
        newest = self._newest()
        if newest is not None and newest > batch_id:
            raise self._used(newest, batch_id)
        if newest == batch_id and self._is_new(batch_id):
            raise ConflictError(
                f"folder {self._path} got a batch {batch_id} while this query computed its own: another query, or "
                "another driver of this one, writes there at the same time, and Spark would leave out one of each two "
                "batches. Give each query a folder of its own"
            )
        self._tried = batch_id
        if newest is None:
            newest = _begin_log(self._spark, *self._log(), batch_id)
        for missing in range(newest + 1, batch_id):
            empty = batch.sparkSession.sparkContext.emptyRDD()
            self._add(batch.sparkSession.createDataFrame(empty, batch.schema), missing)
        self._add(batch, batch_id)

    def check_unused(self, first: int) -> None:
        """Raise `ConflictError` if the log has this id or later ones: Spark would leave such batches out unnoticed."""
        newest = self._newest()
        if newest is not None and newest >= first:
            raise self._used(newest, first)
        self._first = first

    def _is_new(self, batch_id: int) -> bool:
        """Return whether no driver of this query has written a batch before."""
        return self._first is not None and batch_id >= self._first and batch_id != self._tried

    def _used(self, newest: int, next_id: int) -> ConflictError:
        return ConflictError(
            f"folder {self._path} has batches up to {newest} of another query, or of an earlier or newer one of this "
            f"job: Spark would leave out all up to there, and this query's next one is {next_id}. Give the query a "
            f"folder of its own, or empty this one, with {_LOG}"
        )

    def _newest(self) -> int | None:
        folder, files = self._log()
        names = [str(each.getPath().getName()) for each in files.listStatus(folder)] if files.exists(folder) else []
        return max((int(name.partition(".")[0]) for name in names if name[0].isdigit()), default=None)

    def _log(self) -> tuple[Any, Any]:
        return hadoop_folder(self._spark, f"{self._path.rstrip('/')}/{_LOG}")


def _begin_log(spark: SparkSession, folder: Any, files: Any, batch_id: int) -> int:
    """
    Begin a log of files shortly before a batch, and return its newest id, -1 for an empty log.

    Spark merges entries at fixed ids and needs all since the last merged one, back to the first batch. So a query that
    has run for long with another output gets an entry like that of a merge, without files.
    """
    interval = int(str(spark.conf.get(_MERGED_EVERY, "10")))
    newest = batch_id - batch_id % interval - 1
    if newest >= 0:
        unfinished, entry = (hadoop_path(spark, folder, f"{mark}{newest}.compact") for mark in (".begun-", ""))
        with closing(files.create(unfinished, True)) as stream:
            stream.write(_LOG_HEAD)
        files.rename(unfinished, entry)
    return newest


def _adding(sink: Any) -> Callable[[DataFrame, int], None]:
    return lambda batch, batch_id: sink.addBatch(batch_id, java_frame(batch))
