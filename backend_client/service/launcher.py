"""
Starts a host's sidecar: one per host, user, storage and configuration file, by the first process that needs it.

The holder of a lock file starts it; others wait until it answers. The process outlives its starter, because it has its
own session, and exits after a time without requests. Its log and its process id are files beside its socket.

Nothing else supervises it, so a hung sidecar is killed here: one that accepts connections and answers none. Otherwise
every query of the host would fail until an operator came. Its memory is lost as in a crash, and tasks send it again.
"""

from __future__ import annotations

import enum
import fcntl
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backend_client.service.client import check_listener
from dstl_service.wire import PROGRAM_VERSION
from storage.errors import InvalidInputError, UnavailableError
from storage.private_folder import OWN, Trust, make_folder, open_lock
from storage.unix_peer import peer_pid

_START_TIMEOUT_S = 30.0
_SOCKET_PATH_MAX = 100  # the kernel's limit is 107 bytes
_END_TIMEOUT_S = 10.0
_LOG_END_CHARACTERS = 2000
_QUICK_ANSWER_S = 1.0
_HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


class _Found(enum.Enum):
    """The state of the sidecar's socket."""

    NOBODY = enum.auto()
    HUNG = enum.auto()
    """A process accepts connections and answers none."""
    WELL = enum.auto()


@dataclass(frozen=True, slots=True)
class AutoStartedSidecar:
    """
    The sidecar of one storage on this host: its files, and how to start it.

    Args:
        storage: URL of the object store.
        folder: Holds its socket, log, lock and process id.
        idle_exit_s: Idle time after which it exits; 0: never.
        config_file: Its configuration file, if any.
        trust: The users whose processes may listen on its socket.
        answer_timeout_s: A sidecar that does not answer a health request within this time counts as hung.
    """

    storage: str
    folder: str
    idle_exit_s: int
    config_file: str | None = None
    trust: Trust = OWN
    answer_timeout_s: float = 15.0

    @property
    def socket_path(self) -> str:
        """The path of its Unix socket."""
        return str(self._path("sock"))

    @property
    def log_path(self) -> str:
        """The path of its log."""
        return str(self._path("log"))

    @property
    def pid_path(self) -> str:
        """The path of the file with its process id."""
        return str(self._path("pid"))

    @property
    def address(self) -> str:
        """Its address for a `ServiceClient`."""
        return f"unix://{self.socket_path}"

    def ensure(self) -> None:
        """
        Start the sidecar unless one answers; kill a hung one first.

        Raises:
            UnavailableError: It cannot be started or does not answer; the message has its log's end and the remedy.
                Or it hangs and cannot be killed.
            InvalidInputError: The folder's path is too long for a socket, or another user could change its content.
        """
        self._prepare_folder()
        if self._probe(_QUICK_ANSWER_S) is _Found.WELL:
            return
        try:
            lock = open_lock(self._path("lock"))
        except OSError as error:
            raise self._not_started(f"its lock {self._path('lock')} cannot be opened: {error}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = self._probe(self.answer_timeout_s)
            if found is _Found.HUNG:
                self._end()
            if found is not _Found.WELL:
                self._start()
        finally:
            os.close(lock)

    def command(self) -> list[str]:
        """Return its command line."""
        uids = ",".join(str(uid) for uid in sorted(self.trust.uids))
        return [
            *(_lasting_executable(), "-m", "dstl_service", "serve", "--storage", self.storage),
            *("--socket", self.socket_path, "--idle-exit-s", str(self.idle_exit_s)),
            *("--log-file", self.log_path),  # it opens the log itself, because it rotates it
            *(("--config", self.config_file) if self.config_file else ()),
            *("--set", f"trusted_uids={uids}", "--set", f"trusted_dir={self.trust.folder}"),
        ]

    def _start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.realpath(path) for path in sys.path if path)}
        try:
            pid = run_detached(self.command(), environment, self._path("log"))
            self._path("pid").write_text(f"{pid}\n", encoding="utf-8")
        except subprocess.CalledProcessError as error:
            raise self._not_started(f"the shell that starts it ended with {error.returncode}") from error
        except (OSError, ValueError) as error:
            raise self._not_started(f"{type(error).__name__}: {error}") from error
        deadline = time.monotonic() + _START_TIMEOUT_S
        while self._probe(_QUICK_ANSWER_S) is not _Found.WELL:
            if not _runs(pid):
                raise self._not_started(f"its process {pid} has ended")
            if time.monotonic() > deadline:
                raise self._not_started(f"its process {pid} does not answer within {_START_TIMEOUT_S:g} s")
            time.sleep(0.02)

    def _not_started(self, why: str) -> UnavailableError:
        try:
            end = self._path("log").read_text(encoding="utf-8", errors="replace")[-_LOG_END_CHARACTERS:]
        except OSError:
            end = ""
        return UnavailableError(
            f"the sidecar for {self.storage} did not start: {why}; check its log {self.log_path}, and this host's "
            f"limits of processes, memory and disk space in {self.folder}; the log ends: {end or '(it is empty)'}"
        )

    def _end(self) -> None:
        """Kill the hung sidecar, unless another process listens."""
        hung = self._listening_pid() or self._recorded_pid()
        if hung is None or not _is_sidecar(hung, self.socket_path):
            raise UnavailableError(
                f"the process on {self.socket_path} does not answer, and is not the sidecar that was started here "
                f"(see {self.pid_path}): kill it by hand"
            )
        try:
            os.kill(hung, signal.SIGKILL)
        except PermissionError as error:  # a user in `trusted_uids` may run the sidecar
            raise UnavailableError(
                f"the sidecar hangs, and its process {hung} is another user's: have that user kill it, or root"
            ) from error
        except ProcessLookupError:
            pass
        deadline = time.monotonic() + _END_TIMEOUT_S
        while _runs(hung):
            if time.monotonic() > deadline:
                raise UnavailableError(f"the sidecar hangs, and its process {hung} survives SIGKILL: check its state")
            time.sleep(0.02)

    def _listening_pid(self) -> int | None:
        """Return the listening process's id; None if it accepts no connection or is in another namespace."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_QUICK_ANSWER_S)
            try:
                connection.connect(self.socket_path)
                return peer_pid(connection.fileno()) or None
            except OSError:
                return None

    def _recorded_pid(self) -> int | None:
        try:
            return int(self._path("pid").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def _probe(self, timeout_s: float) -> _Found:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._ask(max(0.01, deadline - time.monotonic()))
            except BlockingIOError:  # the backlog is full, for which connect does not wait
                if time.monotonic() > deadline:
                    return _Found.HUNG
                time.sleep(0.02)

    def _ask(self, timeout_s: float) -> _Found:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(timeout_s)
            try:
                probe.connect(self.socket_path)
                check_listener(probe, self.socket_path, self.trust)
                probe.sendall(_HEALTH)
                return _Found.WELL if probe.recv(1) else _Found.NOBODY
            except BlockingIOError:
                raise
            except TimeoutError:
                return _Found.HUNG
            except OSError:
                return _Found.NOBODY

    def _prepare_folder(self) -> None:
        if len(self.socket_path.encode()) > _SOCKET_PATH_MAX:
            raise InvalidInputError(
                f"local_dir {self.folder} is too long for a Unix socket "
                f"({_SOCKET_PATH_MAX} bytes with the file's name); set local_dir to a shorter path"
            )
        try:
            make_folder(self.folder, self.trust)
        except OSError as error:
            raise UnavailableError(f"local_dir {self.folder} cannot be created: {error.strerror}") from error

    def _path(self, suffix: str) -> Path:
        # With another configuration, the same URL may be that of another server. Each version has its own sidecar.
        place = " ".join(filter(None, (PROGRAM_VERSION, self.storage, self.config_file)))
        name = hashlib.blake2b(place.encode(), digest_size=6).hexdigest()
        return Path(self.folder) / f"service-{name}.{suffix}"


def run_detached(
    command: Sequence[str], environment: Mapping[str, str], log: Path, kept_open: Collection[int] = ()
) -> int:
    """
    Start a process that survives this one, and return its id.

    A shell that exits at once starts it, so that it is not a child of this process: it survives its starter, and
    leaves no zombie when it is killed.

    Args:
        command: Its command line.
        environment: Its environment.
        log: Receives what it writes to standard output and error.
        kept_open: Descriptors of this process that it has, too.

    Raises:
        CalledProcessError: The shell failed.
        OSError: The log or the shell cannot be opened.
    """
    with open(log, "ab") as file:
        shell = subprocess.run(
            ["/bin/sh", "-c", '"$@" >&2 & echo $!', "sh", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=file,
            env=environment,
            cwd="/",
            start_new_session=True,
            check=True,
            pass_fds=tuple(kept_open),
        )
    return int(shell.stdout)


def _lasting_executable() -> str:
    """
    Return the path of this interpreter without links to folders.

    The folder of a YARN container, which goes with the container, has links to what all of an application share. The
    last part stays: a virtual environment is known by the link that is its interpreter.
    """
    folder, name = os.path.split(sys.executable)
    return os.path.join(os.path.realpath(folder), name)


def _runs(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _is_sidecar(pid: int, socket_path: str) -> bool:
    """
    Return whether a process is the service of this socket.

    Process ids are reused, the file may be stale or from another container, and other storages have sidecars, too.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"dstl_service" in words and os.fsencode(socket_path) in words
