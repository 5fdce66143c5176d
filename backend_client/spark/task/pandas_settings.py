"""The session settings that a task needs to call a processor of the pandas API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pyspark.sql import SparkSession

from backend_client.spark.private.session import setting


@dataclass(frozen=True, slots=True)
class PandasSettings:
    """The Spark session's pandas settings: the time zone of timestamps, and how frames become columns."""

    timezone: str
    by_name: bool
    safely: bool

    @classmethod
    def of(cls, spark: SparkSession) -> Self:
        """Read the session's settings."""

        def is_set(name: str) -> bool:
            return setting(spark, name, "true").lower() == "true"

        return cls(
            timezone=setting(spark, "spark.sql.session.timeZone", "UTC"),
            by_name=is_set("spark.sql.legacy.execution.pandas.groupedMap.assignColumnsByName"),
            safely=is_set("spark.sql.execution.pandas.convertToArrowArraySafely"),
        )
