"""
Fast path for the two requests of every task: append and restore.

Each task of each batch sends both, and FastAPI takes several times longer to check their parameters than the service
takes for the rest. One pattern here parses a request in the form in which this project's client writes it. Any other
request, valid or not, is passed to the routes of `appends` and `restore`: their rules are the same, and their errors
say what is wrong. The OpenAPI document describes those routes and holds for both paths.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from dstl_service.composition import Parts
from dstl_service.http.errors import error_response, log_refusal
from dstl_service.http.requests import take_in
from dstl_service.http.routes.restore import answer_restore
from dstl_service.wire import NAME, CheckpointRef
from storage.errors import DstlError, InvalidInputError
from storage.key_groups import KeyGroupRange
from storage.model import ChangeSetId, Writer

_PATH = re.compile(rf"/v1/jobs/({NAME})/(change-sets|restore)")
_NUMBERS = ("checkpoint_id", "epoch", "attempt", "partition", "sqn", "first_key_group", "last_key_group", "count")
_APPEND = re.compile(
    rf"operator=({NAME})"
    + "".join(rf"&{name}=([0-9]{{1,16}})" for name in _NUMBERS)
    + r"&checksum=([0-9a-f]{16})(?:&preemptive=(true|false))?"
    rf"(?:&job_uid=({NAME}))?"
)
_REF = r"([0-9]{1,19}\.[0-9]{1,18}\.[0-9A-Za-z_-]{1,64})"
_RESTORE = re.compile(
    rf"operator=({NAME})&first_key_group=([0-9]{{1,9}})&last_key_group=([0-9]{{1,9}})&to={_REF}(?:&have={_REF})?"
)

_Answer = Callable[[Parts, Scope, Receive], Awaitable[Response]]


class FastPath:
    """ASGI middleware that answers appends and restores in the client's own form, and passes on all others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _parse(scope)
        if answer is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await answer(scope["app"].state.parts, scope, receive)
        except DstlError as error:
            log_refusal(scope, error)
            response = error_response(error)
        except ClientDisconnect:
            return
        await response(scope, receive, send)


def _parse(scope: Scope) -> _Answer | None:
    """Return the handler of a request; None if it is not in the client's form."""
    if scope["type"] != "http":
        return None
    path = _PATH.fullmatch(scope["path"])
    if path is None:
        return None
    query = scope["query_string"].decode("latin-1")
    try:
        match scope["method"], path[2]:
            case "POST", "change-sets":
                return _append(path[1], query)
            case "GET", "restore":
                return _restore(path[1], query)
    except InvalidInputError:
        pass
    return None


def _append(job: str, query: str) -> _Answer | None:
    found = _APPEND.fullmatch(query)
    if found is None:
        return None
    operator, *numbers, checksum, preemptive, job_uid = found.groups()
    checkpoint_id, epoch, attempt, partition, sqn, first, last, count = map(int, numbers)
    set_id = ChangeSetId(job, operator, checkpoint_id, Writer(epoch, attempt), partition, sqn)
    key_groups = KeyGroupRange(first, last)

    async def answer(parts: Parts, scope: Scope, receive: Receive) -> Response:
        is_preemptive = preemptive == "true"
        ref = await take_in(
            parts.intake,
            scope,
            receive,
            set_id,
            key_groups,
            count,
            int(checksum, 16),
            preemptive=is_preemptive,
            job_uid=job_uid or "",
        )
        return Response(ref.to_json(), media_type="application/json")

    return answer


def _restore(job: str, query: str) -> _Answer | None:
    found = _RESTORE.fullmatch(query)
    if found is None:
        return None
    operator, first, last, to_checkpoint, from_checkpoint = found.groups()
    key_groups = KeyGroupRange(int(first), int(last))
    target = CheckpointRef.parse(to_checkpoint)
    base = CheckpointRef.parse(from_checkpoint) if from_checkpoint else None

    async def answer(parts: Parts, _scope: Scope, _receive: Receive) -> Response:
        return await answer_restore(parts, job, operator, key_groups, base, target)

    return answer
