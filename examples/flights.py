"""
The flights example: departures and weather joined as streams, then statistics per route; two stateful operators.

Definitions, which `examples.flights_answer` computes independently in pandas:

- **Join.** A flight meets the weather of its airport and hour, ``(origin, time_hour)``; whoever is first waits in the
  state. It is an inner join: a flight whose hour has no weather row (1,556 of the 336,776 flights) stays in the state
  and is in no statistic. What is joined does not depend on the order in which rows come.
- **Weather class**, the first that applies: ``low_visibility`` below 3 miles, ``rain`` with any precipitation, ``wind``
  from 20 miles per hour, else ``clear``. A wind that was not measured is no wind.
- **Cancelled** is a flight without a departure delay. All delays are whole minutes, so means are quotients of integer
  sums, and the same in whatever order the flights came.
- **p95_delay** is the nearest-rank percentile: of n departures in ascending order the one with rank ceil(0.95 n).
  It is exact, from a count per minute of delay. Means and percentile of no departures are null.

`build` takes the operator as an argument, so the same job runs on the changelog backend and on Spark's own
``transformWithState``. The processors use nothing but Spark's `StatefulProcessor`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, GroupedData, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle, StreamingQueryListener
from pyspark.sql.streaming.listener import QueryProgressEvent, QueryStartedEvent, QueryTerminatedEvent

from backend_client import BatchProgress, ChangelogStateBackend

JOB = "flights"
ENGINES = ("changelog", "spark")

FLIGHTS_SCHEMA = "origin STRING, time_hour STRING, dest STRING, carrier STRING, flight INT, dep_delay INT"
WEATHER_SCHEMA = "origin STRING, time_hour STRING, wind_speed DOUBLE, precip DOUBLE, visib DOUBLE"
JOINED_SCHEMA = (
    "origin STRING, dest STRING, carrier STRING, flight INT, dep_delay INT, "
    "wind_speed DOUBLE, precip DOUBLE, visib DOUBLE"
)
STATS_SCHEMA = (
    "origin STRING, dest STRING, flights BIGINT, cancelled BIGINT, mean_delay DOUBLE, p95_delay INT, "
    "mean_delay_clear DOUBLE, mean_delay_rain DOUBLE, mean_delay_wind DOUBLE, mean_delay_low_visibility DOUBLE"
)
WEATHER_CLASSES = ("clear", "rain", "wind", "low_visibility")


class FlightWeatherJoin(StatefulProcessor):
    """
    Joins the flights of one airport and hour with the weather of that hour, in whatever order they come.

    The state of a key: the hour's weather, null until it is there, and the flights that wait for it.
    """

    _STATE = (
        "weather STRUCT<wind_speed: DOUBLE, precip: DOUBLE, visib: DOUBLE>, "
        "waiting ARRAY<STRUCT<dest: STRING, carrier: STRING, flight: INT, dep_delay: INT>>"
    )

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state."""
        self._hour = handle.getValueState("hour", self._STATE)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any = None) -> Iterator[Row]:  # noqa: N802, N803
        """Yield the flights that have met their weather, those that waited first."""
        stored = self._hour.get()
        weather, waiting = stored if stored is not None else (None, [])
        flights = [tuple(flight) for flight in waiting]
        weather_is_new = False
        for row in rows:
            if row.is_weather:
                weather, weather_is_new = (row.wind_speed, row.precip, row.visib), True
            else:
                flights.append((row.dest, row.carrier, row.flight, row.dep_delay))
        if weather is None:
            self._hour.update((None, flights))
            return
        if weather_is_new:
            self._hour.update((weather, []))
        wind_speed, precip, visib = weather
        for dest, carrier, flight, dep_delay in flights:
            yield Row(
                origin=key[0],
                dest=dest,
                carrier=carrier,
                flight=flight,
                dep_delay=dep_delay,
                wind_speed=wind_speed,
                precip=precip,
                visib=visib,
            )

    def close(self) -> None:
        """Hold nothing that has to be closed."""


class RouteStats(StatefulProcessor):
    """
    Keeps the statistics of one route and yields them once per batch.

    The state of a key: cancelled flights, departures per minute of delay (ascending), and per weather class the number
    of departures and the sum of their delays. It has at most one entry per distinct delay, about 300.
    """

    _STATE = (
        "cancelled BIGINT, delays ARRAY<STRUCT<minutes: INT, departures: BIGINT>>, "
        "by_weather MAP<STRING, STRUCT<departures: BIGINT, minutes: BIGINT>>"
    )

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state."""
        self._route = handle.getValueState("route", self._STATE)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any = None) -> Iterator[Row]:  # noqa: N802, N803
        """Yield the route's statistics over all flights so far."""
        stored = self._route.get()
        cancelled, old_delays, old_by_weather = stored if stored is not None else (0, [], {})
        delays = dict(old_delays)
        by_weather = {weather: tuple(totals) for weather, totals in old_by_weather.items()}
        for row in rows:
            if row.dep_delay is None:
                cancelled += 1
                continue
            delays[row.dep_delay] = delays.get(row.dep_delay, 0) + 1
            departures, minutes = by_weather.get(row.weather, (0, 0))
            by_weather[row.weather] = (departures + 1, minutes + row.dep_delay)
        histogram = sorted(delays.items())
        self._route.update((cancelled, histogram, by_weather))
        departed = sum(departures for departures, _ in by_weather.values())
        means = {f"mean_delay_{name}": _mean(*by_weather.get(name, (0, 0))) for name in WEATHER_CLASSES}
        yield Row(
            origin=key[0],
            dest=key[1],
            flights=cancelled + departed,
            cancelled=cancelled,
            mean_delay=_mean(departed, sum(minutes for _, minutes in by_weather.values())),
            p95_delay=nearest_rank(histogram, 95),
            **means,
        )

    def close(self) -> None:
        """Hold nothing that has to be closed."""


def nearest_rank(histogram: Sequence[tuple[int, int]], percent: int) -> int | None:
    """
    Return the nearest-rank percentile: the value with rank ceil(percent / 100 * n) of n values in ascending order.

    Args:
        histogram: (value, count) pairs with ascending values.
        percent: 1 to 100.

    Returns:
        The value; None without values.
    """
    remaining = -(-percent * sum(count for _, count in histogram) // 100)  # ceiling in integers
    for value, count in histogram:
        remaining -= count
        if remaining <= 0:
            return value
    return None


def _mean(count: int, total: int) -> float | None:
    return total / count if count else None


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
        """Return the operator's output, a streaming DataFrame or what takes the same calls."""


def spark_transform(grouped: GroupedData, *, name: str, **arguments: Any) -> DataFrame:  # noqa: ARG001 - see docstring
    """Apply Spark's own operator, which takes no name."""
    return grouped.transformWithState(**arguments)


def read_events(spark: SparkSession, data: Path) -> DataFrame:
    """Return flights and weather as one stream, one file of each per batch; ``is_weather`` tells them apart."""

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
        transform: Applied twice.
        data: Folder with ``flights/`` and ``weather/`` of `examples.flights_data.prepare`.

    Returns:
        In each batch one row for each route that has new flights; columns as in `STATS_SCHEMA`.
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


class RouteFiles:
    """
    The job's output: one parquet file per batch, named after the batch id.

    A batch that is executed again replaces its own file in one step, so that each batch is there once or not at all.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, batch: DataFrame, batch_id: int) -> None:
        """Write a batch; this is the function for `foreachBatch`."""
        path = self._folder / f"batch-{batch_id:08d}.parquet"
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        pq.write_table(batch.toArrow().sort_by([("origin", "ascending"), ("dest", "ascending")]), temporary)
        os.replace(temporary, path)

    def latest(self) -> pd.DataFrame:
        """Return the last row of each route over all batches, sorted by route."""
        batches: list[pd.DataFrame] = [
            pq.read_table(path).to_pandas() for path in sorted(self._folder.glob("batch-*.parquet"))
        ]
        rows = pd.concat(batches, ignore_index=True)
        latest = rows.drop_duplicates(["origin", "dest"], keep="last")
        return latest.sort_values(["origin", "dest"], ignore_index=True)


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Append one JSON line to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON lines of a file that may not exist yet, without one that a killed writer left half written."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


class ProgressLog(StreamingQueryListener):
    """Appends one JSON line per finished batch to a file: what a dashboard, or the demo, follows the job by."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._terminated = threading.Event()

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        """Ignore; the first batch tells enough."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        """Write the batch down."""
        progress = event.progress
        line = {
            "batch_id": progress.batchId,
            "rows": progress.numInputRows,
            "duration_ms": progress.durationMs.get("triggerExecution"),
            "started": progress.timestamp,
            "recorded_s": time.time(),
        }
        append_line(self._path, line)

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        """Ignore."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        """Let `wait` return."""
        self._terminated.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the query has ended and all its lines are written; return whether that is so."""
        return self._terminated.wait(timeout_s)


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
    """Return the operator of the engine that the options name."""
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
        storage: URL of its storage.
        local_dir: Folder for tables and the sidecar's socket; without it one for all jobs of the user.
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
    """Run the job until it has read all files, or for ever with an interval as trigger."""
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
    """Run the flights example on data that `examples.flights_data` has prepared."""
    parser = argparse.ArgumentParser(prog="flights", description=main.__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with flights/ and weather/")
    parser.add_argument("--checkpoint", type=Path, required=True, help="Spark's checkpoint folder of the query")
    parser.add_argument("--output", type=Path, required=True, help="folder for one parquet file per batch")
    parser.add_argument("--storage", required=True, help="where the backend keeps its state: file:///… or s3://…")
    parser.add_argument("--local-dir", type=Path, help="folder for the backend's tables (default: one per user)")
    parser.add_argument("--events", type=Path, required=True, help="file for one JSON line per finished batch")
    parser.add_argument("--figures", type=Path, help="file for one JSON line per checkpoint of the backend")
    parser.add_argument("--trigger", default="available-now", help="available-now or an interval like '1 second'")
    parser.add_argument("--engine", choices=ENGINES, default="changelog", help="who holds the state")
    parser.add_argument("--master", default="local[2]", help="Spark's master (default %(default)s)")
    parser.add_argument("--parallelism", type=int, default=4, help="partitions per operator (default %(default)s)")
    run(parser.parse_args(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
