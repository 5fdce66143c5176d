"""
Programs that serve on loopback: built once, started on a free port, ready on enter, stopped on exit.

Built programs are kept in `.stack` of the project's root, or in the folder that DSTL_STACK_DIR names, keyed by version.
A server's log is next to its data and is quoted when it fails to start.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

PROJECT_ROOT = Path(__file__).resolve().parents[2]
_READY_TIMEOUT_S = 90.0
_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.02
_START_ATTEMPTS = 3  # A free port may be taken before the server listens on it.
_LOG_TAIL_CHARS = 2_000
_PORT_MIN = 10_000
_PORTS_TRIED = 50
_CONNECTIONS_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_CHANCE = random.SystemRandom()  # all test processes share one seed, but must not take the same port


class ServerError(RuntimeError):
    """A server could not be built or started; the message says why."""


def stack_folder() -> Path:
    """Return the folder of built programs; create it if missing."""
    folder = Path(os.environ.get("DSTL_STACK_DIR") or PROJECT_ROOT / ".stack")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def go_program(name: str, module: str, version: str) -> Path:
    """
    Return the path of a Go program, built by `go install` if missing.

    Args:
        name: File name of the program.
        module: Path of its main package.
        version: Its tag, such as "v1.8.0".

    Raises:
        ServerError: `go` is not installed, or the build failed.
    """
    folder = stack_folder() / f"bin-{name}-{version}"
    program = folder / name
    with stack_lock(f"{name}-{version}"):
        if not program.exists():
            _go_install(f"{module}@{version}", folder)
    return program


def java_program() -> str:
    """Return the Java that Spark uses."""
    home = os.environ.get("JAVA_HOME")
    return f"{home}/bin/java" if home else "java"


def free_port() -> int:
    """
    Return a TCP port of 127.0.0.1 that was free just now.

    If possible it is outside the range of ephemeral ports: any program that opens a connection could take one of those
    before the server listens, or while it is stopped.
    """
    for port in [*(_CHANCE.sample(_quiet_ports(), _PORTS_TRIED)), 0]:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found: int = probe.getsockname()[1]
            return found
    raise ServerError("no free port found on 127.0.0.1")


def _quiet_ports() -> range:
    try:
        first = int(_CONNECTIONS_PORTS.read_text(encoding="ascii").split()[0])
    except OSError:
        first = 1 << 15
    quiet = range(_PORT_MIN, first)
    return quiet if len(quiet) >= _PORTS_TRIED else range(_PORT_MIN, 1 << 16)


class Process(Protocol):
    """An object that can end a process, such as `subprocess.Popen`."""

    def send_signal(self, sent: Any, /) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


def end_process(process: Process, stop_signal: signal.Signals, timeout_s: float) -> None:
    """Send a signal and wait for the end; kill the process if it does not end in time."""
    process.send_signal(stop_signal)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class ServerProcess:
    """
    A process that listens on one port, the same after a restart.

    A subclass defines the command.

    Args:
        title: Its name in errors.
        log_path: File for its output, in an existing folder.
        address: The IPv4 address on which it listens.
    """

    def __init__(self, title: str, log_path: Path, address: str = "127.0.0.1") -> None:
        self._title = title
        self.log_path = log_path
        self.address = address
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        """The port on which it listens; known after the first start."""
        return self._port

    @property
    def endpoint_url(self) -> str:
        """Its URL."""
        return f"http://{self.address}:{self._port}"

    @property
    def pid(self) -> int:
        """Its process id; `ServerError` if it is not running."""
        if self._process is None:
            raise ServerError(f"the {self._title} is not running")
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def command(self, port: int) -> tuple[Sequence[str], Mapping[str, str]]:
        """Return the command that serves on this port, and its additional environment variables."""
        raise NotImplementedError

    def start(self) -> None:
        """Start it and wait until it answers; `ServerError` with the end of its log if it does not."""
        for _ in range(_START_ATTEMPTS):
            port = self._port or free_port()
            if self._try_start(port):
                self._port = port
                return
        log = self.log_path.read_text(errors="replace")[-_LOG_TAIL_CHARS:]
        raise ServerError(f"the {self._title} did not start; the end of {self.log_path}:\n{log}")

    def stop(self, stop_signal: signal.Signals = signal.SIGTERM) -> None:
        """Stop it by its process id; SIGKILL simulates a crash."""
        if self._process is None:
            return
        end_process(self._process, stop_signal, _STOP_TIMEOUT_S)
        self._process = None

    def pause(self) -> None:
        """Suspend it: connections stay open and are not answered."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)  # Returns when it is suspended; before, it may still answer a request.

    def resume(self) -> None:
        """End a `pause`."""
        os.kill(self.pid, signal.SIGCONT)

    def _try_start(self, port: int) -> bool:
        command, environment = self.command(port)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        if self._answers(port):
            return True
        self.stop(signal.SIGKILL)
        return False

    def _answers(self, port: int) -> bool:
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while time.monotonic() < deadline and self._process is not None and self._process.poll() is None:
            with suppress(OSError), socket.create_connection((self.address, port), timeout=1.0):
                # Another process may have taken the port: then ours ends.
                time.sleep(_POLL_S)
                return self._process.poll() is None
            time.sleep(_POLL_S)
        return False


@contextmanager
def stack_lock(name: str) -> Iterator[IO[bytes]]:
    """Hold a lock on a part of the stack folder across processes."""
    with (stack_folder() / f"{name}.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _go_install(target: str, folder: Path) -> None:
    go = shutil.which("go")
    if go is None:
        raise ServerError(f"{target} must be built once, but Go is not on PATH; install Go 1.24 or newer")
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "GOBIN": str(folder)}
    built = subprocess.run([go, "install", target], env=environment, capture_output=True, text=True, check=False)
    if built.returncode != 0:
        raise ServerError(f"go install {target} failed:\n{built.stderr[-_LOG_TAIL_CHARS:]}")
