"""
A driver of `bench_restart`.

``python -m loadtest.bench_restart_driver SIDE[,SIDE] FOLDER KEYS BATCHES PARTITIONS``
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from backend_client import ChangelogStateBackend
from loadtest.bench.measuring import Enough, new_session, new_stream, run_until_enough
from loadtest.bench.processors import TOTALS, Totals
from loadtest.bench.workloads import rows

FIRST_BATCH = "first batch"
_BATCHES_PER_KEY = 10


def backend_in(folder: Path, partitions: int = 1) -> ChangelogStateBackend:
    """Return the backend of a benchmark's folder."""
    return ChangelogStateBackend(
        f"file://{folder}/store", job="bench", local_dir=str(folder / "local"), parallelism=partitions
    )


def main(sides: Sequence[str], folder: Path, keys: int, batches: int, partitions: int) -> None:
    """Run that many batches of a tenth of the keys on each side."""
    spark = new_session(folder)
    spark.conf.set("spark.sql.shuffle.partitions", str(partitions))
    for side in sides:
        _run(spark, side, folder, keys, batches, partitions)
    spark.stop()


def _run(spark: SparkSession, side: str, folder: Path, keys: int, batches: int, partitions: int) -> None:
    """Run the batches of a side; print a line when the first one has ended."""
    backend = backend_in(folder, partitions) if side == "DSTL" else None
    operator = rows(Totals, TOTALS)(new_stream(spark, keys // _BATCHES_PER_KEY, keys), backend)
    first: int | None = None

    def save(batch: DataFrame, batch_id: int) -> None:
        nonlocal first
        first = batch_id if first is None else first
        if batch_id > first:
            print(FIRST_BATCH, flush=True)  # Spark calls for the next one when it has committed the one before
        if batch_id >= first + batches:
            raise Enough
        batch.write.format("noop").mode("overwrite").save()

    writer = operator.writeStream.outputMode("update").foreachBatch(save)
    run_until_enough(writer, folder / f"checkpoint-{side}")


if __name__ == "__main__":
    main(sys.argv[1].split(","), Path(sys.argv[2]), *map(int, sys.argv[3:]))
