"""
``make bench-requests``: requests per batch at an S3 server, with this backend and with Spark's own state store.

A standalone cluster of four hosts runs the same query twice: 200 partitions, all of which change in each batch. Both
sides keep Spark's checkpoint in the bucket through Hadoop's S3A; Spark's store has changelog checkpointing. The
server's own access log counts, from the commit of one batch to that of a later one, so everything is in it: manifests,
renames, look-ups and deletions. Snapshots count apart: both sides store them by the clock, every ten minutes here and
every minute there, so their share of a batch is as large as the batch is long.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from loadtest.bench_recovery.hosts import BUCKET, Hosts, running_hosts
from loadtest.bench_recovery.plan import HOSTS
from loadtest.bench_requests.access_log import Requests, requests_between
from loadtest.bench_requests.query import QueryPlan
from loadtest.bench_service import line_of
from tools.reporting.figures import Figure, Goal
from tools.reporting.target import TargetReport, is_set
from tools.servers.maven import maven_jars
from tools.servers.versions import S3_FILE_SYSTEM

_SIDES = ("Spark", "DSTL")
_WARM_UP = 4
_TIMEOUT_S = 1_800
FEWER_PUTS_MIN = 25


def figures_of(counted: dict[str, Requests], batches: int, partitions: int) -> list[Figure]:
    """
    Return the figures of both sides.

    Args:
        counted: Requests of `batches` batches by side.
        batches: How many were counted.
        partitions: The query's; the goal is for 200.
    """
    figures: list[Figure] = []
    for side, found in counted.items():
        name = f"{side}, {partitions} partitions on {HOSTS} hosts, per batch"
        figures += [
            Figure(f"{name}: PUTs", found.puts / batches, "requests"),
            Figure(f"{name}: PUTs of snapshots, which go by time", found.snapshot_puts / batches, "requests"),
            Figure(f"{name}: listings", found.lists / batches, "requests"),
            Figure(f"{name}: GETs and HEADs", found.gets / batches, "requests"),
            Figure(f"{name}: deletions", found.deletes / batches, "requests"),
        ]
    if len(counted) == len(_SIDES):
        spark, ours = (counted[side] for side in _SIDES)
        goal = Goal(">=", FEWER_PUTS_MIN) if partitions == _partitions(short=False) else None
        everything = (spark.puts + spark.snapshot_puts) / (ours.puts + ours.snapshot_puts)
        figures += [
            Figure("PUTs of Spark / PUTs of DSTL, without snapshots", spark.puts / ours.puts, "x", goal),
            Figure("PUTs of Spark / PUTs of DSTL, at this run's pace of batches", everything, "x"),
        ]
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write ``reports/bench-requests.json``; return the exit code."""
    parser = argparse.ArgumentParser(description="Count requests per batch at an S3 server.")
    parser.add_argument("--short", action="store_true", default=is_set("SHORT"), help="few partitions (SHORT=1)")
    parser.add_argument("--strict", action="store_true", default=is_set("STRICT"), help="fail if a goal is missed")
    parser.add_argument("--side", choices=_SIDES, help="run one side only, without the ratio")
    options = parser.parse_args(arguments)
    partitions, batches = _partitions(short=options.short), 2 if options.short else 12
    report = TargetReport("bench-requests", strict=options.strict)
    jars = maven_jars(S3_FILE_SYSTEM.partition(":")[2].replace(":", "-"), programs=[S3_FILE_SYSTEM])
    counted: dict[str, Requests] = {}
    with tempfile.TemporaryDirectory(prefix="dstl-q-", ignore_cleanup_errors=True) as place:
        log = Path(place) / "access.log"
        with running_hosts(Path(place), access_log=log) as hosts:
            for side in [options.side] if options.side else _SIDES:
                seen = len(_lines(log))
                _run(hosts, _plan(hosts, side, partitions, _WARM_UP + batches + 1, jars))
                counted[side] = requests_between(_lines(log)[seen:], _WARM_UP, _WARM_UP + batches)
                print(f"{side}: {dict(counted[side].by_operation)}", flush=True)
    figures = figures_of(counted, batches, partitions)
    for figure in figures:
        print(line_of(figure))
    return report.write(figures)


def _partitions(*, short: bool) -> int:
    return 16 if short else 200


def _lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()


def _plan(hosts: Hosts, side: str, partitions: int, batches: int, jars: Sequence[Path]) -> QueryPlan:
    folder = hosts.folder / side
    folder.mkdir()
    return QueryPlan(
        is_ours=side == "DSTL",
        partitions=partitions,
        batches=batches,
        hosts=HOSTS,
        master=hosts.master_url,
        address=hosts.driver_address,
        prefix=f"{BUCKET}/{side.lower()}",
        jars=os.pathsep.join(map(str, jars)),
        folder=str(folder),
    )


def _run(hosts: Hosts, plan: QueryPlan) -> None:
    folder = Path(plan.folder)
    file, log = folder / "plan.json", folder / "driver.log"
    plan.write(file)
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "SPARK_LOCAL_IP": hosts.driver_address, "PYTHONPATH": root}
    command = [sys.executable, "-m", "loadtest.bench_requests.query", str(file)]
    with log.open("wb") as output:
        done = subprocess.run(
            command, stdout=output, stderr=output, env=environment, cwd=folder, timeout=_TIMEOUT_S, check=False
        )
    if done.returncode:
        raise RuntimeError(f"the query failed:\n{log.read_text(encoding='utf-8', errors='replace')[-4_000:]}")


if __name__ == "__main__":
    sys.exit(main())
