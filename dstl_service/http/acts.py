"""Records the acts of callers in the audit log, see `dstl_service.access.audit`; a route calls it after an act."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Annotated

from fastapi import Depends, Request

from dstl_service.access.audit import AuditTrail
from dstl_service.http.access_middleware import IDENTITY
from dstl_service.process.shares import SharedRoom, shares_of

_WAITING_MAX = 2_000

logger = logging.getLogger("dstl_service")


class RecordWriter:
    """Writes audit entries in order in one thread; one beyond its job's share of those that wait is only logged."""

    def __init__(self, trail: AuditTrail) -> None:
        self._trail = trail
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="audit")
        self._waiting = SharedRoom(shares_of(_WAITING_MAX))
        self._lock = Lock()  # entries are counted on the event loop, and discounted in the thread

    def write(self, who: str, act: str, job: str, facts: dict[str, str]) -> None:
        """Queue an entry; returns at once."""
        with self._lock:
            is_admitted = self._waiting.take(job, 1)
        if not is_admitted:
            logger.warning("an act is recorded only in the log", extra={"who": who, "act": act, "job": job, **facts})
            return
        self._thread.submit(self._trail.record, who, act, job, **facts).add_done_callback(partial(self._written, job))

    def close(self) -> None:
        """Release the thread after the queued entries were written; does not wait for it."""
        self._thread.shutdown(wait=False)

    def _written(self, job: str, done: Future[None]) -> None:
        with self._lock:
            self._waiting.give_back(job, 1)
        if (error := done.exception()) is not None:
            logger.error("an act is missing in the audit log", extra={"job": job}, exc_info=error)


@dataclass(frozen=True, slots=True)
class CallerActs:
    """
    Records acts of one request's caller.

    Args:
        who: The caller's name.
        writer: Writes the entries.
    """

    who: str
    writer: RecordWriter

    def record(self, act: str, job: str, **facts: object) -> None:
        """Record an act that has succeeded; returns at once, no request waits for its record."""
        self.writer.write(self.who, act, job, {name: str(value) for name, value in facts.items()})


async def _acts_of(request: Request) -> CallerActs:
    return CallerActs(request.scope[IDENTITY].name, request.app.state.record)


Acts = Annotated[CallerActs, Depends(_acts_of)]
