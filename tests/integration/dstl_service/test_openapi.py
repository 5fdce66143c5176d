"""
The service as described by its OpenAPI document: fuzzed, and called without the token, on every route.

A failure means that a request can bring the service down, hang it, get past its checks, or be answered to strangers.
"""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools import fuzz_api

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

METHODS = ("get", "put", "post", "delete", "patch")


class Asker:
    """Sends plain requests to a service, each over its own connection."""

    def __init__(self, address: str) -> None:
        self.host = address.removeprefix("http://")

    def ask(self, method: str, path: str, **headers: str) -> tuple[int, dict[str, str], Any]:
        """Return status, headers and the JSON body, or None for another body."""
        connection = http.client.HTTPConnection(self.host, timeout=30)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            fields = {name.lower(): value for name, value in answer.getheaders()}
            data = answer.read()
            return answer.status, fields, json.loads(data) if "json" in fields.get("content-type", "") else None
        finally:
            connection.close()


@pytest.fixture(scope="module")
def asker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asker]:
    """Return a client of a running service that requires a token."""
    with fuzz_api.running_service(Path(tmp_path_factory.mktemp("service"))) as address:
        yield Asker(address)


@pytest.fixture(scope="module")
def operations(asker: Asker) -> list[tuple[str, str]]:
    """Return method and path of all operations in the document."""
    status, _, document = asker.ask("GET", "/openapi.json", authorization=f"Bearer {fuzz_api.TOKEN}")
    assert status == 200
    found = [(method.upper(), path) for path, item in document["paths"].items() for method in item if method in METHODS]
    assert len(found) >= 14
    return found


def test_fuzzed_service_keeps_to_its_description(capfd: pytest.CaptureFixture[str]) -> None:
    """No answer is a 5xx, hangs or is undescribed, and no invalid request is accepted."""
    code = fuzz_api.main(["--max-examples", "10"])

    assert code == 0, capfd.readouterr().out[-8000:]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Bearer {fuzz_api.TOKEN}x"},
        {"authorization": f"Bearer {fuzz_api.TOKEN[:-1]}"},
        {"authorization": fuzz_api.TOKEN},
        {"authorization": f"Basic {fuzz_api.TOKEN}"},
        {"x-authorization": f"Bearer {fuzz_api.TOKEN}"},
    ],
    ids=["none", "empty", "wrong", "longer", "shorter", "bare", "basic", "elsewhere"],
)
def test_stranger_is_refused_everywhere(
    headers: dict[str, str], asker: Asker, operations: list[tuple[str, str]]
) -> None:
    """Without the token every route but the health check is a 401, and so are documents and unknown paths."""
    paths = [(method, re.sub(r"\{[^}]*\}", "0", path)) for method, path in operations if path != "/health"]
    paths += [("GET", path) for path in ("/openapi.json", "/docs", "/redoc", "/docs/oauth2-redirect", "/", "/none")]
    paths += [("GET", "/health/"), ("GET", "//health"), ("GET", "/health/../v1/info"), ("OPTIONS", "/v1/info")]
    for method, path in paths:
        status, fields, body = asker.ask(method, path, **headers)

        assert (status, body["kind"], fields["www-authenticate"]) == (401, "unauthorized", "Bearer"), path
    assert asker.ask("GET", "/health", **headers)[0] == 200


def test_token_in_query_is_no_token(asker: Asker) -> None:
    """A token in an address, where logs would keep it, does not count."""
    assert asker.ask("GET", f"/v1/info?token={fuzz_api.TOKEN}&authorization=Bearer%20{fuzz_api.TOKEN}")[0] == 401


def test_undescribed_answers_have_the_form_of_errors(asker: Asker) -> None:
    """An unknown path or method is answered like any other error."""
    token = {"authorization": f"Bearer {fuzz_api.TOKEN}"}
    for method, path, expected in (("GET", "/none", 404), ("DELETE", "/v1/info", 405)):
        status, _, body = asker.ask(method, path, **token)

        assert status == expected
        assert body.keys() == {"kind", "message", "context"}
    assert asker.ask("PATCH", "/v1/jobs/j/savepoints/s", **token)[1]["allow"] == "DELETE, PUT"
