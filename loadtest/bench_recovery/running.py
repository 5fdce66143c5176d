"""Runs a column: starts its driver, loses executors, and observes the cost."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from loadtest.bench_recovery.event_log import EventLog
from loadtest.bench_recovery.hosts import BUCKET, Hosts
from loadtest.bench_recovery.observed import Observed
from loadtest.bench_recovery.plan import HOST, PROCESS, RESTART, TASK, Column, QueryPlan, Size
from loadtest.bench_recovery.query import EVENTS, OBSERVED, STOP

_TIMEOUT_S = 240.0
_FIRST_BATCH_TIMEOUT_S = 1_800.0
_COPIES_TIMEOUT_S = 900.0
STANDBY_LAG_MAX = 5


@dataclass(frozen=True, slots=True)
class Loss:
    """
    One loss, and what it cost; times are those of the machine's monotonic clock.

    Args:
        way: What was lost.
        moment_s: When.
        affected: The partitions that ran there.
        whole_s: When all of them had run again, and no row waited.
        copied_s: When all copies were complete again; None without standbys.
        over_s: When nothing of it was left.
        read_bytes: What tasks' tables read beyond the usual.
    """

    way: str
    moment_s: float
    affected: frozenset[int]
    whole_s: float
    copied_s: float | None
    over_s: float
    read_bytes: float


@dataclass(slots=True)
class ColumnRun:
    """The observations of a column's query and of its losses."""

    column: Column
    size: Size
    observed: Observed = field(default_factory=Observed)
    losses: list[Loss] = field(default_factory=list)
    calm_s: list[tuple[float, float]] = field(default_factory=list)
    """Times without a loss or its consequences, by which the undisturbed batch is measured."""
    events: EventLog = field(default_factory=EventLog)
    """What Spark did."""


class Driver:
    """
    A running driver of a column.

    Args:
        hosts: The cluster.
        run: The column; gets what is observed.
    """

    def __init__(self, hosts: Hosts, run: ColumnRun) -> None:
        self._hosts = hosts
        self._run = run
        self._folder = hosts.folder / f"column-{run.column.name}"
        self._folder.mkdir(exist_ok=True)
        job = "dstl" if run.column.is_ours else "spark"
        self._plan = QueryPlan(
            run.size,
            run.column,
            hosts.master_url,
            hosts.driver_address,
            f"s3://{BUCKET}/{job}",
            str(hosts.folder / f"checkpoint-{job}"),
            str(self._folder),
        )
        self._read = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        (self._folder / STOP).touch()
        assert self._process is not None
        try:
            self._process.wait(_TIMEOUT_S if error is None else 1)
        except subprocess.TimeoutExpired:
            self.kill()
        self.look()
        for file in sorted((self._folder / EVENTS).iterdir()):
            with file.open(encoding="utf-8") as lines:
                self._run.events.take(lines)

    def start(self) -> None:
        """Start the driver's process."""
        plan = self._folder / "plan.json"
        self._plan.write(plan)
        root = str(Path(__file__).parents[2])
        environment = {**os.environ, "SPARK_LOCAL_IP": self._hosts.driver_address, "PYTHONPATH": root}
        with (self._folder / "driver.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "loadtest.bench_recovery.query", str(plan)],
                stdout=log,
                stderr=log,
                env=environment,
                cwd=self._folder,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill the driver: its interpreter and its JVM, which are one session."""
        assert self._process is not None
        os.killpg(self._process.pid, 9)
        self._process.wait()

    def look(self) -> Observed:
        """Take what the driver has written since."""
        file = self._folder / OBSERVED
        if file.exists():
            with file.open(encoding="utf-8") as lines:
                lines.seek(self._read)
                for line in iter(lines.readline, ""):
                    if line.endswith("\n"):
                        self._read += len(line)
                        self._run.observed.take(line)
        return self._run.observed

    def wait_for(self, is_true: Callable[[Observed], bool], what: str, timeout_s: float = _TIMEOUT_S) -> None:
        """Wait for a condition on the observations; `RuntimeError` with the driver's log if the driver ends."""
        assert self._process is not None
        until = time.monotonic() + timeout_s
        while not is_true(self.look()):
            if time.monotonic() > until or self._process.poll() is not None:
                log = (self._folder / "driver.log").read_text(errors="replace")[-5_000:]
                raise RuntimeError(f"{self._run.column.name}: no {what}; the driver's log ends:\n{log}")
            time.sleep(0.02)

    def wait_for_batches(self, count: int, timeout_s: float = _TIMEOUT_S) -> None:
        """Wait for more outputs."""
        wanted = len(self.look().outputs) + count
        self.wait_for(lambda seen: len(seen.outputs) >= wanted, f"{count} more outputs", timeout_s)


def run_column(hosts: Hosts, column: Column, size: Size, ways: tuple[str, ...], chance: random.Random) -> ColumnRun:
    """Run a column's query, and lose executors in each of the ways."""
    run = ColumnRun(column, size)
    with Driver(hosts, run) as driver:
        driver.wait_for_batches(size.settled_batches, _FIRST_BATCH_TIMEOUT_S)
        _wait_for_copies(driver, run)
        for way in ways:
            for _ in range(size.losses):
                began_s, read = time.monotonic(), hosts.restored_bytes()
                driver.wait_for_batches(size.settled_batches)
                run.calm_s.append((began_s, time.monotonic()))
                usual = (hosts.restored_bytes() - read) / size.settled_batches
                run.losses.append(_lose(hosts, driver, run, way, chance, usual))
                print(f"{column.name}, {way}: {summary(run, run.losses[-1])}", flush=True)
    return run


def summary(run: ColumnRun, loss: Loss) -> str:
    """Return a loss as a line."""
    gaps = [run.observed.gap_s(parts, run.size.trigger_s, loss.moment_s, loss.over_s) for parts in sides(run, loss)]
    affected, others = ("-" if gap is None else f"{gap:.2f} s" for gap in gaps)
    text = f"gap {affected} ({len(loss.affected)} partitions), others {others}"
    copied = "" if loss.copied_s is None else f", copied after {loss.copied_s - loss.moment_s:.1f} s"
    return f"{text}, whole after {loss.whole_s - loss.moment_s:.1f} s{copied}, read {loss.read_bytes / 1e6:.2f} MB"


def sides(run: ColumnRun, loss: Loss) -> tuple[frozenset[int], frozenset[int]]:
    """Return the affected partitions and the others."""
    return loss.affected, frozenset(range(run.size.partitions)) - loss.affected


def _lose(hosts: Hosts, driver: Driver, run: ColumnRun, way: str, chance: random.Random, usual_bytes: float) -> Loss:
    seen = driver.look()
    begun = len(seen.outputs)
    places = seen.host_of(time.monotonic())
    counts = Counter(host for host in places.values() if host)
    victim = max(sorted(counts), key=lambda host: counts[host])
    read = hosts.restored_bytes()
    time.sleep(chance.uniform(0, run.size.trigger_s))  # the moment is the benchmark's input
    affected = frozenset(partition for partition, host in places.items() if host == victim)
    if way == TASK:
        moment_s, failed = hosts.fail_task(victim)
        affected = frozenset({failed})
    elif way == PROCESS:
        moment_s = hosts.kill(victim)
    elif way == HOST:
        moment_s = hosts.cut_off(victim)
    else:
        moment_s, affected = _restart(hosts, driver), frozenset(range(run.size.partitions))
    driver.wait_for(lambda seen: _whole_s(seen, moment_s, affected) is not None, "output of the affected partitions")
    whole_s = _whole_s(driver.look(), moment_s, affected)
    assert whole_s is not None
    usual = usual_bytes * (len(driver.look().outputs) - begun)
    read = hosts.restored_bytes() - (0.0 if way == RESTART else read) - usual  # a new executor's tables come later
    driver.wait_for_batches(run.size.settled_batches)
    if way == HOST:
        hosts.connect(victim)
    hosts.wait_for_executors()
    copied_s = _wait_for_copies(driver, run, moment_s)
    return Loss(way, moment_s, affected, whole_s, copied_s, time.monotonic(), max(0.0, read))


def _restart(hosts: Hosts, driver: Driver) -> float:
    """Kill the driver, empty the local disks, and start another driver; return the moment of the kill."""
    moment_s = time.monotonic()
    driver.kill()
    hosts.forget_all()
    driver.start()
    return moment_s


def _whole_s(seen: Observed, moment_s: float, affected: frozenset[int]) -> float | None:
    """Return when all affected partitions had run again, and nothing waited; None as long as that is not so."""
    left = set(affected)
    for output in seen.outputs:
        if output.at_s > moment_s:
            left -= output.partitions
            if not left and not _waits(seen, output.batch):
                return output.at_s
    return None


def _waits(seen: Observed, batch: int) -> bool:
    """Say whether rows wait after a batch; until its figures are known, they may."""
    if not seen.progress:  # not ours
        return False
    found = [one for one in seen.progress if one["batch_id"] == batch]
    return not found or bool(found[-1]["rows_waiting"] or found[-1]["rows_lost"])


def _wait_for_copies(driver: Driver, run: ColumnRun, since_s: float = 0.0) -> float | None:
    """Wait until every table has a recent copy; return the moment, None without standbys."""
    if not run.column.replicas:
        return None

    def complete(seen: Observed) -> list[float]:
        return [
            float(one["at_s"])
            for one in seen.progress
            if one["at_s"] > since_s + 2 * run.size.trigger_s
            and one["standby_tables"] == run.size.partitions
            and not one["standby_missing"]
            and one["standby_lag"] <= STANDBY_LAG_MAX
        ]

    driver.wait_for(lambda seen: bool(complete(seen)), "complete copies", _COPIES_TIMEOUT_S)
    return complete(driver.look())[0]
