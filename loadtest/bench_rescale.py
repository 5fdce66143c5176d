"""
``make bench-rescale``: the batches of a running query while its operator changes from 4 to 8 and to 3 partitions.

On a cluster of two executors, in the short form in one process, batches follow each other without a pause. Every
batch's output is compared with its rows: exactly as many are counted as there were. The report has the batch that
switches apart from the others, among them those beside which the new partitions' tables are prepared; the page has a
plot of all.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pyspark.sql import DataFrame

from backend_client import BatchProgress, ChangelogStateBackend
from loadtest.bench.measuring import Enough, new_stream, open_backend, run_until_enough
from loadtest.bench.processors import TOTALS, Totals
from tools.reporting.figures import Figure, Goal
from tools.reporting.history import History
from tools.reporting.page import HtmlReport
from tools.reporting.plots import Marker, Series
from tools.reporting.target import TargetReport, is_set
from tools.spark_session import TWO_EXECUTORS, start_session

STEPS = (4, 8, 3)
_OPERATOR = "Totals"


@dataclass(slots=True)
class Run:
    """
    Requests the steps, and observes the batches.

    Args:
        backend: The query's backend.
        rows: Rows of each batch.
        warm_up: Batches before the first measured one.
        between: Batches before each request, and after the last switch.
    """

    backend: ChangelogStateBackend
    rows: int
    warm_up: int
    between: int
    durations_ms: list[float] = field(default_factory=list)
    switches: dict[int, int] = field(default_factory=dict)
    """The new parallelism by the number of the batch that switched."""
    wrong_batches: int = 0
    _counts: dict[int, int] = field(default_factory=dict)
    _left: deque[int] = field(default_factory=lambda: deque(STEPS[1:]))
    _wanted: int = STEPS[0]
    _since: int = 0

    def save(self, batch: DataFrame, batch_id: int) -> None:
        """Compare a batch's output with its rows; request the next step when it is due."""
        if batch_id >= self.warm_up and not self._left and self._since > self.between:
            raise Enough
        counted = 0
        for key, count, _ in batch.collect():
            counted += count - self._counts.get(key, 0)
            self._counts[key] = count
        self.wrong_batches += counted != self.rows
        present = self.backend.parallelism()[_OPERATOR]
        if present == self._wanted:
            self._since += 1
        if batch_id >= self.warm_up and self._since > self.between and self._left:
            self._wanted, self._since = self._left.popleft(), 0
            self.backend.rescale(_OPERATOR, self._wanted)

    def observe(self, progress: BatchProgress) -> None:
        """Note a finished batch's duration, and whether it switched."""
        present = self.backend.parallelism()[_OPERATOR]
        before = next(reversed(self.switches.values()), STEPS[0])
        if present != before:
            self.switches[progress.batch_id] = present
        self.durations_ms.append(progress.total_ms)

    def history(self) -> History:
        """Return the duration of each batch."""
        points = [(float(number), ms) for number, ms in enumerate(self.durations_ms)]
        markers = [Marker(float(number), f"{parallelism} partitions") for number, parallelism in self.switches.items()]
        return History(
            "Batches of a query that is rescaled", "batch", "ms", (Series("duration", points),), tuple(markers)
        )

    def figures(self) -> list[Figure]:
        """Return the figures of the batches after the warm-up."""
        measured = dict(enumerate(self.durations_ms))
        measured = {number: ms for number, ms in measured.items() if number >= self.warm_up}
        others = [ms for number, ms in measured.items() if number not in self.switches]
        median = statistics.median(others)
        return [
            Figure("batches with another count than their rows", self.wrong_batches, "batches", Goal("==", 0)),
            Figure("switches", len(self.switches), "switches", Goal("==", len(STEPS) - 1)),
            Figure("batch, median", median, "ms"),
            Figure("slowest batch but those that switch / median", max(others) / median, "ratio", Goal("<=", 1.5)),
            *(
                Figure(f"batch that switches to {number} / median", measured[at] / median, "ratio", Goal("<=", 3))
                for at, number in self.switches.items()
            ),
        ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write ``reports/bench-rescale.json`` and the page; return the exit code."""
    parser = argparse.ArgumentParser(description="Measure the batches of a query that is rescaled.")
    parser.add_argument("--short", action="store_true", default=is_set("SHORT"), help="few keys and batches (SHORT=1)")
    parser.add_argument("--strict", action="store_true", default=is_set("STRICT"), help="fail if a goal is missed")
    options = parser.parse_args(arguments)
    rows, keys, warm_up, between = (500, 2_000, 1, 1) if options.short else (20_000, 200_000, 40, 20)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place,
        open_backend(Path(place), STEPS[0]) as backend,
    ):
        run = Run(backend, rows, warm_up, between)
        _run(run, Path(place), keys, "local[2]" if options.short else TWO_EXECUTORS)
    report = TargetReport("bench-rescale", strict=options.strict)
    exit_code = report.write(run.figures(), [run.history()])
    _write_page(run, Path("reports/bench-rescale.html"))
    for figure in run.figures():
        print(f"{figure.name:50} {figure.value:10,.2f} {figure.unit:8} {figure.goal or ''}")
    return exit_code


def _run(run: Run, folder: Path, keys: int, master: str) -> None:
    spark = start_session("dstl-bench-rescale", {"shuffle.reduceLocality.enabled": "false"}, master=master)
    run.backend.on_progress(run.observe)
    stream = new_stream(spark, run.rows, keys).groupBy("k")
    result = run.backend.transform_with_state(stream, Totals(), TOTALS, "Update", "None")
    writer = result.writeStream.outputMode("update").foreachBatch(run.save)
    run_until_enough(writer, folder / "checkpoint")
    spark.stop()


def _write_page(run: Run, path: Path) -> None:
    page = HtmlReport("A running query is rescaled", "Duration of each batch; the lines are the batches that switch.")
    page.add_plot(run.history().svg())
    page.add_figures(run.figures())
    page.write(path)


if __name__ == "__main__":
    sys.exit(main())
