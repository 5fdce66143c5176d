"""
Where the service listens: a Unix socket for its own user, and others who are named, or TCP, perhaps with TLS.

Nothing is taken from others: a path that is no socket is left alone, and so is a socket on which somebody answers.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from dstl_service.process.tcp_keepalive import keep_alive
from storage.errors import ConflictError, InvalidInputError, UnavailableError
from storage.private_folder import OWN, Trust, check_folder, open_lock

_BACKLOG = 2048
_PROBE_TIMEOUT_S = 5.0
# A client that is silent is asked after a minute, and given up after another one.
_ALIVE_AFTER_S, _ALIVE_EVERY_S, _ALIVE_PROBES = 60, 15, 4


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """
    Where to listen.

    Args:
        socket_path: A Unix socket; None for TCP.
        host: Address for TCP.
        port: Port for TCP; 0 lets the system choose.
        trust: Whose folders may lie above the socket, and who may call over it.
    """

    socket_path: Path | None = None
    host: str = "127.0.0.1"
    port: int = 0
    trust: Trust = OWN


def open_listener(address: ListenAddress) -> socket.socket:
    """
    Return a listening socket.

    Raises:
        InvalidInputError: The socket's path holds something else, or the address cannot be listened on.
        ConflictError: Another process answers there.
        UnavailableError: Another process answers there slowly, or may not be asked.
    """
    if address.socket_path is not None:
        return _unix_listener(address.socket_path.absolute(), address.trust)
    listener = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keep_alive(listener, _ALIVE_AFTER_S, _ALIVE_EVERY_S, _ALIVE_PROBES)
    try:
        listener.bind((address.host, address.port))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        why = getattr(error, "strerror", None) or error
        raise InvalidInputError(f"cannot listen on {address.host}:{address.port}: {why}") from error
    return listener


def describe(listener: socket.socket, *, tls: bool) -> str:
    """Return the listener's address as clients give it."""
    address = listener.getsockname()
    if isinstance(address, str):
        return f"unix://{address}"
    host = f"[{address[0]}]" if listener.family == socket.AF_INET6 else address[0]
    return f"{'https' if tls else 'http'}://{host}:{address[1]}"


def _unix_listener(path: Path, trust: Trust) -> socket.socket:
    check_folder(path.parent, trust)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Of several processes that start at once, one looks, removes and listens before the next one looks.
        lock = open_lock(f"{path}.lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _remove_stale(path)
            previous = os.umask(0o177)  # the socket must never be open to others, not even for a moment
            try:
                listener.bind(str(path))
            finally:
                os.umask(previous)
            if trust.uids:
                path.chmod(0o666)  # who may call of those who reach it is asked at each connection
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
    """Remove a socket that a dead process left; raise if it is anything else."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise InvalidInputError(f"{path} is there and is no socket; name another path, or remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError as error:
            raise UnavailableError(f"cannot tell who answers on {path}: {error}; stop it first") from error
        else:
            raise ConflictError(f"another process answers on {path}; stop it first, or name another path")
