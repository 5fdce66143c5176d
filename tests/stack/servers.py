"""
Real servers as context managers: built once, on a free loopback port, ready when entered, gone when left.

Programs are kept in `.stack` of the project's root, or in the folder that DSTL_STACK_DIR names, keyed by version.
A server's log lies beside its data and is quoted when it fails to start.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import boto3

from tests.stack.versions import VERSITYGW_MODULE, VERSITYGW_VERSION

_PROJECT_ROOT = Path(__file__).resolve().parents[2]
_READY_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.02
_START_ATTEMPTS = 3  # A free port may be taken before the server listens on it.
_LOG_TAIL_CHARS = 2_000


class ServerError(RuntimeError):
    """A server could not be built or started; the message says why."""


def stack_folder() -> Path:
    """Return the folder that keeps built programs, and make it."""
    folder = Path(os.environ.get("DSTL_STACK_DIR") or _PROJECT_ROOT / ".stack")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def go_program(name: str, module: str, version: str) -> Path:
    """
    Return the path of a Go program, built by `go install` if it is not there yet.

    Args:
        name: The file that the build makes.
        module: Path of its main package.
        version: Its tag, such as "v1.8.0".

    Raises:
        ServerError: There is no `go`, or the build failed.
    """
    folder = stack_folder() / f"bin-{name}-{version}"
    program = folder / name
    with _locked(stack_folder() / f"{name}-{version}.lock"):
        if not program.exists():
            _go_install(f"{module}@{version}", folder)
    return program


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class S3Server:
    """
    A VersityGW that keeps objects in plain files.

    Args:
        data_dir: Where it keeps them; without it, a temporary folder that is deleted at the end.
    """

    access_key = "dstl-test-access"
    secret_key = "dstl-test-secret"
    region = "us-east-1"

    def __init__(self, data_dir: Path | None = None) -> None:
        self._own_folder = (
            None if data_dir else tempfile.TemporaryDirectory(prefix="dstl-s3-", ignore_cleanup_errors=True)
        )
        self._folder = data_dir or Path(self._own_folder.name if self._own_folder else "")
        self.data_dir = self._folder / "buckets"
        self.log_path = self._folder / "server.log"
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint_url(self) -> str:
        """Where it listens; the same after a stop and a start."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Its process id; `ServerError` if it does not run."""
        if self._process is None:
            raise ServerError("the S3 server does not run")
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._own_folder is not None:
            self._own_folder.cleanup()

    def start(self) -> None:
        """Start it and wait until it answers; `ServerError` with the end of its log if it does not."""
        program = go_program("versitygw", VERSITYGW_MODULE, VERSITYGW_VERSION)
        self.data_dir.mkdir(parents=True, exist_ok=True)
        for _ in range(_START_ATTEMPTS):
            port = self._port or free_port()
            if self._try_start(program, port):
                self._port = port
                return
        log = self.log_path.read_text(errors="replace")[-_LOG_TAIL_CHARS:]
        raise ServerError(f"the S3 server did not start; the end of {self.log_path}:\n{log}")

    def stop(self, stop_signal: signal.Signals = signal.SIGTERM) -> None:
        """Stop it, by its process id; with SIGKILL as a crash does. Its objects stay."""
        if self._process is None:
            return
        self._process.send_signal(stop_signal)
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def pause(self) -> None:
        """Let it go silent: connections stay open and are not answered."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)  # Returns when it has stopped; without, it may still answer a request.

    def resume(self) -> None:
        """End a `pause`."""
        os.kill(self.pid, signal.SIGCONT)

    def env(self) -> dict[str, str]:
        """Return the environment variables by which boto3 finds this server."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
        }

    def create_bucket(self, name: str) -> None:
        """Make an empty bucket; 3-63 characters of [a-z0-9-]."""
        client = boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name=self.region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
        )
        client.create_bucket(Bucket=name)
        client.close()

    def _try_start(self, program: Path, port: int) -> bool:
        environment = {**os.environ, "ROOT_ACCESS_KEY": self.access_key, "ROOT_SECRET_KEY": self.secret_key}
        command = [str(program), "--port", f"127.0.0.1:{port}", "posix", str(self.data_dir)]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        if _answers(self._process, port):
            return True
        self.stop(signal.SIGKILL)
        return False


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until the process listens on the port; tell whether it does."""
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            # Somebody else may have taken the port: then our process ends.
            time.sleep(_POLL_S)
            return process.poll() is None
        time.sleep(_POLL_S)
    return False


def _go_install(target: str, folder: Path) -> None:
    go = shutil.which("go")
    if go is None:
        raise ServerError(f"{target} must be built once, and there is no Go on PATH; install Go 1.24 or newer")
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "GOBIN": str(folder)}
    built = subprocess.run([go, "install", target], env=environment, capture_output=True, text=True, check=False)
    if built.returncode != 0:
        raise ServerError(f"go install {target} failed:\n{built.stderr[-_LOG_TAIL_CHARS:]}")


@contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """Hold a lock that other test processes see."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
