"""
Runs the sides of a workload in turn, and takes their trigger times.

Each side has one query. In its turn it is started from its checkpoint, runs some batches, and is stopped. The batches
of the first turn, which also compiles the code, and the first ones after each start do not count. Turns make the
hour's noise the same on all sides.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from backend_client import ChangelogStateBackend
from loadtest.bench.measuring import Enough, open_backend, run_until_enough
from loadtest.bench_native.workloads import DSTL, FLOOR, Workload, floor

COMPARED_BATCHES = 2
TURN_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Extent:
    """
    How long to measure: turns that count, seconds of the first turn and of others, batches of a turn at least.

    Without a turn that counts, the first one does.
    """

    rounds: int = 3
    warm_up_s: float = 30
    turn_s: float = 8
    skipped: int = 2
    counted_min: int = 3


SHORT = Extent(rounds=0, warm_up_s=0, turn_s=0, skipped=1, counted_min=1)


@dataclass
class Side:
    """One side of a workload: its query's output of the first batches, and the medians (ms) of its turns."""

    workload: Workload
    name: str
    folder: Path
    backend: ChangelogStateBackend
    rows: int
    output: list[Counter[tuple[Any, ...]]] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)

    def turn(self, spark: SparkSession, run_s: float, skipped: int, counted_min: int) -> None:
        """
        Run the query for a while, and take the median of the turn's triggers.

        Raises:
            TimeoutError: There were too few batches in time.
        """
        began, first = time.monotonic(), -1
        compared = self.workload.compared.get(self.name)

        def save(batch: DataFrame, batch_id: int) -> None:
            nonlocal first
            first = batch_id if first < 0 else first
            if batch_id >= first + skipped + counted_min and time.monotonic() - began >= run_s:
                raise Enough
            if compared is not None and batch_id < COMPARED_BATCHES:
                rows = batch.selectExpr(*compared).toArrow().to_pydict()
                self.output[batch_id:] = [Counter(zip(*rows.values(), strict=True))]
            else:
                batch = floor(batch) if self.name == FLOOR else batch
                batch.write.format("noop").mode("overwrite").save()

        frame = self.workload.sides[self.name](spark, self.rows, self.backend)
        writer = frame.writeStream.outputMode(self.workload.output_mode).foreachBatch(save)
        query = run_until_enough(writer, self.folder / "checkpoint", TURN_TIMEOUT_S)
        counted = [batch for batch in query.recentProgress if batch["batchId"] >= first + skipped]
        if len(counted) < counted_min:
            raise TimeoutError(f"{self.name}: {len(counted)} of {counted_min} batches in {TURN_TIMEOUT_S} s")
        self.medians.append(statistics.median(int(batch["durationMs"]["triggerExecution"]) for batch in counted))
        print(f"  {self.name}: {self.medians[-1]:,.0f} ms, median of {len(counted)} triggers", flush=True)


@dataclass(frozen=True, slots=True)
class Result:
    """A workload's medians (ms) by side, over the medians of its turns; and how many output rows differ."""

    medians: Mapping[str, float]
    differing: int


def measure(spark: SparkSession, workload: Workload, folder: Path, extent: Extent, rows: int) -> Result:
    """
    Run a workload's sides in turn.

    Args:
        spark: The session.
        workload: The workload.
        folder: Holds checkpoints and storage of its queries.
        extent: How long to measure.
        rows: Rows of a batch.

    Raises:
        TimeoutError: A side had too few batches in time.
    """
    with open_backend(folder, int(str(spark.conf.get("spark.sql.shuffle.partitions")))) as backend:
        sides = [Side(workload, name, folder / name, backend, rows) for name in workload.sides]
        for side in sides:
            side.turn(spark, extent.warm_up_s, COMPARED_BATCHES, extent.counted_min)
            if extent.rounds:
                side.medians.clear()
        for _ in range(extent.rounds):
            for side in sides:
                side.turn(spark, extent.turn_s, extent.skipped, extent.counted_min)
    medians = {side.name: statistics.median(side.medians) for side in sides}
    return Result(medians, _differing(sides))


def _differing(sides: list[Side]) -> int:
    """Return how many rows of the first batches only one side has."""
    reference, *others = [side for side in sides if side.name in side.workload.compared]
    count = sum(abs(COMPARED_BATCHES - len(side.output)) for side in sides if side.name in side.workload.compared)
    for side in others:
        assert side.name == DSTL
        for theirs, ours in zip(reference.output, side.output, strict=True):
            count += (theirs - ours).total() + (ours - theirs).total()
    return count
