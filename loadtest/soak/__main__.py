"""
``make soak``: 5,000 small batches of a real query on S3, and whether anything grows meanwhile.

Two operators in a chain, one with event-time timers, on recurring keys, so that the state's size stays constant.
Memory of driver, JVM, workers and sidecar, the time of a batch, objects in the bucket and files on the local disk are
measured every few batches; the last third of the run is compared with the second.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from pyspark.sql import DataFrame

from loadtest.bench.measuring import Enough, new_stream, open_backend, run_until_enough
from loadtest.bench.workloads import columns, timers
from loadtest.bench_service import line_of
from loadtest.soak.samples import THIRDS, figures, histories
from loadtest.soak.watcher import Watcher
from tools.reporting.target import TargetReport, is_set
from tools.servers.s3_server import S3Server
from tools.spark_session import start_session

BUCKET = "soak"
BATCHES = 5_000
_SAMPLES = 250
_LEAST = 2 * THIRDS
_ROWS, _KEYS, _PARTITIONS = 1_000, 5_000, 4
_SERVICE = {
    # Work that runs every ten minutes by default runs often enough to be equal in each third of the run.
    "DSTL_MATERIALIZATION_INTERVAL_S": "30",
    "DSTL_RETENTION_DELAY_S": "10",
    "DSTL_GC_INTERVAL_S": "60",
    # Caches and logs that are full before the first third ends.
    "DSTL_CACHE_BYTES_MAX": str(16 << 20),
    "DSTL_LOG_FILE_BYTES_MAX": str(64 << 10),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and write ``reports/soak.json``; return the exit code."""
    parser = argparse.ArgumentParser(description="Run small batches, and look whether anything grows.")
    parser.add_argument("--batches", type=int, default=0, help=f"how many, at least {_LEAST}; {BATCHES:,} by default")
    parser.add_argument("--short", action="store_true", default=is_set("SHORT"), help="60 batches (SHORT=1)")
    parser.add_argument("--strict", action="store_true", default=is_set("STRICT"), help="fail if a goal is missed")
    options = parser.parse_args(arguments)
    batches = options.batches or (60 if options.short else BATCHES)
    if batches < _LEAST:
        parser.error(f"--batches: at least {_LEAST}")
    report = TargetReport("soak", strict=options.strict)
    with tempfile.TemporaryDirectory(prefix="dstl-s-", ignore_cleanup_errors=True) as place, S3Server() as server:
        os.environ.update(server.env() | _SERVICE)
        server.create_bucket(BUCKET)
        samples = _run(Path(place), server, batches).samples
    found = figures(samples, batches)
    for figure in found:
        print(line_of(figure))
    return report.write(found, histories(samples))


def _run(folder: Path, server: S3Server, batches: int) -> Watcher:
    spark = start_session(
        "dstl-soak", {"driver.memory": "1g", "local.dir": folder / "spark"}, folder=folder, log_level="ERROR"
    )

    def save(batch: DataFrame, batch_id: int) -> None:
        if batch_id >= batches:
            raise Enough
        batch.write.format("noop").mode("overwrite").save()
        if batch_id % 100 == 0:
            print(f"batch {batch_id:,}", flush=True)

    with open_backend(folder, _PARTITIONS, f"s3://{BUCKET}") as backend, closing(server.client()) as client:
        folders = folder, Path(backend.settings.local_dir)
        watcher = Watcher(spark, backend, client, BUCKET, folders, max(1, batches // _SAMPLES))
        backend.on_progress(watcher.observe)
        counted = timers(new_stream(spark, _ROWS, _KEYS, with_time=True), backend)
        totals = columns(counted.selectExpr("k % 100 as k", "cast(n as double) as v"), backend)
        run_until_enough(totals.writeStream.outputMode("update").foreachBatch(save), folder / "checkpoint")
    spark.stop()
    return watcher


if __name__ == "__main__":
    sys.exit(main())
