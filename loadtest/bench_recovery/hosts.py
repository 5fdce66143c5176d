"""The hosts of the benchmark: a cluster of real processes on network namespaces, and the ways in which a host fails."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from loadtest.bench_recovery.plan import HOSTS
from loadtest.bench_recovery.processor import EXIT, FAILURE, HOST
from loadtest.bench_recovery.query import CORES
from tools.servers.network import Network, NetworkedHost, why_no_network
from tools.servers.s3_server import S3Server
from tools.servers.service.metrics import read_metric
from tools.servers.spark.classes import class_archive, options_of_short_jvms
from tools.servers.spark.cluster import Loopback, Machine, SparkCluster

BUCKET = "recovery"
_JOB = "recovery"
_TIMEOUT_S = 240.0
_POLL_S = 0.005


class _LoopbackHost(Loopback):
    def __init__(self, number: int) -> None:
        self.address = f"127.0.0.{number + 2}"


class Hosts:
    """
    A cluster, one local folder per host, and a storage.

    Args:
        folder: Holds everything.
        cluster: The cluster.
        machines: The driver's, then the workers'.
    """

    def __init__(self, folder: Path, cluster: SparkCluster, machines: list[Machine]) -> None:
        self.folder = folder
        self.master_url = cluster.master_url
        self.driver_address = machines[0].address
        self._workers = {machine.address: machine for machine in machines[1:]}
        self._locals = dict(zip([machine.address for machine in machines], local_folders(folder), strict=True))
        self._failures = 0

    @property
    def addresses(self) -> list[str]:
        """The workers' addresses."""
        return list(self._workers)

    def executors(self) -> dict[str, psutil.Process]:
        """Return the executors' processes by address."""
        found = {}
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "org.apache.spark.executor.CoarseGrainedExecutorBackend" in words:
                with suppress(psutil.NoSuchProcess):
                    if Path(process.cwd()).is_relative_to(self.folder):
                        found[words[words.index("--hostname") + 1]] = process
        return found

    def kill(self, address: str) -> float:
        """Kill a host's executor with SIGKILL; return the moment."""
        process = self.executors()[address]
        moment = time.monotonic()
        process.send_signal(signal.SIGKILL)
        return moment

    def fail_task(self, address: str) -> tuple[float, int]:
        """Have a task on a host fail, in turn by an error and by the end of its worker; return moment and partition."""
        file = self._failure_file(address)
        for old in file.parent.glob(f"{file.name}-*"):
            old.unlink()
        self._failures += 1
        file.with_suffix(".new").write_text(EXIT if self._failures % 2 == 0 else "", encoding="utf-8")
        file.with_suffix(".new").rename(file)
        until = time.monotonic() + _TIMEOUT_S
        while file.exists():
            if time.monotonic() > until:
                raise RuntimeError(f"no task on {address} has failed")
            time.sleep(_POLL_S)
        (done,) = file.parent.glob(f"{file.name}-*")
        return time.monotonic(), int(done.name.rpartition("-")[2])

    def cut_off(self, address: str) -> float:
        """Take a host's link down; return the moment."""
        machine = self._workers[address]
        assert isinstance(machine, NetworkedHost)
        machine.cut_off()
        return time.monotonic()

    def connect(self, address: str) -> None:
        """Have a host that was cut off come back as one that was switched off: without its executor."""
        machine = self._workers[address]
        assert isinstance(machine, NetworkedHost)
        with suppress(KeyError, psutil.NoSuchProcess):
            self.executors()[address].kill()
        machine.connect()

    def wait_for_executors(self) -> None:
        """Wait until each host has an executor."""
        until = time.monotonic() + _TIMEOUT_S
        while self.executors().keys() != self._workers.keys():
            if time.monotonic() > until:
                raise RuntimeError(f"executors are on {sorted(self.executors())} only")
            time.sleep(0.1)

    def restored_bytes(self) -> float:
        """Return the bytes that all sidecars have sent to tasks' tables so far."""
        found = 0.0
        for socket in self.folder.glob("host-*/service-*.sock"):
            with suppress(OSError):  # one that has ended
                found += read_metric(socket, "dstl_restored_bytes_total", _JOB)
        return found

    def forget_all(self) -> None:
        """End all sidecars and followers, and delete what is on the local disks."""
        self.end_helpers()
        for local in self._locals.values():
            for path in sorted(local.rglob("*"), reverse=True):
                with suppress(OSError):
                    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

    def end_helpers(self) -> None:
        """End the sidecars and followers of all hosts, by their process ids."""
        for file in [*self.folder.glob("host-*/service-*.pid"), *self.folder.glob("host-*/standby/*/pid")]:
            with suppress(OSError, ValueError):
                os.kill(int(file.read_text(encoding="utf-8")), signal.SIGKILL)

    def _failure_file(self, address: str) -> Path:
        return _failure_file(self.folder, address)


@contextmanager
def running_hosts(folder: Path, access_log: Path | None = None) -> Iterator[Hosts]:
    """
    Run storage and cluster: on network namespaces, which this process enters, where it may make them.

    Args:
        folder: Holds everything.
        access_log: Gets a line for each request to the storage.
    """
    with ExitStack() as stack:
        machines: list[Machine] = [Loopback(), *map(_LoopbackHost, range(HOSTS))]
        if why_no_network() is None:
            network = stack.enter_context(Network(HOSTS + 1))
            network.hosts[0].enter()
            machines = [*network.hosts]
        # All hosts share few cores, and an executor that takes a lost one's place has none of its own to start on.
        os.environ.setdefault("JAVA_TOOL_OPTIONS", options_of_short_jvms(class_archive()))
        (folder / "s3").mkdir()
        s3 = stack.enter_context(S3Server(folder / "s3", machines[0].address, access_log))
        s3.create_bucket(BUCKET)
        os.environ.update(s3.env())
        os.environ.update({"DSTL_LOCAL_DIR": str(local_folders(folder)[0]), "PYSPARK_PYTHON": sys.executable})
        environments = [
            {
                "DSTL_LOCAL_DIR": str(local),
                "PYTHONPATH": str(Path(__file__).parents[2]),
                HOST: machine.address,
                FAILURE: str(_failure_file(folder, machine.address)),
            }
            for local, machine in zip(local_folders(folder)[1:], machines[1:], strict=True)
        ]
        cluster = stack.enter_context(SparkCluster(folder, environments, "1500m", machines, CORES))
        hosts = Hosts(folder, cluster, machines)
        try:
            yield hosts
        finally:
            hosts.end_helpers()


def local_folders(folder: Path) -> list[Path]:
    """Return the local folders of the driver's host and the workers'."""
    return [folder / f"host-{number}" for number in range(HOSTS + 1)]


def _failure_file(folder: Path, address: str) -> Path:
    return folder / f"fail-{address}"
