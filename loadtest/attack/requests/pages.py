"""Requests that a web page in a local browser could send to a service without a token on the loopback address."""

from __future__ import annotations

from loadtest.attack.harness.case import Case, refused
from loadtest.attack.harness.raw import ask, request
from loadtest.attack.harness.target import Attacked

_COLLECT = "/v1/jobs/neighbour/garbage-collection?dry_run=false"
_HOSTS = (
    "attacker.example",
    "attacker.example:80",
    "127.0.0.1.attacker.example",
    "localhost.attacker.example",
    "a@127.0.0.1",
)
_ORIGINS = ("https://attacker.example", "null", "http://localhost.attacker.example", "file://", "http://127.0.0.1:8000")


def _case(name: str, method: str, path: str, headers: dict[str, str], host: str = "127.0.0.1") -> Case:
    body = b"" if method in ("GET", "OPTIONS") else b"{}"

    def run(target: Attacked) -> str | None:
        answer = ask(target.address, request(method, path, body, headers, host=host))
        if b"access-control-allow" in answer.data.lower():
            return f"web pages are admitted: {answer.data[:200]!r}"
        return refused(answer)

    return Case("web pages", name, run)


def cases() -> list[Case]:
    """Return the cases of this group."""
    plain = {"content-type": "text/plain"}
    found = [_case(f"host {host!r}: read", "GET", "/v1/info", {}, host) for host in _HOSTS]
    found += [_case(f"host {host!r}: collect", "POST", _COLLECT, plain, host) for host in _HOSTS[:3]]
    found += [_case(f"origin {origin}: collect", "POST", _COLLECT, {"origin": origin, **plain}) for origin in _ORIGINS]
    found += [_case(f"origin {origin}: read", "GET", "/v1/info", {"origin": origin}) for origin in _ORIGINS[:2]]
    image = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
    found += [_case(f"image: {path}", "GET", path, image) for path in ("/ready", "/metrics", "/v1/jobs/neighbour")]
    asked = {"origin": "https://attacker.example", "access-control-request-method": "POST"}
    found.append(_case("may a page post?", "OPTIONS", "/v1/jobs/neighbour/epochs", asked))
    form = {"origin": "https://attacker.example", "content-type": "application/x-www-form-urlencoded"}
    found.append(_case("form that opens a job", "POST", "/v1/jobs/neighbour/epochs", form))
    return found
