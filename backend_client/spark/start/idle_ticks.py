"""
Ticks make Spark run a batch when no rows arrive, so that timers still fire.

The query gets an extra source without rows; each new offset of it makes a batch. Spark's offset log has a line for each
source, so a query keeps its choice of ticks or no ticks for life.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from backend_client.spark.start.worker_python import take_drivers_python
from storage.errors import InvalidInputError

_FORMAT = "dstl_idle_ticks"
_OFFSET = "dstl_tick"


class IdleTicks(DataSource):
    """The source; its option ``interval_s`` is the time between two ticks, in seconds."""

    @classmethod
    def name(cls) -> str:
        """Return the source's name in Spark."""
        return _FORMAT

    def schema(self) -> str:
        """Return the columns; there is never a row."""
        return "tick long"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return a query's reader."""
        return _TickReader(float(self.options["interval_s"]))


class _TickReader(DataSourceStreamReader):
    """
    Begins with the tick by the clock, and then counts intervals.

    If the clock was set back, or the interval was shorter in an earlier run, there are more ticks already than the
    clock says, and the next one comes at once.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._first = 0
        self._began_s: float | None = None

    def initialOffset(self) -> dict[str, int]:
        return {_OFFSET: 0}

    def latestOffset(self, start: dict[str, int] | None = None, limit: Any = None) -> dict[str, int]:
        now_s, before = time.monotonic(), start[_OFFSET] if start else 0
        if self._began_s is None:
            by_clock = int(time.time() / self._interval_s)
            self._first, self._began_s = by_clock if by_clock >= before else before + 1, now_s
        tick = self._first + int((now_s - self._began_s) / self._interval_s)
        return {_OFFSET: max(tick, before)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        return iter(())


def with_idle_ticks(source: DataFrame, interval_s: float | None) -> DataFrame:
    """Return a stream of the same rows with a batch at least every `interval_s` seconds; for None, the source."""
    if interval_s is None:
        return source
    spark = source.sparkSession
    take_drivers_python(spark)
    spark.dataSource.register(IdleTicks)
    ticks = spark.readStream.format(_FORMAT).option("interval_s", str(interval_s)).load()
    return source.unionAll(
        ticks.select(*(F.lit(None).cast(field.dataType).alias(field.name) for field in source.schema.fields))
    )


def check_idle_ticks(offsets: str | None, interval_s: float | None, job: str) -> None:
    """
    Check that a query ticks if and only if its Spark checkpoint was started with ticks.

    Args:
        offsets: An offsets entry of the query, None if it has none.
        interval_s: The backend's option `idle_timers`.
        job: The job's name, for the error.

    Raises:
        InvalidInputError: The query had ticks and now has none, or the reverse.
    """
    if not offsets or (f'"{_OFFSET}"' in offsets) == (interval_s is not None):
        return
    was, do = ("without", "leave it out") if interval_s is not None else ("with", "set it again; its value may change")
    raise InvalidInputError(
        f"job {job!r} was started {was} the option idle_timers, which cannot change later, because the Spark "
        f"checkpoint counts a query's sources: {do}, or start with a new checkpointLocation and a new job name"
    )
