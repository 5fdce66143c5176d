"""
Ticks that make Spark run a batch when no rows come, so that timers fire all the same.

A source without rows is added to the query; now and then it has a new offset, and that is a batch. Spark's log of
offsets has a line for each source, so a query is started with ticks or without them once and for all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from storage.errors import InvalidInputError

_FORMAT = "dstl_idle_ticks"
_OFFSET = "dstl_tick"


class IdleTicks(DataSource):
    """The source; its option is the time between two ticks."""

    @classmethod
    def name(cls) -> str:
        """Return the name under which Spark knows the source."""
        return _FORMAT

    def schema(self) -> str:
        """Return the columns, of which there is never a row."""
        return "tick long"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader of a query."""
        return _TickReader(float(self.options["interval_s"]))


class _TickReader(DataSourceStreamReader):
    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s

    def initialOffset(self) -> dict[str, int]:
        return {_OFFSET: 0}

    def latestOffset(self, start: dict[str, int] | None = None, limit: Any = None) -> dict[str, int]:
        tick = int(time.time() / self._interval_s)
        return {_OFFSET: max(tick, start[_OFFSET] if start else 0)}  # a clock that is set back makes no offset smaller

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        return iter(())


def with_idle_ticks(source: DataFrame, interval_s: float | None) -> DataFrame:
    """Return a stream of the same rows that has a batch at least every so many seconds; without a number, itself."""
    if interval_s is None:
        return source
    spark = source.sparkSession
    spark.dataSource.register(IdleTicks)
    ticks = spark.readStream.format(_FORMAT).option("interval_s", str(interval_s)).load()
    return source.unionAll(
        ticks.select(*(F.lit(None).cast(field.dataType).alias(field.name) for field in source.schema.fields))
    )


def check_idle_ticks(offsets: str | None, interval_s: float | None, job: str) -> None:
    """
    Compare a query with what its Spark checkpoint was begun with.

    Args:
        offsets: An offsets entry of the query, None if it has none.
        interval_s: The backend's option `idle_timers`.
        job: Names the job in the error.

    Raises:
        InvalidInputError: It ticked and shall not, or the reverse.
    """
    if not offsets or (f'"{_OFFSET}"' in offsets) == (interval_s is not None):
        return
    was, do = ("without", "leave it out") if interval_s is not None else ("with", "set it again; its value may change")
    raise InvalidInputError(
        f"job {job!r} was started {was} the option idle_timers, which cannot change later since Spark's checkpoint "
        f"counts the sources of a query: {do}, or start with a new checkpointLocation and a new job name"
    )
