"""The largest size of a request, on every route."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from dstl_service.http import access_middleware
from storage.memory_store import MemoryStore
from tests.unit.dstl_service.http_life import Life, service

LIMIT = 2_000


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    """Return a service that accepts small bodies only."""
    monkeypatch.setattr(access_middleware, "JSON_BYTES_MAX", LIMIT)
    with service(MemoryStore()) as made:
        made.open()
        yield made


def routes_with_body(life: Life) -> list[tuple[str, str]]:
    """Return the method and path of all routes that read a body."""
    paths = life.client.get("/openapi.json").json()["paths"]
    found = [
        (method, re.sub(r"\{[^}]*_id\}", "0", path).replace("{job}", "job"))
        for path, item in paths.items()
        for method, operation in item.items()
        if "requestBody" in operation
    ]
    assert len(found) >= 6
    return found


def pieces(size_bytes: int) -> Iterator[bytes]:
    """Yield a body whose length is not stated."""
    yield b'{"x": "'
    for _ in range(size_bytes // 100):
        yield b"x" * 100
    yield b'"}'


@pytest.mark.parametrize("is_stated", [True, False])
def test_large_body_is_refused_everywhere(is_stated: bool, life: Life) -> None:
    """I9: no route reads more than the limit, whether the length is stated or not; streams have limits of their own."""
    query = "operator=op&checkpoint_id=0&epoch=1&attempt=1&partition=0&sqn=0&count=1"
    query += f"&first_key_group=0&last_key_group=0&checksum={'0' * 16}"
    for method, path in routes_with_body(life):
        body = b"".join(pieces(LIMIT)) if is_stated else pieces(LIMIT)
        headers = {"content-type": "application/json"}
        answer = life.client.request(method, f"{path}?{query}", content=body, headers=headers)

        assert answer.status_code == (400 if access_middleware.is_streamed(method.upper(), path) else 413), path
        assert "at most" in answer.json()["message"]


@pytest.mark.parametrize("is_stated", [True, False])
def test_body_of_many_values_is_refused_before_it_is_parsed(
    is_stated: bool, life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I9: a few bytes become a value of many in memory, so the number of values is limited too."""
    monkeypatch.setattr(access_middleware, "JSON_VALUES_MAX", 99)
    pieces = [b'{"owner": "a", "epoch": 1, "x": [', b"[]," * 48, b"1]}"]
    for method, path in routes_with_body(life):
        if access_middleware.is_streamed(method.upper(), path):
            continue
        body = b"".join(pieces) if is_stated else iter(pieces)
        answer = life.client.request(method, path, content=body, headers={"content-type": "application/json"})

        assert (answer.status_code, answer.json()["kind"]) == (413, "invalid_input"), path
        assert "values" in answer.json()["message"]


def test_body_within_limit_is_taken(life: Life) -> None:
    """A body of unknown length within the limit is accepted like any other."""
    answer = life.client.post(
        f"{life.path}/checkpoints/0/begin",
        content=iter([b'{"epoch"', b": 1}"]),
        headers={"content-type": "application/json"},
    )

    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/v1/jobs/job/savepoints/change-sets"),
        ("DELETE", "/v1/jobs/job/savepoints/change-sets"),
        ("PUT", "/v1/jobs/job/change-sets"),
        ("POST", "/v1/jobs/job/other/change-sets"),
        ("POST", "/change-sets"),
    ],
)
def test_path_that_ends_like_an_append_is_limited(method: str, path: str, life: Life) -> None:
    """I9: only the append itself has a limit of its own, not another path with a similar end."""
    answer = life.client.request(method, path, content=b"x" * (LIMIT + 1))

    assert (answer.status_code, answer.json()["kind"]) == (413, "invalid_input")
