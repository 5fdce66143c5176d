"""The session settings that a task needs to call a processor of the pandas API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pyspark.sql import SparkSession

from backend_client.spark.private.session import setting


@dataclass(frozen=True, slots=True)
class PandasSettings:
    """
    The Spark session's pandas settings: the time zone of timestamps, and how columns become frames, and frames columns.

    Args:
        timezone: The time zone of timestamps.
        by_name: Whether a frame's columns are found by their names rather than their positions.
        safely: Whether numbers that a conversion would change are an error.
        integers_stay: Whether whole numbers beside nulls stay whole instead of becoming floats.
        decimals_of_integers: Whether whole numbers become decimals of fewer digits than their type has.
    """

    timezone: str
    by_name: bool
    safely: bool
    integers_stay: bool = False
    decimals_of_integers: bool = False

    @classmethod
    def of(cls, spark: SparkSession) -> Self:
        """Read the session's settings."""

        def is_set(name: str, default: str = "true") -> bool:
            return setting(spark, name, default).lower() == "true"

        return cls(
            timezone=setting(spark, "spark.sql.session.timeZone", "UTC"),
            by_name=is_set("spark.sql.legacy.execution.pandas.groupedMap.assignColumnsByName"),
            safely=is_set("spark.sql.execution.pandas.convertToArrowArraySafely"),
            integers_stay=is_set("spark.sql.execution.pythonUDF.pandas.preferIntExtensionDtype", "false"),
            decimals_of_integers=is_set("spark.sql.execution.pythonUDF.pandas.intToDecimalCoercionEnabled", "false"),
        )
