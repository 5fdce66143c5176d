"""
Keeps an auto-started sidecar alive during a long batch without requests.

An auto-started sidecar exits when it is idle. The coordinator holds the change sets of a batch until its checkpoint
exists, so it must not exit during a slow stage or user function.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from backend_client.service.client import ServiceClient
from storage.errors import DstlError

logger = logging.getLogger("backend_client")

_EVERY_MAX_S = 60.0
_PER_IDLE_TIME = 4  # health requests per idle-exit time


@contextmanager
def kept_awake(idle_exit_s: int, client: Callable[[], ServiceClient]) -> Iterator[None]:
    """
    Send health requests to the service until the context ends.

    Args:
        idle_exit_s: Idle time after which the service exits; 0: never.
        client: Makes a client, which is used in its own thread.
    """
    if not idle_exit_s:
        yield
        return
    ended = threading.Event()
    every_s = min(_EVERY_MAX_S, idle_exit_s / _PER_IDLE_TIME)
    thread = threading.Thread(target=_ask_until, args=(ended, every_s, client), name="dstl-keep-awake", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def _ask_until(ended: threading.Event, every_s: float, make_client: Callable[[], ServiceClient]) -> None:
    client: ServiceClient | None = None
    try:
        while not ended.wait(every_s):
            try:
                client = client or make_client()
                client.get("/health")
            except DstlError as error:  # the next real request restarts the service
                logger.debug("the coordinator did not answer a health request: %s", error)
    finally:
        if client is not None:
            client.close()
