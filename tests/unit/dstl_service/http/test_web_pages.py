"""No request that a browser sends for a page is served."""

from __future__ import annotations

from typing import Any

import pytest

from dstl_service.http.web_pages import host_name
from dstl_service.settings import ServiceSettings
from storage.memory_store import MemoryStore
from tests.unit.dstl_service.http_life import service

COLLECT = "/v1/jobs/job/garbage-collection?dry_run=false"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:7071"}, 200),
        ({"host": "127.0.0.1"}, 200),
        ({"host": "[::1]:7071"}, 200),
        ({"host": "LOCALHOST."}, 200),
        ({"host": "inside.example"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "localhost.evil.example:7071"}, 403),
        ({"host": "[::1].evil.example"}, 403),
        ({"host": ""}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "http://localhost"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "none"}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "TEXT/PLAIN; charset=utf-8"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({"content-type": "application/json"}, 200),
    ],
)
def test_requests_of_web_pages_are_refused(headers: dict[str, str], status: int) -> None:
    """Without a token, only programs that address this host by its own name are accepted."""
    with service(MemoryStore(), allowed_hosts="other.example, Inside.example") as life:
        life.open()

        assert life.client.post(COLLECT, headers=headers).status_code == status
        assert life.client.get("/health", headers={"host": "probe.example"}).status_code == 200


def test_image_of_a_page_is_not_served() -> None:
    """A page's GET for an image or a script has no origin, and would still have the storage written."""
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
    with service(MemoryStore()) as life:
        assert life.client.get("/ready", headers=headers).status_code == 403


def test_no_page_runs_scripts_of_other_hosts() -> None:
    """The service has no page: a script in one would have its origin, and could read what it shows without a token."""
    with service(MemoryStore()) as life:
        answers = [life.client.get(path) for path in ("/docs", "/redoc", "/", "/docs/oauth2-redirect")]

    assert [answer.status_code for answer in answers] == [404] * 4
    assert not any("html" in answer.headers["content-type"] for answer in answers)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"localhost", "127.0.0.1", "::1"}),
        ({"advertised_url": "http://Host-1:1"}, {"localhost", "127.0.0.1", "::1", "host-1"}),
        ({"host": "127.0.0.1", "token": "t"}, None),
        ({"socket_path": "/s"}, None),
    ],
)
def test_names_of_the_service(settings: dict[str, Any], expected: set[str] | None) -> None:
    """A service has its own names and those of loopback; with a token, and where no page can send, any name will do."""
    assert ServiceSettings("memory://x", **settings).known_hosts == expected


def test_page_with_a_token_is_refused_too() -> None:
    """An Origin is refused even where a token is required: no page has business here."""
    with service(MemoryStore(), token="secret") as life:
        headers = {"authorization": "Bearer secret", "host": "any.example"}

        assert life.client.get("/v1/info", headers=headers).status_code == 200
        assert life.client.get("/v1/info", headers={**headers, "origin": "http://any.example"}).status_code == 403


@pytest.mark.parametrize(
    ("header", "name"),
    [(b"a:1", "a"), (b"A.", "a"), (b"[::1]", "::1"), (b"[::1]:80", "::1"), (b"a:b", ""), (b"\xff", "\xff"), (b"", "")],
)
def test_name_in_a_host_header(header: bytes, name: str) -> None:
    """The name is the part before the port; a malformed header is nobody's name."""
    assert host_name(header) == name
