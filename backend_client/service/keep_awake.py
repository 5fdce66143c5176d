"""
Keeps an embedded sidecar alive while a batch runs that asks it nothing for long.

A sidecar that started itself goes when nobody needs it. The coordinator holds what a batch's tasks sent until its
checkpoint exists, so it must not go while a stage or the user's function takes its time.
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
_PER_IDLE_TIME = 4  # signs of life within the time after which a sidecar would go


@contextmanager
def kept_awake(idle_exit_s: int, client: Callable[[], ServiceClient]) -> Iterator[None]:
    """
    Ask the service for a sign of life now and then until the context ends.

    Args:
        idle_exit_s: After how long without a request it would stop; 0: never.
        client: Makes a client of it, which is used in a thread of its own.
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
            except DstlError as error:  # whoever needs the service learns of it, and starts it again
                logger.debug("the coordinator gave no sign of life: %s", error)
    finally:
        if client is not None:
            client.close()
