"""
Listening sockets: a Unix socket for the service's own user and named others, or TCP, optionally with TLS.

An existing path is removed only if it is a socket on which no process answers.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from pathlib import Path

from dstl_service.process.tcp_keepalive import keep_alive
from storage.errors import ConflictError, InvalidInputError, UnavailableError
from storage.private_folder import OWN, Trust, check_folder, open_lock

_BACKLOG = 2048
_PROBE_TIMEOUT_S = 5.0
# TCP keep-alive: a silent client is probed after a minute and dropped after another one.
_ALIVE_AFTER_S, _ALIVE_EVERY_S, _ALIVE_PROBES = 60, 15, 4


def open_listener(
    socket_path: Path | None = None, host: str = "127.0.0.1", port: int = 0, trust: Trust = OWN
) -> socket.socket:
    """
    Return a listening socket.

    Args:
        socket_path: Path of a Unix socket; None for TCP.
        host: TCP address.
        port: TCP port; 0 lets the system choose.
        trust: Users who may own folders above the socket, and who may call over it.

    Raises:
        InvalidInputError: The socket's path exists but is not a socket, or the address cannot be bound.
        ConflictError: Another process answers on the socket.
        UnavailableError: The probe of an existing socket timed out or was not permitted.
    """
    if socket_path is not None:
        return _unix_listener(socket_path.absolute(), trust)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keep_alive(listener, _ALIVE_AFTER_S, _ALIVE_EVERY_S, _ALIVE_PROBES)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        why = getattr(error, "strerror", None) or error
        raise InvalidInputError(f"cannot listen on {host}:{port}: {why}") from error
    return listener


def describe(listener: socket.socket, *, tls: bool) -> str:
    """Return the listener's address as a URL for clients."""
    address = listener.getsockname()
    if isinstance(address, str):
        return f"unix://{address}"
    host = f"[{address[0]}]" if listener.family == socket.AF_INET6 else address[0]
    return f"{'https' if tls else 'http'}://{host}:{address[1]}"


def _unix_listener(path: Path, trust: Trust) -> socket.socket:
    check_folder(path.parent, trust)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Processes that start at once take turns: each checks, removes and listens before the next one checks.
        lock = open_lock(f"{path}.lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _remove_stale(path)
            previous = os.umask(0o177)  # other users must not reach the socket, not even for a moment
            try:
                listener.bind(str(path))
            finally:
                os.umask(previous)
            if trust.uids:
                path.chmod(0o666)  # each connection is checked for its user, see `dstl_service.access.callers`
            listener.listen(_BACKLOG)
        finally:
            os.close(lock)
    except BaseException as error:
        listener.close()
        if isinstance(error, OSError):
            raise InvalidInputError(f"cannot listen on {path}: {error.strerror or error}") from error
        raise
    return listener


def _remove_stale(path: Path) -> None:
    """Remove the socket of a dead process; raise if the path is anything else."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise InvalidInputError(f"{path} exists but is not a socket; choose another path, or remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError as error:
            raise UnavailableError(
                f"cannot tell whether a process answers on {path}: {error}; stop it first, or choose another path"
            ) from error
        else:
            raise ConflictError(f"another process answers on {path}; stop it first, or choose another path")
