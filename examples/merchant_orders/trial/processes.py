"""The pipeline's programs as processes that a demo starts and kills, and how far the job is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from backend_client.service.client import ServiceClient
from examples.merchant_orders.job import open_backend
from storage.errors import DstlError

ROOT = Path(__file__).resolve().parents[3]
_END_TIMEOUT_S = 120.0
_LOG_TAIL_CHARS = 1_500


class DemoError(Exception):
    """The run cannot continue."""


class Program:
    """
    A program of the pipeline, in a process group of its own.

    Args:
        name: Its module in this package.
        arguments: Its arguments.
        work: Folder of its log.
    """

    def __init__(self, name: str, arguments: Sequence[str], work: Path) -> None:
        self.name = name
        self._command = [sys.executable, "-m", f"examples.merchant_orders.{name}", *arguments]
        self._log = work / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, or start it again."""
        environment = {
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
            "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1",  # its JVM lives for seconds
            **os.environ,
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill it like a crash, then the rest of its process group: a JVM must not continue alone."""
        if self._process is None or self._process.poll() is not None:
            return
        os.kill(self._process.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def finish(self) -> None:
        """Ask it to end, and wait until it has; `DemoError` if it fails or takes too long."""
        assert self._process is not None
        self.check()
        self._process.terminate()
        self.wait()

    def wait(self) -> None:
        """Wait for its end; `DemoError` if it fails or takes too long."""
        assert self._process is not None
        try:
            code = self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise DemoError(f"{self.name} has not ended after {_END_TIMEOUT_S:g} s{self._tail()}") from error
        if code != 0:
            raise DemoError(f"{self.name} ended with exit code {code}{self._tail()}")

    def check(self) -> None:
        """Check that it is running; `DemoError` with the end of its log if it has ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            raise DemoError(f"{self.name} ended with exit code {self._process.returncode}{self._tail()}")

    def python_workers(self) -> list[psutil.Process]:
        """Return the Python workers of its JVM, with the process that starts them."""
        assert self._process is not None
        children = psutil.Process(self._process.pid).children(recursive=True)
        return [child for child in children if "pyspark.daemon" in _command(child)]

    def last_line(self) -> str:
        """Return the last line of its log."""
        return self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1]

    def _tail(self) -> str:
        return f"; the end of {self._log}:\n{self._log.read_text(errors='replace')[-_LOG_TAIL_CHARS:]}"


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def last_batch(checkpoint: Path, folder: str = "commits") -> int:
    """Return the id of the newest batch that is committed or, of folder ``offsets``, begun; -1 if there is none."""
    with suppress(FileNotFoundError):
        return max((int(name) for name in os.listdir(checkpoint / folder) if name.isdigit()), default=-1)
    return -1


def sidecar_pid(storage: str, local_dir: Path) -> int | None:
    """Return the process id of the job's sidecar; None if none answers."""
    client = ServiceClient(open_backend(storage, str(local_dir)).auto_started_sidecar.address, patience_s=0.5)
    try:
        return int(client.get("/health")["pid"])
    except DstlError:
        return None
    finally:
        client.close()
