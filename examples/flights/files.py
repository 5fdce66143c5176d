"""The flights example's files beside Spark's checkpoint: its output, and JSON lines with its progress."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql.streaming import StreamingQueryListener
from pyspark.sql.streaming.listener import QueryProgressEvent, QueryStartedEvent, QueryTerminatedEvent


class RouteFiles:
    """
    The job's output: one parquet file per batch, named after the batch id.

    A batch that is executed again replaces its own file atomically, so each batch is present once or not at all.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, batch: DataFrame, batch_id: int) -> None:
        """Write a batch; pass this function to `foreachBatch`."""
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
    """Return the JSON lines of a file that may not exist yet, without a line that a killed writer left incomplete."""
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
    """Appends one JSON line per finished batch to a file, with which a dashboard or the demo follows the job."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._terminated = threading.Event()

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        """Ignore; the first batch is recorded anyway."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        """Record the batch."""
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
        """Release `wait`."""
        self._terminated.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the query has ended and all its lines are written; return False at the timeout."""
        return self._terminated.wait(timeout_s)
