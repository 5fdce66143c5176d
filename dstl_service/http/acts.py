"""Records the acts of callers in the audit log, see `dstl_service.access.audit`: a route says so where it has acted."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from dstl_service.access.audit import AuditTrail
from dstl_service.http.access_middleware import IDENTITY

_WAITING_MAX = 1_000

logger = logging.getLogger("dstl_service")


class RecordWriter:
    """Writes audit entries in order in one thread; while 1000 entries wait, a new one is only logged."""

    def __init__(self, trail: AuditTrail) -> None:
        self._trail = trail
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="audit")
        self._waiting = 0

    def write(self, who: str, act: str, job: str, facts: dict[str, str]) -> None:
        """Queue an entry; returns at once."""
        if self._waiting >= _WAITING_MAX:
            logger.warning("an act is on record in the log only", extra={"who": who, "act": act, "job": job, **facts})
            return
        self._waiting += 1
        self._thread.submit(self._trail.record, who, act, job, **facts).add_done_callback(self._written)

    def close(self) -> None:
        """Release the thread after the queued entries were written; does not wait for it."""
        self._thread.shutdown(wait=False)

    def _written(self, done: Future[None]) -> None:
        self._waiting -= 1
        if (error := done.exception()) is not None:
            logger.error("an act is not on record", exc_info=error)


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
