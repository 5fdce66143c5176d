"""Names that lead out of the storage, to another job, or past a check."""

from __future__ import annotations

from urllib.parse import quote

from loadtest.attack.harness.case import Case, refused
from loadtest.attack.harness.raw import ask, request
from loadtest.attack.harness.target import Attacked

_NAMES = {
    "dot dot": "..",
    "dot dot, encoded": "%2e%2e",
    "dot dot slash, encoded": "..%2f..%2fetc",
    "dot dot slash, encoded twice": "..%252f..%252fetc",
    "backslashes": "..%5c..%5cetc",
    "absolute": "%2fetc%2fpasswd",
    "NUL": "job%00",
    "line feed": "job%0aother",
    "dot": ".",
    "leading dot": ".hidden",
    "overlong UTF-8": "%c0%ae%c0%ae%c0%af",
    "broken UTF-8": "%ff%fe",
    "broken escape": "%zz",
    "other alphabet": quote("данные"),
    "look-alike slash": quote("..\u2215.."),
    "empty": "",
    "5,000 letters": "a" * 5000,
    "wildcard": "*",
    "shell": quote("$(id)"),
    "tilde": "~root",
}
_PLACES = {
    "job": "/v1/jobs/{}/epochs",
    "savepoint": "/v1/jobs/cover/savepoints/{}",
}


def _case(place: str, what: str, path: str) -> Case:
    method = "PUT" if place == "savepoint" else "POST"
    body = b"{}" if place == "savepoint" else b'{"owner":"a"}'

    def run(target: Attacked) -> str | None:
        return refused(ask(target.address, request(method, path, body)))

    return Case("path traversal", f"{place}: {what}", run)


def _operator(what: str, name: str) -> Case:
    path = f"/v1/jobs/neighbour/restore?operator={name}&first_key_group=0&last_key_group=1&to=0.0.a"

    def run(target: Attacked) -> str | None:
        return refused(ask(target.address, request("GET", path)))

    return Case("path traversal", f"operator: {what}", run)


def cases() -> list[Case]:
    """Return the cases of this group."""
    found = [_case(place, what, form.format(name)) for place, form in _PLACES.items() for what, name in _NAMES.items()]
    return found + [_operator(what, _NAMES[what]) for what in ("dot dot slash, encoded", "NUL", "absolute")]
