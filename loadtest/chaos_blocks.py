"""
Kills executors while a batch's output is being read, and verifies that output and state are of one attempt (I18).

Two chained operators keep and yield random numbers, each with the previous number, so that the output itself shows
whether state and output match: the "before" of a batch is the "now" of the batch before it. An executor is killed
alternately between two actions of the user's function and between the two operators; its blocks are lost, and Spark
computes them again, with other numbers.

``python -m loadtest.chaos_blocks [--kills N]`` writes ``reports/chaos-blocks.json``; STRICT=1 makes it fail if a goal
is missed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyspark
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from backend_client import ChangelogStateBackend
from backend_client.progress import BatchProgress
from backend_client.spark.api.plan import StatefulDataFrame
from backend_client.spark.driver.driver import BatchRunner
from backend_client.spark.driver.passes import Passes
from backend_client.spark.output.outputs import FunctionPlan
from backend_client.spark.start.spark_checkpoint import CheckpointLog
from loadtest.bench.measuring import Enough, run_until_enough
from tools.reporting.figures import Figure, Goal
from tools.reporting.target import TargetReport, positive
from tools.spark_session import FORKED_WORKERS, start_session

KILLS = 20
KEYS = 24
EXECUTORS = 2
_EXECUTORS_TIMEOUT_S = 60.0
_QUERY_TIMEOUT_S = 900
_QUIET_BATCHES = 1
_ACTIONS, _OPERATORS = "between two actions", "between two operators"

Numbers = dict[int, tuple[int, int, int, int]]


class Dice(StatefulProcessor):
    """Keeps a number that no second attempt would repeat; yields the previous and the new one."""

    def __init__(self, name: str) -> None:
        self.name = name

    def init(self, handle: Any) -> None:
        """Declare the state."""
        self.number = handle.getValueState("number", "n long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Draw a number once per key and batch; values from the operator before are passed on."""
        row = next(rows)
        brought = {name: getattr(row, name) for name in ("before_first", "now_first") if hasattr(row, name)}
        before = (self.number.get() or (0,))[0]
        now = random.SystemRandom().randrange(1, 1 << 60)
        self.number.update((now,))
        yield Row(k=key[0], **brought, **{f"before_{self.name}": before, f"now_{self.name}": now})

    def close(self) -> None:
        """Nothing to close."""


@dataclass(slots=True)
class Outcome:
    """Result of the kills."""

    kills: Counter[str] = field(default_factory=Counter)
    parted_actions: int = 0
    parted_state: int = 0
    batches: int = 0
    repeated: int = 0


class Killer:
    """Decides which batch loses an executor, and when; verifies the batches' output."""

    def __init__(self, kills: int, chance: random.Random) -> None:
        self.outcome = Outcome()
        self._kills = kills
        self._chance = chance
        self._seen: dict[int, Numbers] = {}
        self._hit: set[int] = set()

    def at(self, moment: str, batch_id: int) -> None:
        """Kill an executor if this is the batch's moment, once per batch."""
        number = batch_id - _QUIET_BATCHES
        due = _ACTIONS if number % 2 == 0 else _OPERATORS
        if 0 <= number < self._kills and batch_id not in self._hit and due == moment:
            self._hit.add(batch_id)
            os.kill(self._chance.choice(_executors()), signal.SIGKILL)
            self.outcome.kills[moment] += 1

    def function(self, batch: DataFrame, batch_id: int) -> None:
        """Read the batch twice, as a user's function may."""
        if batch_id > self._kills + _QUIET_BATCHES:
            raise Enough
        first = _numbers(batch)
        self.at(_ACTIONS, batch_id)
        second = _numbers(batch.orderBy("k"))
        self.outcome.parted_actions += first != second
        self._seen[batch_id] = second

    def check(self) -> None:
        """Compare each batch with the one before it."""
        self.outcome.batches = len(self._seen)
        for batch_id in range(1, len(self._seen)):
            before, now = self._seen[batch_id - 1], self._seen[batch_id]
            for key, (before_first, _, before_second, _) in now.items():
                _, now_first, _, now_second = before[key]
                self.outcome.parted_state += (before_first, before_second) != (now_first, now_second)


class _KillingPasses(Passes):
    """Calls the killer between two operators."""

    killer: Killer

    def _run(self, operator: Any, info: Any, frame: DataFrame, work: Any, earlier: Any) -> DataFrame:
        if operator.name == "second":
            self.killer.at(_OPERATORS, work.context.checkpoint_id)
        return super()._run(operator, info, frame, work, earlier)


class _KillingRunner(BatchRunner):
    """Has the operators run by such passes."""

    passes_type = _KillingPasses

    def kill_by(self, killer: Killer) -> None:
        """Have this killer called."""
        assert isinstance(self._passes, _KillingPasses)
        self._passes.killer = killer


def run(kills: int, seed: int, folder: Path) -> Outcome:
    """
    Run one query to its end under kills.

    Args:
        kills: One per batch.
        seed: Decides which executor is killed.
        folder: Empty folder for data.
    """
    spark = _session(folder)
    local_dir = tempfile.mkdtemp(prefix="dstl-")
    backend = ChangelogStateBackend((folder / "store").as_uri(), job="dice", local_dir=local_dir, parallelism=3)
    killer = Killer(kills, random.Random(seed))
    try:
        progress: list[BatchProgress] = []
        query = _chain(spark, backend).statefulQuery
        log = CheckpointLog(spark, str(folder / "c"))
        runner = _KillingRunner.open(query, FunctionPlan(killer.function), log, progress.append)
        assert isinstance(runner, _KillingRunner)
        runner.kill_by(killer)
        writer = _rows(spark).writeStream.foreachBatch(runner)
        if run_until_enough(writer, folder / "c", _QUERY_TIMEOUT_S).exception() is None:
            raise TimeoutError(f"the query did not end within {_QUERY_TIMEOUT_S} s")
        killer.check()
        killer.outcome.repeated = sum(batch.tries > 1 for batch in progress)
    finally:
        spark.stop()
        os.kill(int(Path(backend.auto_started_sidecar.pid_path).read_text(encoding="utf-8")), signal.SIGTERM)
        shutil.rmtree(local_dir, ignore_errors=True)
    return killer.outcome


def figures_of(outcome: Outcome, kills: int) -> list[Figure]:
    """Return the figures of a run, with goals."""
    return [
        *(
            Figure(f"kills {moment}", outcome.kills[moment], "kills", Goal(">=", kills // 2))
            for moment in (_ACTIONS, _OPERATORS)
        ),
        Figure("batches", outcome.batches, "batches", Goal(">=", kills + _QUIET_BATCHES)),
        Figure("batches executed again", outcome.repeated, "batches"),
        Figure("actions of one batch that saw different rows", outcome.parted_actions, "batches", Goal("==", 0)),
        Figure("keys whose state is not of the output", outcome.parted_state, "keys", Goal("==", 0)),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; return the exit code."""
    parser = argparse.ArgumentParser(description="Kill executors while a batch's output is read.")
    parser.add_argument("--kills", type=positive, default=KILLS)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    report = TargetReport("chaos-blocks")
    folder = Path(tempfile.mkdtemp(prefix="dstl-blocks-"))
    started = time.monotonic()
    try:
        figures = figures_of(run(options.kills, options.seed, folder), options.kills)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    figures.append(Figure("run time", round(time.monotonic() - started, 1), "s"))
    for figure in figures:
        print(f"{figure.name:48} {figure.value:>8} {figure.unit:8} {figure.goal or ''}")
    return report.write(figures)


def _rows(spark: SparkSession) -> DataFrame:
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", KEYS).option("numPartitions", 2)
    return rate.load().select((F.col("value") % KEYS).cast("int").alias("k"))


def _chain(spark: SparkSession, backend: ChangelogStateBackend) -> StatefulDataFrame:
    output = "k int, before_first long, now_first long"
    first = backend.transform_with_state(
        _rows(spark).groupBy("k"), Dice("first"), output, "Update", "None", name="first"
    )
    output += ", before_second long, now_second long"
    return backend.transform_with_state(first.groupBy("k"), Dice("second"), output, "Update", "None", name="second")


def _numbers(batch: DataFrame) -> Numbers:
    return {
        row.k: (row.before_first, row.now_first, row.before_second, row.now_second) for row in batch.toLocalIterator()
    }


def _executors() -> list[int]:
    """Return the process ids of all executors, once all have started."""
    deadline = time.monotonic() + _EXECUTORS_TIMEOUT_S
    while True:
        found = [process.pid for process in psutil.Process().children(recursive=True) if _is_executor(process)]
        if len(found) == EXECUTORS:
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(found)} of {EXECUTORS} executors have started")
        time.sleep(0.1)


def _is_executor(process: psutil.Process) -> bool:
    try:
        return "org.apache.spark.executor.CoarseGrainedExecutorBackend" in process.cmdline()
    except psutil.Error:
        return False


def _session(folder: Path) -> SparkSession:
    os.environ["SPARK_HOME"] = str(Path(pyspark.__file__).parent)  # executors of a local cluster start from there
    settings = {
        **FORKED_WORKERS,
        "driver.memory": "1g",
        "executor.memory": "1g",
        "task.maxFailures": 8,
        "shuffle.io.retryWait": "0s",  # blocks of a killed executor never return
        "deploy.maxExecutorRetries": -1,
        "shuffle.reduceLocality.enabled": "false",
        "cores.max": EXECUTORS,  # one each: the first batch waits for all, so that all hold blocks
        "scheduler.minRegisteredResourcesRatio": 1.0,
        "scheduler.maxRegisteredResourcesWaitingTime": "60s",
    }
    return start_session("dstl-chaos-blocks", settings, master=f"local-cluster[{EXECUTORS},1,1024]", folder=folder)


if __name__ == "__main__":
    sys.exit(main())
