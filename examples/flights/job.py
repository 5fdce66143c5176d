"""
The flights example: departures and weather joined as streams, then statistics per route; two stateful operators.

Definitions, which `examples.flights.answer` computes independently in pandas:

- **Join.** A flight matches the weather of its airport and hour, ``(origin, time_hour)``; the row that arrives first
  waits in the state. It is an inner join: a flight whose hour has no weather row (1,556 of the 336,776 flights) stays
  in the state and is in no statistic. The result does not depend on the order of arrival.
- **Weather class**, the first that applies: ``low_visibility`` below 3 miles, ``rain`` with any precipitation, ``wind``
  from 20 miles per hour, else ``clear``. A missing wind measurement counts as no wind.
- **Cancelled** is a flight without a departure delay. All delays are whole minutes, so means are quotients of integer
  sums and do not depend on the order of the flights.
- **p95_delay** is the nearest-rank percentile: of n departures in ascending order, the one with rank ceil(0.95 n).
  It is exact, because the state has a count per minute of delay. Without departures, means and percentile are null.

`build` takes the operator as an argument, so the same job runs on the changelog backend and on Spark's own
``transformWithState``. The processors only use Spark's `StatefulProcessor`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from pyspark.sql import DataFrame, GroupedData, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from backend_client import BatchProgress, ChangelogStateBackend
from examples.flights.files import ProgressLog, RouteFiles, append_line
from examples.flights.processors import JOINED_SCHEMA, STATS_SCHEMA, FlightWeatherJoin, RouteStats

JOB = "flights"
ENGINES = ("changelog", "spark")
FLIGHTS_SCHEMA = "origin STRING, time_hour STRING, dest STRING, carrier STRING, flight INT, dep_delay INT"
WEATHER_SCHEMA = "origin STRING, time_hour STRING, wind_speed DOUBLE, precip DOUBLE, visib DOUBLE"


class Transform(Protocol):
    """The stateful operator: `ChangelogStateBackend.transform_with_state` or `spark_transform`."""

    def __call__(
        self,
        grouped: Any,
        *,
        statefulProcessor: StatefulProcessor,  # noqa: N803
        outputStructType: str,  # noqa: N803
        outputMode: str,  # noqa: N803
        timeMode: str,  # noqa: N803
        name: str,
    ) -> Any:
        """Return the operator's output: a streaming DataFrame, or an object with the same methods."""


def spark_transform(grouped: GroupedData, *, name: str, **arguments: Any) -> DataFrame:  # noqa: ARG001 - see docstring
    """Apply Spark's own operator, which takes no name."""
    return grouped.transformWithState(**arguments)


def read_events(spark: SparkSession, data: Path) -> DataFrame:
    """Return flights and weather as one stream, one file of each per batch; ``is_weather`` distinguishes them."""

    def read(folder: str, schema: str) -> DataFrame:
        return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(data / folder))

    flights = read("flights", FLIGHTS_SCHEMA).withColumn("is_weather", F.lit(False))
    weather = read("weather", WEATHER_SCHEMA).withColumn("is_weather", F.lit(True))
    return flights.unionByName(weather, allowMissingColumns=True)


def build(spark: SparkSession, transform: Transform, data: Path) -> Any:
    """
    Build the job.

    Args:
        spark: The session.
        transform: The stateful operator, applied twice.
        data: Folder with ``flights/`` and ``weather/`` of `examples.flights.data.prepare`.

    Returns:
        A stream with one row per batch and route with new flights; columns as in `STATS_SCHEMA`.
    """
    joined = transform(
        read_events(spark, data).groupBy("origin", "time_hour"),
        statefulProcessor=FlightWeatherJoin(),
        outputStructType=JOINED_SCHEMA,
        outputMode="Update",
        timeMode="None",
        name="join",
    )
    weather = (
        F.when(F.col("visib") < 3, "low_visibility")
        .when(F.col("precip") > 0, "rain")
        .when(F.col("wind_speed") >= 20, "wind")
        .otherwise("clear")
    )
    return transform(
        joined.withColumn("weather", weather).groupBy("origin", "dest"),
        statefulProcessor=RouteStats(),
        outputStructType=STATS_SCHEMA,
        outputMode="Update",
        timeMode="None",
        name="stats",
    )


def open_session(master: str) -> SparkSession:
    """Start Spark, small enough for a laptop."""
    provider = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    return (
        SparkSession.builder.master(master)
        .appName(JOB)
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.streaming.stateStore.providerClass", provider)
        .config("spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled", "true")
        .getOrCreate()
    )


def open_transform(options: argparse.Namespace) -> Transform:
    """Return the operator of the chosen engine."""
    if options.engine == "spark":
        return spark_transform
    backend = open_backend(options.storage, options.local_dir, options.parallelism, options.figures)
    transform: Transform = backend.transform_with_state
    return transform


def open_backend(
    storage: str, local_dir: Path | None = None, parallelism: int = 4, figures: Path | None = None
) -> ChangelogStateBackend:
    """
    Return the job's backend.

    Args:
        storage: URL of the storage.
        local_dir: Folder for tables and the sidecar's socket; the user's default folder if None.
        parallelism: Partitions per operator.
        figures: File that gets one JSON line per checkpoint.
    """

    def record(progress: BatchProgress) -> None:
        if figures is not None:
            line = {
                "batch_id": progress.batch_id,
                "checkpoint_ms": progress.checkpoint_ms,
                "bytes": progress.bytes_written,
                "objects": progress.objects_written,
                "rows": progress.rows,
                "tries": progress.tries,
            }
            append_line(figures, line)

    place = {} if local_dir is None else {"local_dir": str(local_dir)}
    return ChangelogStateBackend(storage, job=JOB, on_progress=record, parallelism=parallelism, **place)


def run(options: argparse.Namespace) -> None:
    """Run the job until it has read all files, or forever with an interval as trigger."""
    spark = open_session(options.master)
    spark.sparkContext.setLogLevel("ERROR")
    progress = ProgressLog(options.events)
    spark.streams.addListener(progress)
    stats = build(spark, open_transform(options), options.data)
    writer = stats.writeStream.outputMode("update").option("checkpointLocation", str(options.checkpoint))
    once = options.trigger == "available-now"
    writer = writer.trigger(availableNow=True) if once else writer.trigger(processingTime=options.trigger)
    query = writer.foreachBatch(RouteFiles(options.output).save).start()
    try:
        query.awaitTermination()
    finally:
        progress.wait(timeout_s=10)
        spark.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the flights example on data that `examples.flights.data` has prepared."""
    parser = argparse.ArgumentParser(prog="flights", description=main.__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with flights/ and weather/")
    parser.add_argument("--checkpoint", type=Path, required=True, help="Spark's checkpoint folder of the query")
    parser.add_argument("--output", type=Path, required=True, help="folder for one parquet file per batch")
    parser.add_argument("--storage", required=True, help="where the backend keeps its state: file:///… or s3://…")
    parser.add_argument("--local-dir", type=Path, help="folder for the backend's tables (default: one per user)")
    parser.add_argument("--events", type=Path, required=True, help="file for one JSON line per finished batch")
    parser.add_argument("--figures", type=Path, help="file for one JSON line per checkpoint of the backend")
    parser.add_argument("--trigger", default="available-now", help="available-now or an interval like '1 second'")
    parser.add_argument(
        "--engine", choices=ENGINES, default="changelog", help="engine that keeps the state (default %(default)s)"
    )
    parser.add_argument("--master", default="local[2]", help="Spark's master (default %(default)s)")
    parser.add_argument("--parallelism", type=int, default=4, help="partitions per operator (default %(default)s)")
    run(parser.parse_args(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
