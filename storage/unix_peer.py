"""Who is at the other end of a Unix socket, as the kernel knows it: nobody can claim to be somebody else."""

from __future__ import annotations

import socket
import struct

_CREDENTIALS = struct.Struct("3i")  # process id, user id, group id


def peer_uid(fd: int) -> int | None:
    """
    Return the user of the process that connected, or that listens; None for another kind of socket.

    Raises:
        OSError: The connection is gone.
    """
    credentials = _credentials(fd)
    return None if credentials is None else credentials[1]


def peer_pid(fd: int) -> int | None:
    """
    Return the id of the process that connected, or that listens; None for another kind of socket.

    A process that this one's namespace does not know has the id 0.

    Raises:
        OSError: The connection is gone.
    """
    credentials = _credentials(fd)
    return None if credentials is None else credentials[0]


def _credentials(fd: int) -> tuple[int, int, int] | None:
    # A descriptor, for event loops give sockets of their own kinds.
    with socket.socket(fileno=fd) as peer:
        try:
            if peer.family != socket.AF_UNIX:
                return None
            return _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        finally:
            peer.detach()  # it is the caller's
