"""
Spark's sinks for a stateful result: the functions that write each batch's rows.

Output is exactly once where Spark's own sink is. Spark's ``FileStreamSink`` writes file formats and tables of files;
its log of batch ids skips a batch that is executed again. Other streaming sinks of Spark's first interface (Delta among
them) get the same batch ids as from Spark itself. A batch is in the sink before its checkpoint exists, and is executed
again if the checkpoint fails, as in Spark.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from backend_client.spark.columns import quoted
from backend_client.spark.output.apart import run_apart, speculates
from backend_client.spark.private.session import catalog_table, jvm_of, local_checkpoint
from backend_client.spark.private.sinks import FileSink, Format, memory_sink
from backend_client.spark.shipping import Parcel, Shipments
from storage.errors import ConflictError, InvalidInputError

BatchFunction = Callable[[DataFrame, int], None]


class BatchIds(NamedTuple):
    """
    The ids under which a sink that numbers batches gets those of a query.

    Args:
        ahead: By how much they are greater than Spark's: batches that rewinds gave up have the same ids there.
        first: The id of the first batch that was not planned before the query's start.
    """

    ahead: int
    first: int


@dataclass(frozen=True, slots=True)
class SinkRequest:
    """The sink that a user asked for; `options` excludes those of the query itself."""

    format: str
    schema: StructType
    output_mode: str = "append"
    query_name: str | None = None
    partition_by: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()

    def option(self, name: str, default: str) -> str:
        """Return an option's value; its name is case-insensitive."""
        return {key.lower(): value for key, value in self.options}.get(name.lower(), default)


def open_sink(spark: SparkSession, request: SinkRequest) -> BatchFunction:
    """
    Return the function that writes a batch.

    Raises:
        InvalidInputError: The format is unknown, has no streaming sink, or lacks an option or column.
    """
    special = _SPECIAL.get(request.format.lower())
    if special is not None:
        if request.partition_by:
            raise InvalidInputError(f"format {request.format!r} does not support partitionBy; leave it out")
        return special(spark, request)
    return _spark_sink(spark, request)


def writes_once(spark: SparkSession, request: SinkRequest) -> bool:
    """Return whether the sink skips a batch that it has written before: Spark's sink of files does."""
    return request.format.lower() not in _SPECIAL and Format(spark, request.format).is_of_files


def skips_batches(request: SinkRequest) -> bool:
    """Return whether the sink leaves out a batch whose id it has seen: those of Spark with a memory of their own do."""
    return request.format.lower() not in _SPECIAL.keys() - {"memory"}


def open_table(spark: SparkSession, name: str, request: SinkRequest) -> BatchFunction:
    """
    Return the function that appends to a table of files, which is created if it does not exist.

    Raises:
        InvalidInputError: The name is that of a view or a Hive table, or of a table outside Spark's own catalog; or
            its partition columns differ from `partition_by`.
    """
    if not spark.catalog.tableExists(name):
        _create_table(spark, name, request)
    try:
        table = catalog_table(spark, name)
    except PySparkException as error:
        raise InvalidInputError(
            f"toTable({name!r}) only supports tables of files in Spark's own catalog; use foreachBatch with "
            f"batch.writeTo({name!r}).append(). Spark says: {error}"
        ) from error
    provider, columns = table.provider(), table.partitionColumnNames()
    partitions = [columns.apply(position) for position in range(columns.size())]
    if not provider.isDefined():
        raise InvalidInputError(f"{name!r} is a view or a Hive table; use foreachBatch with batch.write.insertInto(…)")
    if request.partition_by and list(request.partition_by) != partitions:
        raise InvalidInputError(
            f"table {name!r} is partitioned by ({', '.join(partitions)}), not by ({', '.join(request.partition_by)}); "
            "leave partitionBy out"
        )
    options = (*request.options, ("path", _folder(spark, table.location())))
    write = _spark_sink(spark, replace(request, format=provider.get(), partition_by=tuple(partitions), options=options))
    identifier = str(table.identifier().quotedString())

    return _TableFunction(write, partial(spark.catalog.refreshTable, identifier))


@dataclass(frozen=True, slots=True)
class _TableFunction:
    """Writes a batch, and then, as Spark does, has a session that has read the table see the new files."""

    write: BatchFunction
    refresh: Callable[[], None]

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        self.write(batch, batch_id)
        self.refresh()


def check_unused(function: BatchFunction | ForeachRows, first: int) -> None:
    """Raise `ConflictError` if a function writes into a folder of files that has a batch of this id, or later ones."""
    files = function.write if isinstance(function, _TableFunction) else function
    if isinstance(files, FileSink):
        files.check_unused(first)


def _folder(spark: SparkSession, uri: Any) -> str:
    """Return the folder that a URI names; a URI's ``%20`` is a blank, but taken as a path it would stay ``%20``."""
    return str(jvm_of(spark).org.apache.hadoop.fs.Path(uri).toString())


def option_texts(options: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return options as Spark takes them: as text, without those that are None."""
    texts = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in options.items()
        if value is not None
    }
    return tuple(texts.items())


def _create_table(spark: SparkSession, name: str, request: SinkRequest) -> None:
    options = dict(request.options)
    path = options.pop("path", None)
    statement = f"CREATE TABLE {name} ({request.schema.toDDL()}) USING {request.format}"
    if options:
        statement += f" OPTIONS ({', '.join(f'{_text(key)} {_text(value)}' for key, value in options.items())})"
    if request.partition_by:
        columns = ", ".join(quoted(column) for column in request.partition_by)
        statement += f" PARTITIONED BY ({columns})"
    if path is not None:
        statement += f" LOCATION {_text(path)}"
    spark.sql(statement)


def _text(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _spark_sink(spark: SparkSession, request: SinkRequest) -> BatchFunction:
    found = Format(spark, request.format)
    columns, options = _partition_columns(request), dict(request.options)
    if found.is_of_files:
        if request.output_mode.lower() != "append":
            raise InvalidInputError(
                f"format {request.format!r} only appends; use outputMode('append') on the writer, or foreachBatch"
            )
        path = request.option("path", "")
        if not path:
            raise InvalidInputError(f"format {request.format!r} needs a path: start(path) or option('path', …)")
        return found.file_sink(path, columns, options)
    if found.is_stream_sink:
        return found.stream_sink(columns, options, request.output_mode)
    raise InvalidInputError(
        f"format {request.format!r} has no streaming sink for a stateful result; use foreachBatch and write the "
        f"batch there, for example batch.write.format({request.format!r})…"
    )


def _partition_columns(request: SinkRequest) -> list[str]:
    names = {name.lower(): name for name in request.schema.names}
    unknown = [name for name in request.partition_by if name.lower() not in names]
    if unknown:
        raise InvalidInputError(
            f"partitionBy names unknown columns {', '.join(unknown)}; the result has {', '.join(request.schema.names)}"
        )
    if request.partition_by and len(request.partition_by) == len(names):
        raise InvalidInputError("partitionBy names all columns; leave at least one column for the files")
    return [names[name.lower()] for name in request.partition_by]


def _noop(_: SparkSession, __: SinkRequest) -> BatchFunction:
    return lambda batch, _: batch.write.format("noop").mode("overwrite").save()


def _console(_: SparkSession, request: SinkRequest) -> BatchFunction:
    rows, truncate = int(request.option("numRows", "20")), request.option("truncate", "true").lower() == "true"
    line = "-------------------------------------------\n"

    def show(batch: DataFrame, batch_id: int) -> None:
        sys.stdout.write(f"{line}Batch: {batch_id}\n{line}")
        batch.show(rows, truncate)

    return show


def _memory(spark: SparkSession, request: SinkRequest) -> BatchFunction:
    if not request.query_name:
        raise InvalidInputError("format 'memory' needs queryName(…), which becomes the name of the in-memory table")
    return memory_sink(spark, request.schema, request.query_name)


def _kafka(spark: SparkSession, request: SinkRequest) -> BatchFunction:
    Format(spark, "kafka")  # reports a missing package now rather than in the first batch
    options = dict(request.options)
    if "value" not in {name.lower() for name in request.schema.names}:
        raise InvalidInputError(
            "format 'kafka' needs a column named value in the result; key, topic, partition and headers are optional"
        )
    return lambda batch, _: batch.write.format("kafka").options(**options).save()


_SPECIAL: dict[str, Callable[[SparkSession, SinkRequest], BatchFunction]] = {
    "console": _console,
    "kafka": _kafka,
    "memory": _memory,
    "noop": _noop,
}


class ForeachRows:
    """
    Passes each row to `target` in the workers: Spark's ``foreach``.

    Args:
        target: A function of a row, or an object with ``process`` and optionally ``open`` and ``close``.

    Raises:
        InvalidInputError: `target` is neither.
    """

    def __init__(self, target: Any) -> None:
        if not callable(target) and not callable(getattr(target, "process", None)):
            raise InvalidInputError("foreach takes a function of a row, or an object with a method process(row)")
        self._target = target

    def shipped(self, shipments: Shipments, *, at_most_once: bool = False) -> BatchFunction:
        """Return the function that writes batches; the target is shipped to the workers once."""
        parcel = shipments.parcel(self._target)

        def write(batch: DataFrame, batch_id: int) -> None:
            run = _in_partition(parcel, batch_id, at_most_once=at_most_once)
            if at_most_once and speculates(batch.sparkSession):
                _each_partition_apart(batch, run)
            else:
                batch.foreachPartition(run)

        return _computed_before(write) if at_most_once else write


def _computed_before(write: BatchFunction) -> BatchFunction:
    """
    Return a function that computes a batch before it is written.

    A stage that reads a shuffle is executed again if some of that is lost, and its tasks count their attempts from the
    start. The stage that writes reads none then.
    """

    def write_computed(batch: DataFrame, batch_id: int) -> None:
        computed = batch.localCheckpoint()
        blocks = local_checkpoint(computed)
        try:
            write(computed, batch_id)
        finally:
            blocks.sparkContext().unpersistRDD(blocks.id(), False)

    return write_computed


def _each_partition_apart(batch: DataFrame, run: Callable[[Any], None]) -> None:
    def run_rows(rows: Any) -> Any:
        run(rows)
        return iter(())

    written = batch.rdd.mapPartitions(run_rows)
    numbers = range(written.getNumPartitions())
    run_apart(batch.sparkSession, [partial(written.context.runJob, written, list, [number]) for number in numbers])


def _in_partition(parcel: Parcel, batch_id: int, *, at_most_once: bool = False) -> Callable[[Any], None]:
    def run(rows: Any) -> None:
        context = TaskContext.get()
        if at_most_once and context is not None and context.attemptNumber() > 0:
            raise ConflictError(
                f"Spark executes the task of partition {context.partitionId()} again: its rows may be written already, "
                "and are not written twice"
            )
        target = parcel.unpack()
        process: Callable[[Any], Any] = target.process if hasattr(target, "process") else target
        opened = not hasattr(target, "open") or target.open(context.partitionId() if context else 0, batch_id)
        error: Exception | None = None
        try:
            if opened:
                for row in rows:
                    process(row)
        except Exception as raised:
            error = raised
            raise
        finally:
            if hasattr(target, "close"):
                target.close(error)

    return run


def partition_names(columns: Sequence[Any]) -> tuple[str, ...]:
    """Return the names given to ``partitionBy``, one by one or as a list."""
    if len(columns) == 1 and isinstance(columns[0], (list, tuple)):
        columns = columns[0]
    return tuple(map(str, columns))
