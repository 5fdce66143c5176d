"""
``make chaos-sinks``: kills at each named step of publishing to each system, and at random.

``python -m loadtest.chaos_sinks [--systems kafka,postgres,parquet,delta] [--hits N] [--random N]`` writes
``reports/chaos-sinks.json``; STRICT=1 makes it fail if a goal is missed. A step without its hits fails the run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from threading import Event, Thread
from typing import Self

import psutil
import pyspark

from loadtest.chaos_sinks.steps import DRIVER, DRIVER_STEPS, SINK_STEPS, WORKER, Orders
from loadtest.chaos_sinks.systems import SYSTEMS, System
from loadtest.chaos_sinks.verify import Files, batches, verdict
from tools.reporting.figures import Figure, Goal
from tools.reporting.target import TargetReport

_FILES_EVERY_S, _FILES_AHEAD = 0.4, 4
_KEYS, _ROWS = 24, 40
_STEP_TIMEOUT_S, _END_TIMEOUT_S = 120.0, 300.0
_LOOK_EVERY_S = 0.5
_TRIES = 2
"""A step may come too late on a busy machine; a kill that met nothing is tried again."""
_ROOT = Path(__file__).resolve().parents[2]
_AT_RANDOM = ("executor", "sidecar", "driver", "worker", "server")
"""In this order: few kills at random are of processes that no step has killed."""


class Feeder:
    """Writes input files while kills are going on; each is one batch."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.files: list[list[tuple[str, int]]] = []
        self._folder = folder
        self._chance = chance
        self._stop = Event()
        self._thread = Thread(target=self._run)

    def __enter__(self) -> Self:
        self._folder.mkdir()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _done(self) -> int:
        """Return the number of batches that Spark has committed."""
        names = [path.name for path in (self._folder.parent / "chk" / "commits").glob("[0-9]*")]
        return max(map(int, names), default=-1) + 1

    def _run(self) -> None:
        while not self._stop.wait(_FILES_EVERY_S):
            number = len(self.files)
            if number > self._done() + _FILES_AHEAD:
                continue
            rows = [(f"key-{self._chance.randrange(_KEYS)}", self._chance.randrange(1000)) for _ in range(_ROWS)]
            path, hidden = self._folder / f"{number:05d}.json", self._folder / f".{number:05d}.json"
            hidden.write_text("".join(json.dumps({"k": k, "v": v}) + "\n" for k, v in rows), encoding="utf-8")
            os.utime(hidden, (1_700_000_000 + number, 1_700_000_000 + number))
            hidden.rename(path)
            self.files.append(rows)


class Program:
    """The query's process tree; started again when its driver is gone."""

    def __init__(self, folder: Path, local_dir: str, system: System) -> None:
        self._folder = folder
        self.starts = 0
        self._command = [sys.executable, "-m", "loadtest.chaos_sinks.program", "--folder", str(folder)]
        self._command += ["--local-dir", local_dir, "--system", system.name]
        self._command += ["--parameters", json.dumps(system.parameters)]
        self._local_dir = local_dir
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: set[psutil.Process] = set()
        self._looked_s = 0.0

    def keep_running(self) -> None:
        """Start the driver if it is not running."""
        if time.monotonic() > self._looked_s + _LOOK_EVERY_S:  # it reads of all processes of the host
            self._look()
            self._looked_s = time.monotonic()
        if self._process is not None and self._process.poll() is None:
            return
        with open(self._folder / "program.log", "ab") as log:
            environment = {
                **os.environ,
                "PYSPARK_PYTHON": sys.executable,
                "SPARK_LOCAL_IP": "127.0.0.1",
                "SPARK_HOME": str(Path(pyspark.__file__).parent),
                "SPARK_WORKER_DIR": str(self._folder / "work"),
                "PYTHONPATH": str(_ROOT),
                "DSTL_MATERIALIZATION_ENABLED": "false",
            }
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=environment, cwd=self._folder, start_new_session=True
            )
        self.starts += 1

    def kill(self, kind: str, chance: random.Random) -> bool:
        """Kill a process of a kind; return false if there is none."""
        self._look()
        if kind == "driver":
            with suppress(FileNotFoundError):
                for pid in Orders(str(self._folder)).pids():
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return True
            return False
        signs = {
            "executor": "CoarseGrainedExecutorBackend",
            "worker": "pyspark.daemon",
            "sidecar": f"dstl_service serve --storage file://{self._folder}",
        }
        found = [process for process in self._seen | set(psutil.process_iter()) if signs[kind] in _line(process)]
        own = [process for process in found if kind == "sidecar" or process in self._seen]
        if not own:
            return False
        with suppress(psutil.NoSuchProcess):
            chance.choice(own).kill()
        return True

    def close(self) -> None:
        """End everything that was started."""
        self._look()
        sidecars = [item for item in psutil.process_iter() if f"file://{self._folder}" in _line(item)]
        for process in [*self._seen, *sidecars]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _look(self) -> None:
        """Remember the processes of the tree: those of a killed driver are no longer its children."""
        if self._process is not None:
            with suppress(psutil.NoSuchProcess):
                root = psutil.Process(self._process.pid)
                self._seen |= {root, *root.children(recursive=True)}


def run(system: type[System], hits: int, at_random: int, chance: random.Random, folder: Path) -> list[Figure]:
    """Kill one query, whose output goes to one system; return the figures."""
    kills: Counter[str] = Counter()
    with ExitStack() as stack:
        made = system(folder, stack)
        local_dir = stack.enter_context(_short_folder())
        program = Program(folder, local_dir, made)
        stack.callback(program.close)
        feeder = stack.enter_context(Feeder(folder / "in", chance))
        for name, kill in _plan(hits, at_random, chance, folder, program, made):
            if any(kill() for _ in range(_TRIES)):
                kills[name] += 1
                print(f"{system.name}: killed at {name} ({sum(kills.values())})", flush=True)
        feeder.__exit__()
        (folder / "finish").touch()
        _wait_for((folder / "finished").exists, program, _END_TIMEOUT_S, "the query's end")
        read = batches(feeder.files, _ends(folder / "chk" / "offsets"))
        return _figures(made, read, kills, hits, program)


def _ends(offsets: Path) -> list[int]:
    """Return the index of the last file of each batch that Spark has planned."""
    planned = sorted(int(path.name) for path in offsets.glob("[0-9]*"))
    texts = [(offsets / str(number)).read_text(encoding="utf-8") for number in planned]
    return [int(json.loads(text.splitlines()[-1])["logOffset"]) for text in texts]


def _plan(
    hits: int, at_random: int, chance: random.Random, folder: Path, program: Program, system: System
) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Yield all kills in random order, with their names."""
    orders = Orders(str(folder))
    steps = [*product(DRIVER_STEPS, [DRIVER]), *product(SINK_STEPS, [WORKER, DRIVER])]
    drawn: list[tuple[str, str] | str] = []
    for step in {step for step, _ in steps}:
        victims = [victim for name, victim in steps if name == step]
        drawn += [(step, victims[number % len(victims)]) for number in range(hits)]
    drawn += [_AT_RANDOM[number % len(_AT_RANDOM)] for number in range(at_random)]
    chance.shuffle(drawn)
    for item in drawn:
        if isinstance(item, tuple):
            yield item[0], partial(_at_step, orders, *item, program)
        else:
            yield f"random {item}", partial(_at_random, item, program, system, chance)


def _at_step(orders: Orders, step: str, victim: str, program: Program) -> bool:
    done = orders.give(step, victim)
    try:
        _wait_for(done.exists, program, _STEP_TIMEOUT_S, f"step {step!r}")
    except TimeoutError as error:
        print(error, flush=True)
        return False
    finally:
        orders.withdraw()
    done.unlink()
    return True


def _at_random(kind: str, program: Program, system: System, chance: random.Random) -> bool:
    until = time.monotonic() + chance.uniform(0, 8)
    _wait_for(lambda: time.monotonic() > until, program, _STEP_TIMEOUT_S, "a moment")
    return system.restart() if kind == "server" else program.kill(kind, chance)


def _wait_for(condition: Callable[[], bool], program: Program, timeout_s: float, what: str) -> None:
    """Wait for a condition; start the program again whenever it ends."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} was not reached within {timeout_s:g} s")
        program.keep_running()
        time.sleep(0.05)


def _figures(system: System, read: Files, kills: Counter[str], hits: int, program: Program) -> list[Figure]:
    name = system.name
    records = system.records()
    found = verdict(read, records, in_order=system.keeps_order)
    steps = [*DRIVER_STEPS, *SINK_STEPS]
    return [
        *(Figure(f"{name}: kills {step}", kills[step], "kills", Goal(">=", hits)) for step in steps),
        Figure(f"{name}: kills at random", sum(kills[f"random {kind}"] for kind in _AT_RANDOM), "kills"),
        Figure(f"{name}: starts of the query", program.starts, "starts"),
        Figure(f"{name}: batches", len(read), "batches"),
        Figure(f"{name}: records", len(records), "records", Goal(">=", 1)),
        Figure(f"{name}: records lost", found.lost, "records", Goal("==", 0)),
        Figure(f"{name}: records published twice", found.twice, "records", Goal("==", 0)),
        Figure(f"{name}: records of no run", found.wrong, "records", Goal("==", 0)),
        Figure(f"{name}: records of another attempt than the state", found.parted, "records", Goal("==", 0)),
        Figure(f"{name}: keys out of order", found.out_of_order, "keys", Goal("==", 0)),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; return the exit code."""
    parser = argparse.ArgumentParser(description="Kill processes at every step of publishing.")
    parser.add_argument("--systems", default="kafka,postgres,parquet,delta", help=f"some of {','.join(SYSTEMS)}")
    parser.add_argument("--hits", type=int, default=5, help="kills at each step of each system")
    parser.add_argument("--random", type=int, default=10, help="kills at random moments, for each system")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args(arguments)
    if unknown := set(options.systems.split(",")) - set(SYSTEMS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(SYSTEMS)}")
    if options.hits < 1 and options.random < 1:  # all goals would hold
        parser.error("without --hits and --random nothing is killed; one of them must be at least 1")
    print(f"seed {options.seed}", flush=True)
    report, figures = TargetReport("chaos-sinks"), list[Figure]()
    for name in options.systems.split(","):
        folder = Path(tempfile.mkdtemp(prefix="dstl-sinks-"))
        started = time.monotonic()
        try:
            figures += run(SYSTEMS[name], options.hits, options.random, random.Random(options.seed), folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        figures.append(Figure(f"{name}: run time", round(time.monotonic() - started, 1), "s"))
        report.write(figures)
    for figure in figures:
        print(f"{figure.name:60} {figure.value:>8} {figure.unit:8} {figure.goal or ''}")
    return report.write(figures)


@contextmanager
def _short_folder() -> Iterator[str]:
    """Yield a folder whose path is short enough for a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="ds", ignore_cleanup_errors=True) as folder:
        yield folder


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


if __name__ == "__main__":
    sys.exit(main())
