"""
``make bench-restart``: from the start of a driver on existing state to its first finished batch.

State of 200,000 keys is built on both sides, in batches of 20,000 rows, by one driver. Then others start in turn, each
a new process: Spark's own operator, this backend, and this backend with an archive of classes (``backend_client
class-archive``). The medians count.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from backend_client.spark.api.class_archive import write_class_archive
from loadtest.bench_restart_driver import FIRST_BATCH, backend_in
from tools.reporting.figures import Figure, Goal
from tools.reporting.target import TargetReport, is_set

SIDES = ("Spark", "DSTL", "DSTL with a class archive")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write ``reports/bench-restart.json``; return the exit code."""
    parser = argparse.ArgumentParser(description="Compare the time from a driver's start to its first batch.")
    parser.add_argument("--short", action="store_true", default=is_set("SHORT"), help="few keys, one start (SHORT=1)")
    parser.add_argument("--strict", action="store_true", default=is_set("STRICT"), help="fail if a goal is missed")
    parser.add_argument("--starts", type=int, default=5, help="starts of each side")
    parser.add_argument("--archive", type=Path, help="an archive of classes that exists (default: a new one)")
    options = parser.parse_args(arguments)
    keys, starts, partitions = (2_000, 1, 1) if options.short else (200_000, options.starts, 4)
    with tempfile.TemporaryDirectory(prefix="dstl-r-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        try:
            _start(",".join(SIDES[:2]), folder, keys, partitions, batches=1 if options.short else 11)
            if options.archive is None:
                write_class_archive(folder / "archive")
            else:
                (folder / "archive").symlink_to(options.archive.absolute())
            times: dict[str, list[float]] = {side: [] for side in SIDES}
            for _ in range(starts):
                for side in SIDES:
                    _stop_sidecar(folder)
                    times[side].append(_start(side, folder, keys, partitions, batches=1))
                    print(f"{side:26} {times[side][-1]:6.1f} s", flush=True)
        finally:
            _stop_sidecar(folder)
    medians = {side: statistics.median(found) for side, found in times.items()}
    best = medians[SIDES[2]]
    figures = [Figure(f"first batch, {side}, median", value, "s") for side, value in medians.items()]
    figures[2] = Figure(figures[2].name, best, "s", Goal("<=", 10))
    figures.append(Figure("DSTL / Spark", medians["DSTL"] / medians["Spark"], "ratio"))
    figures.append(Figure("DSTL with a class archive / Spark", best / medians["Spark"], "ratio", Goal("<=", 0.33)))
    return TargetReport("bench-restart", strict=options.strict).write(figures)


def _start(sides: str, folder: Path, keys: int, partitions: int, batches: int) -> float:
    """Run a driver for some batches of each side; return the seconds from its start to the end of its first one."""
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    if sides == SIDES[2]:
        option = f"--driver-java-options -XX:SharedArchiveFile={folder / 'archive'}"
        environment["PYSPARK_SUBMIT_ARGS"] = f"{option} pyspark-shell"
    command = [sys.executable, "-m", "loadtest.bench_restart_driver", sides.partition(" ")[0], str(folder)]
    began = time.monotonic()
    with subprocess.Popen(
        [*command, str(keys), str(batches), str(partitions)], env=environment, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        first = next((time.monotonic() - began for line in driver.stdout if line.startswith(FIRST_BATCH)), None)
        driver.stdout.read()
    if driver.returncode != 0 or first is None:
        raise RuntimeError(f"the driver of {sides} ended with {driver.returncode}")
    return first


def _stop_sidecar(folder: Path) -> None:
    """Stop the sidecar, so that each driver starts its own, as on a host that was lost."""
    with suppress(OSError, ValueError):
        os.kill(int(Path(backend_in(folder).auto_started_sidecar.pid_path).read_text(encoding="utf-8")), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
