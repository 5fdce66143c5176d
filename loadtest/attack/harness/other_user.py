"""Helpers to act as another user of the same host: their folders, programs run as that user, and a service."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tools.servers.programs import end_process

NOBODY = 65534
IS_ROOT = os.geteuid() == 0
_START_S = 30.0

_BECOME_NOBODY = f"""
import os, socket, sys
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
"""  # within the program, since the interpreter's folder may be closed to others
CALL = """
connection = socket.socket(socket.AF_UNIX)
connection.settimeout(5)
try:
    connection.connect(sys.argv[1])
    connection.sendall(b"GET /v1/info HTTP/1.1\\r\\nhost: localhost\\r\\nconnection: close\\r\\n\\r\\n")
    print(connection.recv(4096)[:64])
except OSError as error:
    print(type(error).__name__)
"""
LISTEN = """
os.umask(0)
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("listening", flush=True)
while True:
    connection, _ = listener.accept()
    print(connection.recv(4096), flush=True)
    connection.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\n{}")
"""
LIST = "print(os.listdir(sys.argv[1]))"


@contextmanager
def folder_of(owner: int = 0, mode: int = 0o700) -> Iterator[Path]:
    """Yield a folder of a user with a short path, as sockets need."""
    path = Path(tempfile.mkdtemp(prefix="da"))
    os.chown(path, owner, owner)
    path.chmod(mode)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def as_nobody(program: str, *arguments: str) -> str:
    """Run a Python program as the other user; return its output, errors included."""
    done = subprocess.run(
        [sys.executable, "-c", _BECOME_NOBODY + program, *arguments],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.stdout + done.stderr


@contextmanager
def service_on(
    socket_path: Path,
    *arguments: str,
    setup: str = ":",
    environment: Mapping[str, str] | None = None,
    storage: Path | None = None,
) -> Iterator[str]:
    """Start a service on a Unix socket; yield the end of its log once it answers or has ended."""
    with tempfile.TemporaryDirectory() as own, tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "dstl_service", "serve", "--storage", f"file://{storage or own}/s"]
        command += ["--socket", str(socket_path), *arguments]
        process = subprocess.Popen(
            ["/bin/sh", "-c", f'{setup}; exec "$@"', "sh", *command],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            deadline = time.monotonic() + _START_S
            while process.poll() is None and not _listens(socket_path) and time.monotonic() < deadline:
                time.sleep(0.05)
            log.seek(0)
            yield log.read().decode(errors="replace")
        finally:
            end_process(process, signal.SIGTERM, 20.0)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
        connection.connect(str(path))
        return True
    return False


@contextmanager
def impostor(path: Path) -> Iterator[Callable[[], str]]:
    """Listen on a socket as the other user; yield a function that stops it and returns all received data."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", _BECOME_NOBODY + LISTEN, str(path)],
        cwd="/",
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()

    def got() -> str:
        process.kill()
        return process.communicate()[0]

    with process:
        try:
            yield got
        finally:
            process.kill()
