"""Requests without the token, or with something like it, against a service that requires one."""

from __future__ import annotations

import statistics
import time

from loadtest.attack.harness.case import Case, with_status
from loadtest.attack.harness.raw import ask, request
from loadtest.attack.harness.target import TOKEN, Attacked

_WRONG: dict[str, str | None] = {
    "none": None,
    "empty": "",
    "only the scheme": "Bearer",
    "scheme and space": "Bearer ",
    "another": "Bearer another",
    "its first letter": f"Bearer {TOKEN[:1]}",
    "all but its last letter": f"Bearer {TOKEN[:-1]}",
    "one letter more": f"Bearer {TOKEN}x",
    "in capitals": f"Bearer {TOKEN.upper()}",
    "without scheme": TOKEN,
    "another scheme": f"Basic {TOKEN}",
    "scheme in small letters and two spaces": f"bearer  {TOKEN}",
    "two tokens": f"Bearer {TOKEN} {TOKEN}",
    "a list": f"Bearer x, Bearer {TOKEN}",
    "in quotes": f'Bearer "{TOKEN}"',
    "null": "Bearer null",
    "letters beyond ASCII": "Bearer \xe9\xff",
    "60,000 letters": "Bearer " + "a" * 60_000,
}
_PATHS = ("/v1/info", "/metrics", "/ready", "/openapi.json", "/docs", "/v1/jobs/neighbour", "/nothing/here")
_BYPASSES = {
    "two slashes": "//v1/info",
    "through the open path": "/health/../v1/info",
    "open path, encoded": "/health%2f..%2fv1/info",
    "open path with a parameter": "/health;/v1/info",
    "open path in capitals": "/HEALTH",
    "open path with a slash": "/health/",
    "in the query": f"/v1/info?token={TOKEN}&access_token={TOKEN}",
    "query like the open path": "/v1/info?/health",
    "fragment": "/v1/info#/health",
}


def _with(name: str, authorization: str | None) -> Case:
    headers = {} if authorization is None else {"authorization": authorization}

    def run(target: Attacked) -> str | None:
        answer = ask(target.address, request("GET", "/v1/info", headers=headers))
        return "the token is in the answer" if TOKEN.encode() in answer.data else with_status(answer, 400, 401)

    return Case("tokens", f"token: {name}", run)


def _without(name: str, method: str, path: str, headers: dict[str, str] | None = None) -> Case:
    def run(target: Attacked) -> str | None:
        answer = ask(target.address, request(method, path, headers=headers))
        return with_status(answer, 400, 401, 403, 404, 405, 307, 421) or (
            "it was admitted" if b"service_id" in answer.data else None
        )

    return Case("tokens", name, run)


def _twice(target: Attacked) -> str | None:
    data = request("GET", "/v1/info", headers={"authorization": f"Bearer x\r\nauthorization: Bearer {TOKEN}"})
    answer = ask(target.address, data)
    return with_status(answer, 200, 400, 401)  # a holder of the token may send more


def _on_kept_connection(target: Attacked) -> str | None:
    first = request("GET", "/v1/info", headers={"authorization": f"Bearer {TOKEN}", "connection": "keep-alive"})
    answer = ask(target.address, first + request("GET", "/v1/info"))
    return None if answer.statuses == [200, 401] else f"the statuses are {answer.statuses}"


def _timing(target: Attacked) -> str | None:
    """The response time does not depend on how much of a token is correct."""
    near = request("GET", "/v1/info", headers={"authorization": f"Bearer {TOKEN[:-1]}x"})
    far = request("GET", "/v1/info", headers={"authorization": f"Bearer x{TOKEN[1:]}"})
    times: dict[bytes, list[float]] = {near: [], far: []}
    for _ in range(150):
        for data, seconds in times.items():
            started = time.perf_counter()
            ask(target.address, data)
            seconds.append(time.perf_counter() - started)
    first, second = (statistics.median(seconds) for seconds in times.values())
    apart = abs(first - second)
    return f"the medians are {apart * 1e6:.0f} us apart" if apart > 0.25 * max(first, second) + 0.0005 else None


def _log(target: Attacked) -> str | None:
    """Neither tokens nor lines forged by strangers are in the log, and 300 refusals are few lines."""
    before = target.log_path.stat().st_size
    for number in range(300):
        ask(target.address, request("GET", f"/v1/info?{'a' * 5000}{number}", headers={"authorization": "Bearer wrong"}))
    text = target.log_path.read_text(errors="replace")
    if TOKEN in text:
        return "the token is in the log"
    grown = len(text) - before
    return f"300 refusals wrote {grown} bytes" if grown > 100_000 else None


def cases() -> list[Case]:
    """Return the cases of this group."""
    found = [_with(name, value) for name, value in _WRONG.items()]
    found += [_without(f"no token: {path}", "GET", path) for path in _PATHS]
    found += [_without(f"no token: {method}", method, "/v1/info") for method in ("HEAD", "POST", "DELETE", "OPTIONS")]
    found += [_without(f"way around: {name}", "GET", path) for name, path in _BYPASSES.items()]
    sockets = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    found.append(
        _without("way around: WebSocket", "GET", "/v1/info", {**sockets, "sec-websocket-key": "A" * 22 + "=="})
    )
    found.append(_without("way around: cookie", "GET", "/v1/info", {"cookie": f"authorization=Bearer {TOKEN}"}))
    found.append(
        _without("way around: proxy", "GET", "/v1/info", {"x-forwarded-for": "127.0.0.1", "x-original-url": "/health"})
    )
    return [
        *found,
        Case("tokens", "two headers", _twice),
        Case("tokens", "second request of a connection", _on_kept_connection),
        Case("tokens", "timing", _timing),
        Case("tokens", "log", _log),
    ]
