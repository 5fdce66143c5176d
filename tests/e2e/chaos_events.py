"""Events of the chaos test: one function for each; it returns whether the event met its target."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
import pyspark

from dstl_service.registry.job_store import JobStore
from loadtest.chaos.jumping_clock import HOUR_MS, ClockOffset
from storage.clock import SystemClock, SystemIds
from storage.open import open_store
from tests.e2e.chaos_program import FORK
from tests.sidecars import sidecars_of
from tests.waiting import wait_until

HANG_S = 20.0
"""Longer than the program's time-outs: Spark's are 10 s, and a task waits for its sidecar for 8 s."""
_SET_BACK_TIMEOUT_S = 300.0


def clock_environment(clock: ClockOffset) -> dict[str, str]:
    """Return the environment variables by which a test sets the clock of sidecars."""
    root = Path(__file__).parents[2]
    # A folder with a `sitecustomize` comes first.
    path = os.pathsep.join([str(root / "tests" / "e2e" / "wrong_clock"), str(root)])
    return {"PYTHONPATH": path, "DSTL_TEST_CLOCK": str(clock.path)}


class Program:
    """
    The program under test, with its process tree.

    Args:
        folder: The jobs' folder.
        storage: URL of the storage.
        jobs: The jobs.
        clock: The sidecars' clock.
        arguments: More arguments of the program.
        cluster: Processes that start executors, beside the program.
    """

    def __init__(
        self,
        folder: Path,
        storage: str,
        jobs: list[str],
        clock: ClockOffset,
        arguments: Sequence[str],
        cluster: Sequence[int] = (),
    ) -> None:
        command = [sys.executable, "-m", "tests.e2e.chaos_program", "--folder", str(folder), "--storage", storage]
        command += ["--jobs", *jobs, *arguments]
        self._cluster = cluster
        environment = {
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_HOME": str(Path(pyspark.__file__).parent),
            "SPARK_WORKER_DIR": str(folder / "work"),
            **clock_environment(clock),
        }
        self.log = open(folder / "program.log", "ab")  # noqa: SIM115 - as long as the process
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=self.log, env=environment, cwd=folder, start_new_session=True
        )
        self.descendants: set[psutil.Process] = set()

    def find(self, kind: str) -> list[psutil.Process]:
        """Return the running processes of a kind."""
        self._look(self.process.pid)
        known = set(self.descendants)
        for pid in self._cluster:
            with suppress(psutil.NoSuchProcess):
                known |= set(psutil.Process(pid).children(recursive=True))
        found = []
        for process in known:
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                line = " ".join(process.cmdline())
                parent = process.parent()
                is_executor = "CoarseGrainedExecutorBackend" in line
                is_worker = "pyspark.daemon" in line and parent is not None and "pyspark.daemon" in parent.cmdline()
                is_jvm = "org.apache.spark.deploy.SparkSubmit" in line
                if {"executor": is_executor, "worker": is_worker, "jvm": is_jvm}[kind]:
                    found.append(process)
        return found

    def _look(self, pid: int) -> None:
        with suppress(psutil.NoSuchProcess):
            self.descendants |= set(psutil.Process(pid).children(recursive=True))

    def kill_driver(self) -> None:
        """Kill the driver's two processes; executors must notice it themselves."""
        jvms = self.find("jvm")
        self.find("executor")  # remembered for the final cleanup
        self.process.kill()
        for jvm in jvms:
            with suppress(psutil.NoSuchProcess):
                jvm.kill()
        self.process.wait()
        self.log.close()

    def close(self) -> None:
        """End all processes that the program started."""
        self._look(self.process.pid)
        self.process.kill()
        self.process.wait()
        self.log.close()
        for process in self.descendants:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@dataclass
class Scene:
    """The processes that events act upon; the last of `programs` is running."""

    folder: Path
    storage: str
    local_dir: Path
    jobs: list[str]
    chance: random.Random
    clock: ClockOffset
    programs: list[Program] = field(default_factory=list)
    arguments: Sequence[str] = ()
    """More arguments of the program; without any it gets `local_dir`."""
    cluster: Sequence[int] = ()

    @property
    def program(self) -> Program:
        """The running program."""
        return self.programs[-1]

    def start(self) -> None:
        """Start the program; it continues with the first unfinished job."""
        arguments = self.arguments or ["--local-dir", str(self.local_dir)]
        self.programs.append(Program(self.folder, self.storage, self.jobs, self.clock, arguments, self.cluster))

    def done(self, job: str) -> Path:
        """The file that marks a finished job."""
        return self.folder / job / "done"


def kill_driver(scene: Scene, job: str) -> bool:
    """Kill the driver, and start another one."""
    scene.program.kill_driver()
    scene.start()
    return True


def kill_process(kind: str, scene: Scene, job: str) -> bool:
    """Kill a process that Spark started."""
    return _signal_one(kind, scene, signal.SIGKILL) is not None


def kill_sidecar(scene: Scene, job: str) -> bool:
    """Kill the sidecar; a client starts it again."""
    return bool(_signal_sidecars(scene, signal.SIGKILL))


def hang_executor(scene: Scene, job: str) -> bool:
    """Suspend an executor until Spark has given it up, then resume it."""
    process = _signal_one("executor", scene, signal.SIGSTOP)
    time.sleep(HANG_S if process is not None else 0)
    with suppress(psutil.NoSuchProcess):
        if process is not None:
            process.resume()
    return process is not None


def hang_sidecar(scene: Scene, job: str) -> bool:
    """Suspend the sidecar until tasks have given it up, then resume it."""
    stopped = _signal_sidecars(scene, signal.SIGSTOP)
    time.sleep(HANG_S if stopped else 0)
    for pid in stopped:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    return bool(stopped)


def move_clock(scene: Scene, job: str) -> bool:
    """Set the sidecar's clock an hour ahead or back, permanently."""
    scene.clock.jump_to(scene.chance.choice((-HOUR_MS, HOUR_MS)))
    return True


def set_back(scene: Scene, job: str) -> bool:
    """Set the job back by a checkpoint while its query runs, which fences the query, and restart the program."""
    target: list[int] = []

    def has_target() -> bool:
        jobs = JobStore(open_store(scene.storage), job, SystemClock(), SystemIds())
        newest = jobs.newest() if jobs.exists() else None
        target[:] = [newest.id - 1] if newest is not None and newest.id > 0 else []
        return bool(target) or scene.done(job).exists()

    wait_until(has_target, _SET_BACK_TIMEOUT_S, "a checkpoint to go back to")
    if scene.done(job).exists():
        return False
    command = [sys.executable, "-m", "dstl_service", "rewind", "--storage", scene.storage]
    command += ["--checkpoint", str(target[0]), "--write", job]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_SET_BACK_TIMEOUT_S)
    (scene.folder / job / "met").touch()
    # The query may have ended while the job was set back, or have been fenced, or both.
    wait_until(
        lambda: scene.program.process.poll() is not None or scene.done(job).exists(),
        _SET_BACK_TIMEOUT_S,
        "the end of the fenced query",
    )
    scene.program.kill_driver()
    scene.done(job).unlink(missing_ok=True)
    scene.start()
    return result.returncode == 0


def rescale(scene: Scene, job: str) -> bool:
    """Have the running job change its parallelism."""
    temporary = scene.folder / job / "rescale.tmp"
    temporary.write_text(str(scene.chance.randrange(1, 7)), encoding="utf-8")
    temporary.rename(temporary.with_suffix(""))
    return True


def kill_driver_with_waiting_rows(scene: Scene, job: str) -> bool:
    """Kill the driver while rows wait in the log, which the job holds for, and start another one."""
    waiting = scene.folder / job / "waiting"

    def is_there() -> bool:
        return scene.done(job).exists() or (waiting.exists() and waiting.read_text(encoding="utf-8") != "0")

    wait_until(is_there, _SET_BACK_TIMEOUT_S, "rows that wait in the log")
    return not scene.done(job).exists() and kill_driver(scene, job)


def fork(scene: Scene, job: str) -> bool:
    """Fork the running job at its newest checkpoint; the fork runs when the job is done."""
    name, folder = f"{job}{FORK}", scene.folder / f"{job}{FORK}"

    def has_checkpoint() -> bool:
        jobs = JobStore(open_store(scene.storage), job, SystemClock(), SystemIds())
        return scene.done(job).exists() or (jobs.exists() and jobs.newest() is not None)

    wait_until(has_checkpoint, _SET_BACK_TIMEOUT_S, "a checkpoint to fork")
    if scene.done(job).exists():
        return False
    command = [sys.executable, "-m", "dstl_service", "fork", "--storage", scene.storage, job, name]
    subprocess.run(command, check=True, capture_output=True, timeout=_SET_BACK_TIMEOUT_S)
    folder.mkdir()
    options = json.loads((scene.folder / job / "options.json").read_text(encoding="utf-8"))
    options["fork_location"] = str(scene.folder / job / "chk")
    (folder / "options.json").write_text(json.dumps(options), encoding="utf-8")
    (folder / "met").touch()
    (folder / "hold").write_text("0", encoding="utf-8")  # last: it makes the program run the fork
    return True


EVENTS: dict[str, Callable[[Scene, str], bool]] = {
    "driver killed": kill_driver,
    "executor killed": partial(kill_process, "executor"),
    "worker killed": partial(kill_process, "worker"),
    "sidecar killed": kill_sidecar,
    "executor hung": hang_executor,
    "sidecar hung": hang_sidecar,
    "sidecar's clock moved": move_clock,
    "job set back": set_back,
}
"""Events for a running job, by name; a function returns whether its event took place."""

WAITING = "driver killed while rows wait"
EVENTS_OF_MODES = {**EVENTS, "rescaled": rescale, "forked": fork, WAITING: kill_driver_with_waiting_rows}
"""Those for jobs with modes of failover and standbys."""


def wait_for(program: Program, marker: Path) -> None:
    """Wait until the program has made `marker`; fail with its log if it ends first."""

    def made() -> bool:
        if marker.exists():
            return True
        if program.process.poll() not in (None, 0):
            raise AssertionError(_without_frames(Path(program.log.name).read_text(errors="replace"))[-20_000:])
        return False

    wait_until(made, 600, str(marker))


def _without_frames(log: str) -> str:
    """Drop the JVM's stack frames: a session that ends writes hundreds of them after the actual error."""
    return "\n".join(line for line in log.splitlines() if not line.lstrip().startswith(("at ", "... ")))


def _signal_one(kind: str, scene: Scene, number: signal.Signals) -> psutil.Process | None:
    candidates = sorted(scene.program.find(kind), key=lambda process: process.pid)
    if not candidates:
        return None
    chosen = scene.chance.choice(candidates)
    with suppress(psutil.NoSuchProcess):
        chosen.send_signal(number)
    return chosen


def _signal_sidecars(scene: Scene, number: signal.Signals) -> list[int]:
    reached = []
    for pid in sidecars_of(scene.local_dir):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            reached.append(pid)
    return reached
