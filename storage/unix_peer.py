"""The process at the other end of a Unix socket, according to the kernel, so it cannot be forged."""

from __future__ import annotations

import socket
import struct

_CREDENTIALS = struct.Struct("3i")  # process id, user id, group id


def peer_uid(fd: int) -> int | None:
    """
    Return the uid of the peer, the connecting or listening process; None for another kind of socket.

    Raises:
        OSError: The connection is gone.
    """
    credentials = _credentials(fd)
    return None if credentials is None else credentials[1]


def peer_pid(fd: int) -> int | None:
    """
    Return the id of the peer process, connecting or listening; None for another kind of socket.

    A process outside this namespace has the id 0.

    Raises:
        OSError: The connection is gone.
    """
    credentials = _credentials(fd)
    return None if credentials is None else credentials[0]


def _credentials(fd: int) -> tuple[int, int, int] | None:
    # A descriptor, because event loops use their own socket types.
    with socket.socket(fileno=fd) as peer:
        try:
            if peer.family != socket.AF_UNIX:
                return None
            return _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        finally:
            peer.detach()  # the caller owns the descriptor
