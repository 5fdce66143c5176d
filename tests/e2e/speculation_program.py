"""
The driver of two queries whose output takes long in one task, on a cluster where Spark speculates.

With the recommended settings slow tasks get a second attempt.

``python -m tests.e2e.speculation_program --master URL --folder FOLDER``; an error means that output is missing, or that
a query ended.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend_client import ChangelogStateBackend
from backend_client.sinks.protocol import Slot, SlotPublisher
from tests.e2e.support import OUTPUT, Totals, random_input, read_input, write_input
from tools.servers.sqlite_sink import SqliteSink
from tools.spark_session import start_session

FILES = random_input(seed=5, batches=2, rows=40, keys=20)
TAKES_S = 5.0
SETTINGS = {
    "driver.memory": "1g",
    "executor.memory": "700m",
    "cores.max": 4,
    "scheduler.minRegisteredResourcesRatio": 1.0,
    "scheduler.maxRegisteredResourcesWaitingTime": "60s",
    **{one.name.removeprefix("spark."): one.value for one in ChangelogStateBackend.recommended_settings()},
}


class SlowSlot(SqliteSink):
    """Takes its time in one slot."""

    def open(self, slot: Slot) -> SlotPublisher:
        """Open the slot, and publish late."""
        publisher = super().open(slot)
        if slot.number == 1:
            time.sleep(TAKES_S)
        return publisher


@dataclass
class SlowRow:
    """Appends each row's key to a file; takes its time for one row."""

    written: Path

    def process(self, row: Any) -> None:
        """Write a row."""
        if row.k == "key-1":
            time.sleep(TAKES_S)
        with self.written.open("a") as written:
            written.write(f"{row.k}\n")


def main() -> None:
    """Run both queries to their ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--master", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    folder: Path = options.folder
    write_input(folder / "in", FILES)
    spark = start_session("dstl-speculation", SETTINGS, master=options.master, folder=folder, log_level="ERROR")

    def writer(job: str) -> Any:
        backend = ChangelogStateBackend(f"file://{folder / 'store'}", job=job, parallelism=4)
        stream = read_input(spark, folder / "in").groupBy("k")
        totals = backend.transform_with_state(stream, Totals(), OUTPUT, "Update", "None")
        return totals.writeStream.option("checkpointLocation", str(folder / job)).trigger(availableNow=True)

    sink = SlowSlot(str(folder / "out.db"))
    queries = [
        writer("once").sink(sink, slots=2, patience_s=60),
        writer("at-most-once").foreach(SlowRow(folder / "written")).guarantee("at-most-once"),
    ]
    errors = []
    for query in queries:
        try:
            query.start().awaitTermination()
        except Exception as error:  # noqa: BLE001 - the other query runs, too
            errors.append(f"{type(error).__name__}: {str(error)[:1000]}")
    spark.stop()
    assert not errors, errors
    expected = sum(len({key for key, _ in rows}) for rows in FILES)
    assert (len(sink.records()), len((folder / "written").read_text().split())) == (expected, expected)


if __name__ == "__main__":
    main()
