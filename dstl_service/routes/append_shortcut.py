"""
The short way of change sets into the service.

Tasks send thousands of them a second, and FastAPI needs several times longer to check twelve parameters than the
service needs for the set itself. A request that is written as this project's client writes it is taken apart here by
one pattern. Any other one, valid or not, goes on to the route of `appends`, whose rules are the same and whose errors
say what is wrong: the OpenAPI document describes that route, and holds for both ways.
"""

from __future__ import annotations

import re

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from dstl_service.routes.common import take_in
from dstl_service.routes.errors import error_response, log_refusal
from dstl_service.service import ChangelogService
from dstl_service.wire import NAME
from storage.errors import DstlError, InvalidInputError
from storage.model import ChangeSetId, KeyGroupRange, Writer

_NUMBERS = ("checkpoint_id", "epoch", "attempt", "partition", "sqn", "first_key_group", "last_key_group", "count")
_PATH = re.compile(rf"/v1/jobs/({NAME})/change-sets")
_QUERY = re.compile(
    rf"operator=({NAME})"
    + "".join(rf"&{name}=([0-9]{{1,16}})" for name in _NUMBERS)
    + r"&checksum=([0-9a-f]{16})(?:&preemptive=(true|false))?"
)


class AppendShortcut:
    """ASGI middleware that answers appends in the client's own form; all else is for the application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = _parse(scope)
        if asked is None:
            await self._app(scope, receive, send)
            return
        service: ChangelogService = scope["app"].state.service
        try:
            set_id, key_groups, count, checksum, preemptive = asked
            ref = await take_in(service, scope, receive, set_id, key_groups, count, checksum, preemptive=preemptive)
        except DstlError as error:
            log_refusal(scope, error)
            await error_response(error)(scope, receive, send)
        except ClientDisconnect:
            return
        else:
            answer = ref.to_json()
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": answer})


def _parse(scope: Scope) -> tuple[ChangeSetId, KeyGroupRange, int, int, bool] | None:
    """Return what an append says of its set, or None for a request that is not in the client's form."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    path = _PATH.fullmatch(scope["path"])
    if path is None:
        return None
    query = _QUERY.fullmatch(scope["query_string"].decode("latin-1"))
    if query is None:
        return None
    operator, *numbers, checksum, preemptive = query.groups()
    checkpoint_id, epoch, attempt, partition, sqn, first, last, count = map(int, numbers)
    try:
        set_id = ChangeSetId(path[1], operator, checkpoint_id, Writer(epoch, attempt), partition, sqn)
        key_groups = KeyGroupRange(first, last)
    except InvalidInputError:
        return None
    return set_id, key_groups, count, int(checksum, 16), preemptive == "true"
