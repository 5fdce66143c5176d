"""
The attacked services, each with a neighbour: a job that runs all the time and must not be affected.

The effect of an attack is measured from outside: the memory of the process, the neighbour's latency, and the objects of
jobs other than the neighbour's in the storage.
"""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from backend_client.service.client import ServiceClient
from dstl_service.wire import LogTarget
from loadtest.attack.harness.raw import Address, Answer, ask, request
from storage.checksum import checksum64
from storage.errors import DstlError
from storage.key_groups import KeyGroupRange
from tools.servers.programs import ServerError, end_process

NEIGHBOUR = "neighbour"
TOKEN = "the-token-of-the-attacked-service"  # noqa: S105 - for a service that lives for seconds
_READY_S = 60.0
_SETTLE_S = 10.0
_PAUSE_S = 0.1
"""Between two batches of the neighbour, unless one is awaited: the service has time for the attack."""


@dataclass(frozen=True, slots=True)
class State:
    """State of a service during an attack."""

    rss_growth_bytes: int
    neighbour_ms_max: float
    neighbour_errors: int
    neighbour_error: str
    """The last error."""
    stored: tuple[str, ...]
    """New objects that belong to no known job."""


class Attacked:
    """
    A service process on a loopback port or a Unix socket, ready on enter, stopped on exit.

    Args:
        folder: Its own folder for storage, log and token file.
        environment: Settings.
        token: Whether requests need `TOKEN`.
        limit: Shell commands to run before it starts, such as a limit of open files.
        beside: Another service, whose storage and token it shares; then it has no neighbour of its own.
        tls: Whether it has a certificate.
        unix: Whether it listens on a Unix socket, as an auto-started sidecar.
    """

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        *,
        token: bool = False,
        limit: str = "",
        beside: Attacked | None = None,
        tls: bool = False,
        unix: bool = False,
    ) -> None:
        folder.mkdir()
        self.log_path = folder / "log"
        self.storage: Path = folder / "storage" if beside is None else beside.storage
        self._environment = {**os.environ, **(environment or {})}
        self._limit = limit
        self._beside = beside
        token = token if beside is None else beside.token is not None
        self.token: str | None = TOKEN if token else None
        if token:
            path = folder / "tokens"
            path.touch(0o600)
            path.write_text(f"{TOKEN}\n", encoding="utf-8")
            self._environment["DSTL_TOKEN_FILE"] = str(path)
        host, port = _free_port()
        self.address: Address = str(folder / "socket") if unix else (host, port)
        self.url = f"unix://{self.address}" if unix else f"http{'s' if tls else ''}://{host}:{port}"
        self._listening = ["--socket", str(self.address)] if unix else ["--host", host, "--port", str(port)]
        self._authority_file = self._certified(folder) if tls else None
        self._trust = ssl.create_default_context(cafile=self._authority_file) if tls else None
        if beside is not None:
            self._environment["DSTL_ADVERTISED_URL"] = self.url
        self.neighbour: Neighbour | None = None
        self._own_jobs = {NEIGHBOUR}

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "dstl_service", "serve", "--storage", f"file://{self.storage}"]
        command += self._listening
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", f'{self._limit or ":"}; exec "$@"', "sh", *command],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + _READY_S
        while not self.answers(1.0):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ServerError(f"the service did not start: {self.log_path.read_text(errors='replace')[-2000:]}")
            time.sleep(0.02)
        if self._beside is None:
            self.neighbour = Neighbour(self.url, self.token, self._authority_file)
        self._watch = _Watch(psutil.Process(self._process.pid))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.stop()
        if self.neighbour is not None:
            self.neighbour.stop()
        end_process(self._process, signal.SIGTERM, 20.0)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def answers(self, within_s: float) -> bool:
        """Return whether the process runs and answers in time."""
        try:
            return ask(self.address, request("GET", "/health"), wait_s=within_s, tls=self._trust).status == 200
        except OSError:
            return False

    def ask(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Answer:
        """Send a well-formed request with the token, if one is needed."""
        own = {} if self.token is None else {"authorization": f"Bearer {self.token}"}
        return ask(self.address, request(method, path, body, {**own, **(headers or {})}), tls=self._trust)

    def open_files(self) -> int:
        """Return how many files the process has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def begin(self) -> None:
        """Start measuring."""
        self._watch.begin()
        if self.neighbour is not None:
            self.neighbour.begin()
        self._before = self._objects()

    def settle(self) -> None:
        """Wait until all effects on the neighbour have been measured."""
        if self.neighbour is not None:
            self.neighbour.settle(_SETTLE_S)

    def state(self, known: Sequence[str] = ()) -> State:
        """Return the measurements since `begin`; objects of `known` jobs are not reported."""
        self._own_jobs |= set(known)
        stored = traces(self._objects() - self._before, (NEIGHBOUR, *known), self._own_jobs)
        seen = self.neighbour
        beside = (0.0, 0, "") if seen is None else (seen.ms_max(), seen.errors, seen.last_error)
        return State(self._watch.growth(), *beside, stored)

    def _certified(self, folder: Path) -> str:
        """Create a certificate for it; return the file of the CA's certificate."""
        import trustme  # a test dependency, needed only here

        authority = trustme.CA()
        pem = folder / "service.pem"
        authority.issue_cert("localhost", "127.0.0.1").private_key_and_cert_chain_pem.write_to_path(pem)
        authority.cert_pem.write_to_path(folder / "ca.pem")
        self._environment["DSTL_TLS_CERTIFICATE_FILE"] = str(pem)
        return str(folder / "ca.pem")

    def _objects(self) -> set[str]:
        if not self.storage.exists():
            return set()
        files = (path.relative_to(self.storage) for path in self.storage.rglob("*") if path.is_file())
        return {str(path) for path in files if path.parts[0] != ".tmp"}  # files that a put will rename


def _free_port() -> tuple[str, int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return "127.0.0.1", int(free.getsockname()[1])


def traces(stored: Collection[str], known: Collection[str], own_jobs: Collection[str]) -> tuple[str, ...]:
    """
    Return the objects that a case must not have created, in order.

    Args:
        stored: Keys of new objects.
        known: Jobs that may have new objects.
        own_jobs: Those, and the jobs of earlier cases, whose audit records may be written while a later case runs.
    """
    own = [f"/{job}/" for job in known] + [f"/@audit/{job}/" for job in own_jobs]
    return tuple(sorted(key for key in stored if not any(place in f"/{key}" for place in own)))


class _Watch:
    """Samples a process's memory continuously."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._first = self._peak = process.memory_info().rss
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def begin(self) -> None:
        self._first = self._peak = self._process.memory_info().rss

    def growth(self) -> int:
        return max(0, max(self._peak, self._process.memory_info().rss) - self._first)

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            try:
                self._peak = max(self._peak, self._process.memory_info().rss)
            except psutil.Error:
                return


class Neighbour:
    """A job that appends a small set and completes a checkpoint several times a second, and measures the latency."""

    def __init__(self, url: str, token: str | None, ca_file: str | None = None) -> None:
        self._client = ServiceClient(url, token, patience_s=60.0, ca_file=ca_file)
        self._path = f"/v1/jobs/{NEIGHBOUR}"
        self.epoch = self._open()
        self._base: dict[str, Any] | None = None
        self._next = 0
        self._lock = threading.Condition()
        self._batches, self._wanted = 0, 1
        self._started_s: float | None = None
        self._ms_max = 0.0
        self.errors, self.last_error = 0, ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def last_ref(self) -> dict[str, Any] | None:
        """The newest checkpoint."""
        return self._base

    def begin(self) -> None:
        """Start measuring."""
        with self._lock:
            self._ms_max, self.errors = 0.0, 0

    def ms_max(self) -> float:
        """Return the longest duration of a batch, the running one included."""
        with self._lock:
            running = 0.0 if self._started_s is None else (time.monotonic() - self._started_s) * 1000
            return max(self._ms_max, running)

    def settle(self, timeout_s: float) -> None:
        """Wait until a batch that began after this call has ended, so that all earlier effects are measured."""
        with self._lock:
            wanted = self._wanted = self._batches + 2
            self._lock.notify_all()
            self._lock.wait_for(lambda: self._batches >= wanted, timeout_s)

    def stop(self) -> None:
        """Stop it; a hung batch is abandoned."""
        self._ended.set()
        self._thread.join(5.0)
        self._client.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            with self._lock:
                self._lock.wait_for(lambda: self._wanted > self._batches or self._ended.is_set(), _PAUSE_S)
                self._started_s = time.monotonic()
            try:
                self._batch()
            except (DstlError, OSError) as error:
                self.errors += 1
                self.last_error = f"{type(error).__name__}: {error}"
                self._take_back()
            with self._lock:
                self._ms_max = max(self._ms_max, (time.monotonic() - self._started_s) * 1000)
                self._started_s = None
                self._batches += 1
                self._lock.notify_all()

    def _open(self) -> int:
        return int(self._client.post(f"{self._path}/epochs", {"owner": "neighbour"})["epoch"])

    def _take_back(self) -> None:
        """Recover after a counted error, so that the next case is judged by itself."""
        with suppress(DstlError, OSError):
            self.epoch = self._open()
            latest = self._client.get(self._path)["latest"]
            self._base = latest["ref"] if latest else None
            self._next = latest["ref"]["id"] + 1 if latest else 0

    def _batch(self) -> None:
        number, payload = self._next, os.urandom(500)
        checkpoint = f"{self._path}/checkpoints/{number}"
        self._client.post(f"{checkpoint}/begin", {"epoch": self.epoch})
        ref = append(self._client, NEIGHBOUR, self.epoch, number, payload)
        body = complete_body(self.epoch, number, self._base, [ref])
        self._base = self._client.post(f"{checkpoint}/complete", body)["ref"]
        self._next += 1


def append(client: ServiceClient, job: str, epoch: int, checkpoint_id: int, payload: bytes) -> dict[str, Any]:
    """Append a set; return its reference."""
    target = LogTarget(job, "op", checkpoint_id, epoch, 1, 0, KeyGroupRange(0, 127))
    return asdict(client.append(target, 1, payload, checksum64(payload), 1, preemptive=False))


def complete_body(
    epoch: int, checkpoint_id: int, base: dict[str, Any] | None, refs: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the request that completes a checkpoint of these sets."""
    return {
        "epoch": epoch,
        "uid": f"e{epoch}c{checkpoint_id}",
        "base": base,
        "refs": list(refs),
        "operators": [],
        "query_id": "",
        "offsets": "",
    }
