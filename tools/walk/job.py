"""A small job for `tools.walk`: three batches of ten keys, two partitions. Argument: its folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

from backend_client import ChangelogStateBackend

_BATCHES = 3


class Count(StatefulProcessor):
    """Counts the rows of each key."""

    def init(self, handle: Any) -> None:
        """Declare the state."""
        self.count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803 - Spark's names
        """Add the key's rows."""
        (counted,) = self.count.get() or (0,)
        self.count.update((counted + sum(1 for _ in rows),))
        yield Row(k=key[0], n=self.count.get()[0])

    def close(self) -> None:
        """Nothing is open."""


def main(folder: Path) -> None:
    """Run the job in this folder."""
    (folder / "in").mkdir()
    for batch in range(_BATCHES):
        rows = (json.dumps({"k": f"key-{key}"}) + "\n" for key in range(10))
        (folder / "in" / f"{batch}.json").write_text("".join(rows), encoding="utf-8")
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    stream = spark.readStream.schema("k string").option("maxFilesPerTrigger", 1).json(str(folder / "in"))
    backend = ChangelogStateBackend(f"file://{folder}/store", job="walk", local_dir=f"{folder}/local", parallelism=2)

    counts = backend.transform_with_state(
        stream.groupBy("k"), Count(), "k string, n long", outputMode="Update", timeMode="None"
    )
    writer = counts.writeStream.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True)
    writer.foreachBatch(lambda batch, _id: batch.foreach(lambda _row: None)).start().awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
