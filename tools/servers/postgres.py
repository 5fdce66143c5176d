"""A real PostgreSQL server on loopback, from the distribution's packages."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psycopg

from tools.servers.programs import ServerError, ServerProcess

_DISTRIBUTION = Path("/usr/lib/postgresql")
_USER = "postgres"
_LOG_TAIL_CHARS = 2_000
_RECOVERY_TIMEOUT_S = 60.0
_SETTINGS = {
    "unix_socket_directories": "",
    "fsync": "on",
    "max_connections": "60",
    "shared_buffers": "16MB",
    "wal_level": "logical",  # change events can be read from it
    "max_wal_size": "64MB",
    "log_min_messages": "fatal",
}


def postgres_program(name: str = "postgres") -> Path:
    """
    Return the path of one of PostgreSQL's programs.

    Raises:
        ServerError: PostgreSQL is not installed; says how to install it.
    """
    folders = sorted(_DISTRIBUTION.glob("*/bin"), key=lambda folder: int(folder.parent.name), reverse=True)
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    found = shutil.which(name)
    if found is None:
        raise ServerError("PostgreSQL is not installed: apt-get install postgresql, or brew install postgresql@16")
    return Path(found)


class PostgresServer(ServerProcess):
    """A server with one empty database, which any client on loopback may use. Its data survive a stop."""

    database, user = "postgres", "postgres"

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dstl-pg-", ignore_cleanup_errors=True)
        self._data = Path(self._folder.name) / "data"
        super().__init__("PostgreSQL server", Path(self._folder.name) / "server.log")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._folder.cleanup()

    @property
    def conninfo(self) -> str:
        """Where clients connect, as libpq takes it."""
        return f"host={self.address} port={self.port} dbname={self.database} user={self.user}"

    def command(self, port: int) -> tuple[Sequence[str], Mapping[str, str]]:
        """Make its folder if that is new, and serve it."""
        if not (self._data / "PG_VERSION").exists():
            self._make_folder()
        settings = [item for name, value in _SETTINGS.items() for item in ("-c", f"{name}={value}")]
        command = [str(postgres_program()), "-D", str(self._data), "-p", str(port), "-h", self.address, *settings]
        return [*_as_user(), *command], {}

    def start(self) -> None:
        """Start it and wait until it has recovered from a crash."""
        super().start()
        deadline = time.monotonic() + _RECOVERY_TIMEOUT_S
        while not self._accepts():
            if time.monotonic() > deadline:
                raise ServerError(f"PostgreSQL accepts no connection after {_RECOVERY_TIMEOUT_S:g} s")
            time.sleep(0.02)

    def _accepts(self) -> bool:
        try:
            psycopg.connect(self.conninfo).close()
        except psycopg.OperationalError:
            return False
        return True

    def stop(self, stop_signal: signal.Signals = signal.SIGINT) -> None:
        """Stop it without waiting for its clients; SIGQUIT simulates a crash."""
        super().stop(stop_signal)

    def _make_folder(self) -> None:
        folder = Path(self._folder.name)
        if _as_user():
            shutil.chown(folder, _USER)
        tool = [str(postgres_program("initdb")), "-D", str(self._data), "-U", self.user, "--auth=trust", "--no-sync"]
        made = subprocess.run([*_as_user(), *tool], capture_output=True, text=True, check=False, cwd=folder)
        if made.returncode != 0:
            raise ServerError(f"PostgreSQL could not make its folder:\n{made.stderr[-_LOG_TAIL_CHARS:]}")


def _as_user() -> list[str]:
    """Return the beginning of a command that does not run as root, which PostgreSQL refuses."""
    if os.geteuid() != 0:
        return []
    try:
        entry = pwd.getpwnam(_USER)
    except KeyError as error:
        raise ServerError(f"PostgreSQL does not run as root, and there is no user {_USER!r}") from error
    return ["setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--clear-groups"]
