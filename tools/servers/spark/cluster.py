"""
A standalone Spark cluster of real processes on loopback: a master, and workers with an environment each.

Every process is stopped by its pid; executors end with their worker.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import pyspark

from tools.servers.programs import free_port
from tools.servers.spark.processes import ClusterProcesses

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


class SparkCluster(ClusterProcesses):
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
        super().__init__(folder)
        self._hosts = hosts
        self._memory = memory
        self._cores = cores
        self._machines = machines or [Loopback()] * (len(hosts) + 1)
        self.master_url = ""
        self.webui_url = ""

    def start(self) -> None:
        """Start all processes, and wait until the workers are registered."""
        port, web = free_port(), free_port()
        master = self._machines[0]
        self.master_url, self.webui_url = f"spark://{master.address}:{port}", f"http://{master.address}:{web}"
        self._start("master", master_command(master.address, port, web), {}, master)
        self.wait_for("master", "I have been elected leader")
        for number, extra in enumerate(self._hosts):
            name = f"worker-{number}"
            work = str(self._folder / name)
            machine = self._machines[number + 1]
            command = worker_command(machine.address, self._cores, self._memory, free_port(), work, self.master_url)
            self._start(name, command, extra, machine)
        for number in range(len(self._hosts)):
            self.wait_for(f"worker-{number}", "Successfully registered with master")

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
        command = machine.command([str(_HOME / "bin" / "spark-class"), *arguments])
        self.launch(name, command, environment, self._folder)
