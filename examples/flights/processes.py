"""The processes of a demo's run, its driver and its sidecar, and their files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from backend_client.service.client import ServiceClient
from examples.flights.job import open_backend
from storage.errors import DstlError

ROOT = Path(__file__).resolve().parents[2]


class DemoError(Exception):
    """The run cannot continue."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The files of a run, in one folder."""

    work: Path

    @property
    def data(self) -> Path:
        """The two replay folders."""
        return self.work / "data"

    @property
    def checkpoint(self) -> Path:
        """Spark's checkpoint folder."""
        return self.work / "checkpoint"

    @property
    def output(self) -> Path:
        """One file per batch."""
        return self.work / "output"

    @property
    def storage(self) -> str:
        """The backend's storage."""
        return (self.work / "storage").resolve().as_uri()

    @property
    def local_dir(self) -> Path:
        """The backend's tables, and socket and log of its sidecar."""
        return self.work / "local"

    @property
    def events(self) -> Path:
        """One line per finished batch."""
        return self.work / "events.jsonl"

    @property
    def figures(self) -> Path:
        """One line per checkpoint."""
        return self.work / "figures.jsonl"

    @property
    def log(self) -> Path:
        """The driver's output."""
        return self.work / "driver.log"


class DriverProcess:
    """The job's driver as a child process in its own session."""

    def __init__(self, layout: Layout, engine: str) -> None:
        self._layout = layout
        self._engine = engine
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start or restart the job."""
        layout = self._layout
        command = [sys.executable, "-m", "examples.flights.job", "--engine", self._engine]
        for name in ("data", "checkpoint", "output", "storage", "local_dir", "events", "figures"):
            command += [f"--{name.replace('_', '-')}", str(getattr(layout, name))]
        environment = {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable, **os.environ}
        with layout.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def exit_code(self) -> int | None:
        """Return the exit code; None while the driver runs."""
        if self._process is None:
            raise DemoError("the driver was never started")
        return self._process.poll()

    def kill(self) -> None:
        """Kill the driver like a crash, then the rest of its process group: the JVM must not continue alone."""
        if self._process is None or self._process.poll() is not None:
            return
        group = self._process.pid
        os.kill(self._process.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self._process.wait()


def sidecar_pid(layout: Layout) -> int | None:
    """Return the process id of the sidecar that answers for the run's storage; None if none does."""
    client = ServiceClient(open_backend(layout.storage, layout.local_dir).auto_started_sidecar.address, patience_s=0.5)
    try:
        return int(client.get("/health")["pid"])
    except DstlError:
        return None
    finally:
        client.close()


def running_batch(checkpoint: Path) -> int | None:
    """Return the id of the batch that Spark has begun and not committed; None between batches."""

    def last(folder: str) -> int:
        with suppress(FileNotFoundError):
            return max((int(name) for name in os.listdir(checkpoint / folder) if name.isdigit()), default=-1)
        return -1

    begun = last("offsets")
    return begun if begun > last("commits") else None


def stop_sidecar(layout: Layout) -> None:
    """Ask the run's sidecar to stop, if there is one; otherwise it would wait for its idle time."""
    pid = sidecar_pid(layout)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
