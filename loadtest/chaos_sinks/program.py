"""
The query that is killed: reads files, keeps a state per key, publishes through a `KillingSink`.

Each output row has the number that the key's state had before, drawn at random, and the new one: the output itself
shows whether it belongs to the state. After a restart the query goes on. When the file ``finish`` exists, it processes
what is left, stops and makes the file ``finished``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from pyspark.sql import Row
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from backend_client import ChangelogStateBackend
from backend_client.service.job_session import JobSession
from backend_client.spark.output.outputs import SinkOutput
from dstl_service.wire import CompleteResponse
from loadtest.chaos_sinks.steps import KillingSink, Orders
from loadtest.chaos_sinks.systems import SYSTEMS
from tools.spark_session import EXECUTORS_DIE, TWO_EXECUTORS, start_session

INPUT, OUTPUT = "k string, v long", "k string, n long, s long, before long, now long"


class Draws(StatefulProcessor):
    """Counts and sums each key's rows, and draws a number that no second attempt would repeat."""

    def init(self, handle: Any) -> None:
        """Declare the state."""
        self.totals = handle.getValueState("totals", "n long, s long, now long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Yield one row per key and batch."""
        n, s, before = self.totals.get() or (0, 0, 0)
        for row in rows:
            n, s = n + 1, s + row.v
        now = random.SystemRandom().randrange(1, 1 << 60)
        self.totals.update((n, s, now))
        yield Row(k=key[0], n=n, s=s, before=before, now=now)

    def close(self) -> None:
        """Nothing to close."""


class _KilledDriver:
    """Reaches the driver's steps, by wrapping two methods."""

    def __init__(self, orders: Orders) -> None:
        log, complete = SinkOutput.log, JobSession.complete

        def logged(output: SinkOutput, *arguments: Any) -> Any:
            refs = log(output, *arguments)
            orders.reach("logged")
            return refs

        def completed(session: JobSession, *arguments: Any) -> CompleteResponse:
            response = complete(session, *arguments)
            orders.reach("completed")
            return response

        SinkOutput.log = logged  # type: ignore[method-assign,assignment]
        JobSession.complete = completed  # type: ignore[method-assign,assignment]


def main() -> None:
    """Run the query to its end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--local-dir", required=True)
    parser.add_argument("--system", required=True)
    parser.add_argument("--parameters", type=json.loads, required=True)
    options = parser.parse_args()
    folder: Path = options.folder
    orders = Orders(str(folder))
    settings = {**EXECUTORS_DIE, "driver.memory": "1g"}
    spark = start_session("dstl-chaos-sinks", settings, master=TWO_EXECUTORS, folder=folder, log_level="ERROR")
    orders.announce([os.getpid(), *(child.pid for child in psutil.Process().children() if child.name() == "java")])
    _KilledDriver(orders)
    backend = ChangelogStateBackend(
        f"file://{folder}/store", job="job", local_dir=options.local_dir, parallelism=3, patience_s=20
    )
    stream = spark.readStream.schema(INPUT).option("maxFilesPerTrigger", 1).json(str(folder / "in"))
    result = backend.transform_with_state(stream.groupBy("k"), Draws(), OUTPUT, "Update", "None")
    if options.system == "kafka":
        record = F.to_json(F.struct("k", "n", "s", "before", "now")).alias("value")
        result = result.select(F.col("k").alias("key"), record)
    sink = KillingSink(SYSTEMS[options.system].sink(options.parameters), orders)
    writer = result.writeStream.sink(sink, slots=2).option("checkpointLocation", str(folder / "chk"))
    query = writer.start()
    while not (folder / "finish").exists():
        if not query.isActive:
            query.awaitTermination()
        time.sleep(0.1)
    query.processAllAvailable()
    query.stop()
    (folder / "finished").touch()
    spark.stop()


if __name__ == "__main__":
    main()
