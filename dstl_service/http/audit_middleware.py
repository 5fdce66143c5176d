"""
Records acts on jobs in the audit log, see `dstl_service.access.audit`; one table lists the recorded requests.

A plain ASGI middleware inside `AccessMiddleware`, which identifies the caller. No request waits for its record.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dstl_service.access.audit import AuditTrail
from dstl_service.http.access_middleware import IDENTITY
from dstl_service.wire import NAME

_ACTS: Mapping[str, re.Pattern[str]] = {
    "open": re.compile(rf"POST /v1/jobs/(?P<job>{NAME})/epochs"),
    "abort": re.compile(rf"POST /v1/jobs/(?P<job>{NAME})/checkpoints/0*(?P<checkpoint_id>[0-9]+)/abort"),
    "create savepoint": re.compile(rf"PUT /v1/jobs/(?P<job>{NAME})/savepoints/(?P<savepoint>{NAME})"),
    "delete savepoint": re.compile(rf"DELETE /v1/jobs/(?P<job>{NAME})/savepoints/(?P<savepoint>{NAME})"),
    "collect garbage": re.compile(rf"POST /v1/jobs/(?P<job>{NAME})/garbage-collection"),
}
_ENDS = ("/epochs", "/abort", "/garbage-collection")
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


class Recorder:
    """Passes requests on and records those in the table whose answer is a success."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        found = _act_of(scope) if scope["type"] == "http" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        act, job, facts = found

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 300:
                scope["app"].state.record.write(scope[IDENTITY].name, act, job, facts)
            await send(message)

        await self._app(scope, receive, watched)


def _act_of(scope: Scope) -> tuple[str, str, dict[str, str]] | None:
    """Return a request's act, job and further facts; None if it is not recorded."""
    path: str = scope["path"]
    if not path.endswith(_ENDS) and "/savepoints/" not in path:
        return None
    for act, pattern in _ACTS.items():
        found = pattern.fullmatch(f"{scope['method']} {path}")
        if found is not None:
            facts = found.groupdict()
            dry_run = parse_qs(scope["query_string"].decode("latin-1")).get("dry_run", ["true"])[-1]
            is_dry = act == "collect garbage" and dry_run.lower() in ("true", "1", "on", "yes", "t", "y")
            return None if is_dry else (act, facts.pop("job"), facts)
    return None
