"""
This project's operators, and Spark's own: a count and a sum per key, one row per event, to files.

The rows of a batch are written by `foreachBatch` into a folder of their own, so that a repeated batch replaces them. A
run after a kill goes on from the newest checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row
from pyspark.sql.streaming import StatefulProcessor

from backend_client import BatchProgress, ChangelogStateBackend
from backend_client.columnar import Aggregate, Count, Sum
from loadtest.bench.measuring import Enough, new_session, new_stream, run_until_enough
from loadtest.peers.jobs.progress import Progress

FOLDER = Path(os.environ["PEER_FOLDER"])
EVENTS, KEYS = int(os.environ["PEER_EVENTS"]), int(os.environ["PEER_KEYS"])
_API = os.environ["PEER_API"]
_BATCHES_MIN = 4
_ROWS = "k int, n long"


class EachEvent(StatefulProcessor):
    """A count and a sum: one update and one row per event."""

    def init(self, handle: Any) -> None:
        """Declare the state."""
        self._total = handle.getValueState("total", "n long, s double")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Yield a row per event."""
        count, amount = self._total.get() or (0, 0.0)
        for row in rows:
            count, amount = count + 1, amount + row.v
            self._total.update((count, amount))
            yield Row(k=key[0], n=count)

    def close(self) -> None:
        """Do nothing."""


def batch_rows() -> int:
    """Return the events of a batch: 100,000, or less for a short run."""
    return min(100_000, EVENTS // _BATCHES_MIN)


def main() -> None:
    """Run to the end of the events."""
    spark = new_session(FOLDER)
    progress, rows = Progress(FOLDER), batch_rows()
    backend = ChangelogStateBackend(f"file://{FOLDER}/store", job="peer", local_dir=str(FOLDER / "l"), parallelism=2)
    backend.on_progress(_note)
    spark.conf.set("spark.sql.shuffle.partitions", "2")

    def save(batch: DataFrame, batch_id: int) -> None:
        if batch_id * rows >= EVENTS:
            raise Enough
        batch.select("k", "n").write.mode("overwrite").csv(str(FOLDER / "out" / str(batch_id)))
        progress.add(rows)

    writer = _totals(new_stream(spark, rows, KEYS), backend).writeStream.outputMode("update").foreachBatch(save)
    run_until_enough(writer, FOLDER / "checkpoint")
    progress.end()
    spark.stop()


def _totals(stream: DataFrame, backend: ChangelogStateBackend) -> Any:
    if _API == "columnar":
        return backend.transform_columns(stream.groupBy("k"), Aggregate(Count(name="n"), Sum("v", name="s")))
    if _API == "row":
        return backend.transform_with_state(stream.groupBy("k"), EachEvent(), _ROWS, "Update", "None")
    return stream.groupBy("k").transformWithState(EachEvent(), _ROWS, "Update", "None")


def _note(progress: BatchProgress) -> None:
    """Note how long the checkpoint of a batch took."""
    with (FOLDER / "checkpoints_ms").open("a", encoding="ascii") as file:
        file.write(f"{progress.checkpoint_ms}\n")


if __name__ == "__main__":
    main()
