"""Sessions and frames of the backend's own."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession


def own_session(spark: SparkSession) -> SparkSession:
    """Return a session for small jobs beside the batches; the settings of the user's session stay."""
    own = spark.newSession()
    own.conf.set("spark.sql.adaptive.enabled", "false")
    return own


def no_rows(frame: DataFrame) -> DataFrame:
    """Return a frame without rows, with the columns of another one and in its session."""
    spark = frame.sparkSession
    return spark.createDataFrame(spark.sparkContext.emptyRDD(), frame.schema)
