"""
Exactly-once state and output while processes are killed at random moments (I2, I4, I7, I12, I14, I18).

Steps: small jobs run one after the other on a cluster of real executor processes; in each, one process is killed with
SIGKILL at a random moment - the driver (Python and JVM, its executors left to find out), an executor, a Python worker,
the sidecar - and what has to start again does. At the end every job's output, batch by batch, and its stored state are
compared with those of an undisturbed computation.

A failure means that a change was lost, counted twice, or taken from an attempt that Spark did not accept.
DSTL_CHAOS_SEED repeats a run, DSTL_CHAOS_RUNS sets the number of jobs, DSTL_CHAOS_REPORT names a file for the figures;
``make chaos`` is the long form.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import psutil
import pyspark
import pytest

from dstl_service.garbage_collector import collect_garbage
from dstl_service.job_store import JobStore
from dstl_service.retention import object_keys
from dstl_service.under_way import uid_in_key
from loadtest.report import Figure, Goal, write_report_json
from storage.clock import SystemClock, SystemIds
from storage.open import open_store
from tests.e2e.support import expected_output, expected_state, random_input, stored_totals, write_input
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e

VICTIMS = ("driver", "executor", "worker", "sidecar")
RUNS = int(os.environ.get("DSTL_CHAOS_RUNS", "8"))
BATCHES = 6
Rows = list[tuple[str | None, float]]
KILL_WITHIN_S = 5.0


class Program:
    """The program under test, with its process tree."""

    def __init__(self, folder: Path, storage: str, local_dir: Path, jobs: list[str]) -> None:
        command = [sys.executable, "-m", "tests.e2e.chaos_program", "--folder", str(folder), "--storage", storage]
        command += ["--local-dir", str(local_dir), "--jobs", *jobs]
        root = Path(__file__).parents[2]
        environment = {
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_HOME": str(Path(pyspark.__file__).parent),
            "SPARK_WORKER_DIR": str(folder / "work"),
            "PYTHONPATH": str(root),
        }
        self.log = open(folder / "program.log", "ab")  # noqa: SIM115 - as long as the process
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=self.log, env=environment, cwd=folder, start_new_session=True
        )
        self.descendants: set[psutil.Process] = set()

    def find(self, kind: str) -> list[psutil.Process]:
        """Return the processes of a kind that run now."""
        with suppress(psutil.NoSuchProcess):
            self.descendants |= set(psutil.Process(self.process.pid).children(recursive=True))
        found = []
        for process in self.descendants:
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                line = " ".join(process.cmdline())
                parent = process.parent()
                is_executor = "CoarseGrainedExecutorBackend" in line
                is_worker = "pyspark.daemon" in line and parent is not None and "pyspark.daemon" in parent.cmdline()
                is_jvm = "org.apache.spark.deploy.SparkSubmit" in line
                if {"executor": is_executor, "worker": is_worker, "jvm": is_jvm}[kind]:
                    found.append(process)
        return found

    def kill_driver(self) -> None:
        """Kill the driver's two processes; executors are left to notice."""
        jvms = self.find("jvm")
        self.find("executor")  # remember them, to clean up at the very end
        self.process.kill()
        for jvm in jvms:
            with suppress(psutil.NoSuchProcess):
                jvm.kill()
        self.process.wait()
        self.log.close()

    def close(self) -> None:
        """End all processes that the program started."""
        with suppress(psutil.NoSuchProcess):
            self.descendants |= set(psutil.Process(self.process.pid).children(recursive=True))
        self.process.kill()
        self.process.wait()
        self.log.close()
        for process in self.descendants:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    """The programs started so far; what is left of them is ended."""
    started: list[Program] = []
    yield started
    for program in started:
        program.close()


@pytest.mark.timeout(1500)
def test_kills_at_random_moments(tmp_path: Path, local_dir: Path, programs: list[Program]) -> None:
    """Output and state of every job equal an undisturbed computation, whichever process was killed and when (I14)."""
    seed = int(os.environ.get("DSTL_CHAOS_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"DSTL_CHAOS_SEED={seed}")
    chance = random.Random(seed)
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    storage = f"file://{folder}/store"
    jobs = [f"job-{number}" for number in range(RUNS)]
    inputs = {job: random_input(chance.randrange(1 << 32), BATCHES, rows=120, keys=24) for job in jobs}
    for job, files in inputs.items():
        write_input(folder / job / "in", files)
    programs.append(Program(folder, storage, local_dir, jobs))

    kills = dict.fromkeys(VICTIMS, 0)
    for number, job in enumerate(jobs):
        victim = VICTIMS[number % len(VICTIMS)]
        wait_for(programs[-1], folder / job / "started")
        time.sleep(chance.uniform(0, KILL_WITHIN_S))  # the moment of the kill is the test's input
        if not (folder / job / "done").exists():
            kills[victim] += kill(victim, programs, chance, local_dir)
            if victim == "driver":
                programs.append(Program(folder, storage, local_dir, jobs))
        wait_for(programs[-1], folder / job / "done")

    # What the killed attempts left behind is found and deleted, and nothing else.
    store = open_store(storage)
    manifests = {job: JobStore(store, job, SystemClock(), SystemIds()) for job in jobs}
    for job in jobs:
        collect_garbage(store, manifests[job], job, SystemClock(), age_min_ms=0)
    print(f"kills that hit a running job: {kills}")
    wrong: list[tuple[str, str]] = []
    for job, files in inputs.items():
        batches = executed_batches(folder / job / "chk", files)
        output = {
            batch: [tuple(row) for row in json.loads((folder / job / f"out-{batch}.json").read_text())]
            for batch in range(len(batches))
        }
        named = {key for manifest in manifests[job].completed() for key in object_keys(manifest)}
        stored = {info.key for info in store.list(f"{job}/segments/")}
        listed = list(manifests[job].completed())[-1].under_way.uids
        findings = {
            "output": output != expected_output(batches),
            "state": stored_totals(storage, job) != expected_state(files),
            "objects": {key for key in stored if uid_in_key(key) not in listed} != named,
        }
        wrong += [(job, what) for what, differs in findings.items() if differs]
    report(kills, wrong)
    assert sum(kills.values()) >= RUNS * 0.7
    assert wrong == [], seed


def report(kills: dict[str, int], wrong: list[tuple[str, str]]) -> None:
    """Write the figures, if asked for."""
    if path := os.environ.get("DSTL_CHAOS_REPORT"):
        figures = [Figure(f"kills of a running job's {victim}", count, "kills") for victim, count in kills.items()]
        figures.append(Figure("kills", sum(kills.values()), "kills", Goal(">=", RUNS * 0.7)))
        figures.append(Figure("wrong outputs, states and objects", len(wrong), "jobs", Goal("==", 0)))
        write_report_json(Path(path), figures)


def executed_batches(checkpoint: Path, files: list[Rows]) -> list[Rows]:
    """
    Return the rows of each batch as Spark's offsets say.

    Spark's file source notes a file before the batch is planned for good, so a driver that dies in between makes the
    next run take that file and the following one in one batch.
    """
    entries = sorted(
        (path for path in (checkpoint / "offsets").iterdir() if path.name.isdigit()), key=lambda p: int(p.name)
    )
    ends = [json.loads(path.read_text().splitlines()[-1])["logOffset"] + 1 for path in entries]
    assert ends[-1] == len(files)
    return [[row for rows in files[begin:end] for row in rows] for begin, end in pairwise([0, *ends])]


def wait_for(program: Program, marker: Path) -> None:
    """Wait until the program has made `marker`; fail with its log if it ends before."""

    def made() -> bool:
        if marker.exists():
            return True
        if program.process.poll() not in (None, 0):
            raise AssertionError((Path(program.log.name)).read_text(errors="replace")[-6000:])
        return False

    wait_until(made, 600, str(marker))


def kill(victim: str, programs: list[Program], chance: random.Random, local_dir: Path) -> int:
    """Kill a process of this kind; return how many were."""
    program = programs[-1]
    if victim == "driver":
        program.kill_driver()
        return 1
    if victim == "sidecar":
        pid_files = list(local_dir.glob("service-*.pid"))
        for path in pid_files:
            with suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)
        return len(pid_files)
    candidates = program.find(victim)
    if not candidates:
        return 0
    with suppress(psutil.NoSuchProcess):
        chance.choice(sorted(candidates, key=lambda process: process.pid)).kill()
    return 1
