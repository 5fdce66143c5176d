"""
Starts the embedded sidecar: one per host, user and storage, by whoever needs it first.

A lock file decides who starts it; the others wait until it answers. The process outlives its starter (its session is
its own), and goes away after a time without requests. Its log and its process id lie beside its socket.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from backend_client.service_client import check_listener
from storage.errors import InvalidInputError, UnavailableError
from storage.private_folder import OWN, Trust, check_folder, make_folder, open_lock

_START_TIMEOUT_S = 30.0
_SOCKET_PATH_MAX = 100  # the kernel's limit is 107 bytes


@dataclass(frozen=True, slots=True)
class EmbeddedService:
    """Where the sidecar of one storage lives on this host, and how to start it."""

    storage: str
    folder: str
    idle_exit_s: int
    config_file: str | None = None
    trust: Trust = OWN

    @property
    def socket_path(self) -> str:
        """The Unix socket on which it listens."""
        return str(self._path("sock"))

    @property
    def log_path(self) -> str:
        """Its log."""
        return str(self._path("log"))

    @property
    def pid_path(self) -> str:
        """A file with its process id."""
        return str(self._path("pid"))

    @property
    def address(self) -> str:
        """Its address for a `ServiceClient`."""
        return f"unix://{self.socket_path}"

    def ensure(self) -> None:
        """
        Start the sidecar unless one answers.

        Raises:
            UnavailableError: It does not come up; the message has the end of its log.
            InvalidInputError: The folder cannot hold its socket, or another user may decide what is in it.
        """
        self._prepare_folder()
        if self._answers():
            return
        lock = open_lock(self._path("lock"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self._answers():
                self._start()
        finally:
            os.close(lock)

    def check_folder(self) -> None:
        """
        Return if nobody else decides what the folder holds.

        Raises:
            UntrustedFolderError: Another user may.
        """
        check_folder(self.folder, self.trust)

    def _start(self) -> None:
        command = [sys.executable, "-m", "dstl_service", "serve", "--storage", self.storage]
        command += ["--socket", self.socket_path, "--idle-exit-s", str(self.idle_exit_s)]
        command += ["--log-file", self.log_path]  # it opens it itself, for it begins it anew when it is full
        command += ["--config", self.config_file] if self.config_file else []
        uids = ",".join(str(uid) for uid in sorted(self.trust.uids))
        command += ["--set", f"trusted_uids={uids}", "--set", f"trusted_dir={self.trust.folder}"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        # A shell that ends at once starts it, so that it is nobody's child: it stays when its starter goes, and leaves
        # no zombie when it is killed.
        with open(self._path("log"), "ab") as log:
            shell = subprocess.run(
                ["/bin/sh", "-c", '"$@" >&2 & echo $!', "sh", *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                cwd="/",
                start_new_session=True,
                check=True,
            )
        pid = int(shell.stdout)
        self._path("pid").write_text(f"{pid}\n", encoding="utf-8")
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if not _runs(pid) or time.monotonic() > deadline:
                tail = self._path("log").read_text(encoding="utf-8", errors="replace")[-2000:]
                raise UnavailableError(f"the sidecar for {self.storage} did not start; its log ends: {tail}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(self.socket_path)
            except OSError:
                return False
            check_listener(probe, self.socket_path, self.trust)
        return True

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
        name = hashlib.blake2b(self.storage.encode(), digest_size=6).hexdigest()
        return Path(self.folder) / f"service-{name}.{suffix}"


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
