"""
A standalone Spark cluster of real processes on loopback: a master, and workers with an environment each.

Every process is stopped by its pid; executors end with their worker.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import psutil
import pyspark

from tools.servers.programs import ServerError, free_port

_READY_TIMEOUT_S = 120.0
_HOME = Path(pyspark.__file__).parent


def master_command(host: str, port: int, webui_port: int) -> list[str]:
    """Return the arguments of `spark-class` that start a master."""
    arguments = ["--host", host, "--port", str(port), "--webui-port", str(webui_port)]
    return ["org.apache.spark.deploy.master.Master", *arguments]


def worker_command(host: str, cores: int, memory: str, webui_port: int, work_dir: str, master_url: str) -> list[str]:
    """Return the arguments of `spark-class` that start a worker; `memory` is in Spark's notation."""
    arguments = ["--host", host, "--cores", str(cores), "--memory", memory, "--webui-port", str(webui_port)]
    return ["org.apache.spark.deploy.worker.Worker", *arguments, "--work-dir", work_dir, master_url]


class Machine(Protocol):
    """Where processes run."""

    address: str

    def command(self, command: Sequence[str]) -> list[str]:
        """Return a command that runs there; the process keeps its id."""
        ...


class Loopback:
    """This machine."""

    address = "127.0.0.1"

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command itself."""
        return list(command)


class SparkCluster:
    """
    A master and one worker per entry of `hosts`.

    Args:
        folder: Folder of logs and executors' work.
        hosts: Additional environment variables of each worker, and so of its executors.
        memory: Memory of each worker, in Spark's notation.
        machines: Where the master and each worker run; by default all here.
        cores: Of each worker: how many tasks it runs at a time.
    """

    def __init__(
        self,
        folder: Path,
        hosts: Sequence[dict[str, str]],
        memory: str = "1g",
        machines: Sequence[Machine] | None = None,
        cores: int = 1,
    ) -> None:
        self._folder = folder
        self._hosts = hosts
        self._memory = memory
        self._cores = cores
        self._machines = machines or [Loopback()] * (len(hosts) + 1)
        self._processes: list[subprocess.Popen[bytes]] = []
        self.master_url = ""
        self.webui_url = ""

    def __enter__(self) -> Self:
        port, web = free_port(), free_port()
        master = self._machines[0]
        self.master_url, self.webui_url = f"spark://{master.address}:{port}", f"http://{master.address}:{web}"
        try:
            self._start("master", master_command(master.address, port, web), {}, master)
            self._wait_for("master", "I have been elected leader")
            for number, extra in enumerate(self._hosts):
                name = f"worker-{number}"
                work = str(self._folder / name)
                machine = self._machines[number + 1]
                command = worker_command(machine.address, self._cores, self._memory, free_port(), work, self.master_url)
                self._start(name, command, extra, machine)
            for number in range(len(self._hosts)):
                self._wait_for(f"worker-{number}", "Successfully registered with master")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pids(self) -> list[int]:
        """The process ids of master and workers."""
        return [process.pid for process in self._processes]

    def stop(self) -> None:
        """End all processes of the cluster."""
        descendants: list[psutil.Process] = []
        for process in self._processes:
            with suppress(psutil.NoSuchProcess):
                descendants += psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.wait()
        for descendant in descendants:
            with suppress(psutil.NoSuchProcess):
                descendant.kill()

    def _start(self, name: str, arguments: list[str], extra: dict[str, str], machine: Machine) -> None:
        environment = {
            **os.environ,
            "SPARK_HOME": str(_HOME),
            "SPARK_LOCAL_IP": machine.address,
            "SPARK_NO_DAEMONIZE": "1",
            # Master and workers do little, and compiling them well would cost seconds of all cores.
            "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1",
            "PYSPARK_PYTHON": sys.executable,
            **extra,
        }
        with open(self._folder / f"{name}.log", "wb") as log:
            process = subprocess.Popen(
                machine.command([str(_HOME / "bin" / "spark-class"), *arguments]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=self._folder,
            )
        self._processes.append(process)

    def _wait_for(self, name: str, text: str) -> None:
        path = self._folder / f"{name}.log"
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while text not in path.read_text(errors="replace"):
            if time.monotonic() > deadline:
                raise ServerError(f"{name} is not ready; its log ends: {path.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)
