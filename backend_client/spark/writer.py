"""
The writer of a stateful result: the methods of Spark's ``DataStreamWriter``; `start` returns Spark's query.

Under it lies a ``foreachBatch`` query on the first operator's input. A user's function gets each batch of the result as
an ordinary DataFrame; what it does with it runs at least once per batch, and the same batch id always means the same
input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame
from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

from backend_client.spark.checkpoint_log import CheckpointLog
from backend_client.spark.driver import BatchRunner
from backend_client.spark.idle_ticks import with_idle_ticks
from storage.errors import InvalidInputError

if TYPE_CHECKING:
    from backend_client.spark.plan import StatefulDataFrame

BatchFunction = Callable[[DataFrame, int], None]

_OUTPUT_MODES = ("append", "update")


class StatefulStreamWriter:
    """Collects what a query is to do; `start` starts it."""

    def __init__(self, frame: StatefulDataFrame) -> None:
        self._frame = frame
        source = with_idle_ticks(frame.source, frame.backend.settings.idle_timers)
        self._writer: DataStreamWriter = source.writeStream
        self._format: str | None = None
        self._options: dict[str, Any] = {}
        self._function: BatchFunction | None = None

    def outputMode(self, outputMode: str) -> StatefulStreamWriter:
        """Accept "append" and "update": each batch's output rows are written, whichever is named."""
        if outputMode.lower() not in _OUTPUT_MODES:
            raise InvalidInputError(f"output mode {outputMode!r} is not possible here; use one of {_OUTPUT_MODES}")
        return self

    def format(self, source: str) -> StatefulStreamWriter:
        """Name a built-in sink: "noop" or "console"; others are written in ``foreachBatch``."""
        if source.lower() not in _SINKS:
            raise InvalidInputError(
                f"format {source!r} is not served on a stateful result yet; use foreachBatch and write the batch "
                f"there, for example batch.write.format({source!r})…; built in are: {', '.join(_SINKS)}"
            )
        self._format = source.lower()
        return self

    def option(self, key: str, value: Any) -> StatefulStreamWriter:
        """Set an option; ``checkpointLocation`` is required."""
        self._options[key] = value
        return self

    def options(self, **options: Any) -> StatefulStreamWriter:
        """Set several options."""
        self._options.update(options)
        return self

    def queryName(self, queryName: str) -> StatefulStreamWriter:
        """Name the query."""
        self._writer = self._writer.queryName(queryName)
        return self

    def trigger(self, **kwargs: Any) -> StatefulStreamWriter:
        """Set the trigger as in Spark: ``processingTime``, ``availableNow`` or ``once``."""
        if kwargs.get("continuous") is not None:
            raise InvalidInputError("continuous processing has no batches; use trigger(processingTime='0 seconds')")
        self._writer = self._writer.trigger(**kwargs)
        return self

    def partitionBy(self, *cols: Any) -> StatefulStreamWriter:
        """Refuse: there is no file sink here; partition inside foreachBatch."""
        raise InvalidInputError("partitionBy needs a file sink; call it on batch.write inside foreachBatch")

    clusterBy = partitionBy

    def foreachBatch(self, func: BatchFunction) -> StatefulStreamWriter:
        """Call `func(batch, batch_id)` for every batch; it may run any number of actions on the batch."""
        if not callable(func):
            raise InvalidInputError("foreachBatch takes a function of a DataFrame and a batch id")
        self._function = func
        return self

    def foreach(self, f: Any) -> StatefulStreamWriter:
        """Call `f` for every row, or its ``open``, ``process`` and ``close`` for every partition, in the workers."""
        each = _ForeachRows(f)
        self._function = lambda batch, batch_id: batch.foreachPartition(each.of_batch(batch_id))
        return self

    def toTable(self, tableName: str, **_: Any) -> StreamingQuery:
        """Refuse: not served yet."""
        raise InvalidInputError(
            "toTable is not served on a stateful result yet; use foreachBatch with "
            f"batch.writeTo({tableName!r}).append()"
        )

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
            InvalidInputError: An option is missing or impossible, or the Spark checkpoint does not belong to the state.
            DstlError: The storage cannot be written, or the sidecar does not start.
        """
        self.options(**options)
        if format is not None:
            self.format(format)
        if outputMode is not None:
            self.outputMode(outputMode)
        if partitionBy is not None:
            self.partitionBy(partitionBy)
        if queryName is not None:
            self.queryName(queryName)
        if path is not None:
            self._options["path"] = path
        return self._start()

    def _start(self) -> StreamingQuery:
        location = self._options.get("checkpointLocation")
        if not location:
            raise InvalidInputError(
                "the option checkpointLocation is required: Spark keeps the offsets of the stream there, "
                "and the state belongs to them"
            )
        if self._function is not None:
            function = self._function
        elif self._format is not None:
            function = _SINKS[self._format](self._options)
        else:
            raise InvalidInputError(f"name a sink: foreachBatch(…), foreach(…) or format({' | '.join(_SINKS)})")
        spark = self._frame.source.sparkSession
        runner = BatchRunner.open(self._frame, function, CheckpointLog(spark, str(location)))
        try:
            return (
                self._writer.option("checkpointLocation", str(location))
                .outputMode("append")
                .foreachBatch(runner)
                .start()
            )
        except BaseException:
            runner.close()
            raise


def _noop(_: dict[str, Any]) -> BatchFunction:
    return lambda batch, _: batch.write.format("noop").mode("overwrite").save()


def _console(options: dict[str, Any]) -> BatchFunction:
    rows, truncate = int(options.get("numRows", 20)), str(options.get("truncate", "true")).lower() == "true"

    def show(batch: DataFrame, batch_id: int) -> None:
        import sys

        sys.stdout.write(f"-------------------------------------------\nBatch: {batch_id}\n")
        batch.show(rows, truncate)

    return show


_SINKS: dict[str, Callable[[dict[str, Any]], BatchFunction]] = {"noop": _noop, "console": _console}


class _ForeachRows:
    """Spark's contract for ``foreach``: a function of a row, or an object with ``process`` and maybe more."""

    def __init__(self, target: Any) -> None:
        if not callable(target) and not callable(getattr(target, "process", None)):
            raise InvalidInputError("foreach takes a function of a row, or an object with a method process(row)")
        self._target = target

    def of_batch(self, batch_id: int) -> Callable[[Any], None]:
        """Return the function that runs in each partition of a batch."""
        target = self._target

        def run(rows: Any) -> None:
            from pyspark import TaskContext

            process = target.process if hasattr(target, "process") else target
            context = TaskContext.get()
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
