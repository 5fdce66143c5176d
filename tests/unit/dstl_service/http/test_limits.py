"""The limits of request values: the OpenAPI document shows them, and the service enforces them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from httpx2 import Response

from dstl_service.wire import REFS_MAX
from storage.memory_store import MemoryStore
from tests.unit.dstl_service.http_life import Life, service

REF = {
    "operator": "op",
    "checkpoint_id": 0,
    "epoch": 1,
    "attempt": 1,
    "partition": 0,
    "sqn": 0,
    "size_bytes": 1,
    "service_id": "service",
}


@pytest.fixture(scope="module")
def life() -> Iterator[Life]:
    """Return a service with a job."""
    with service(MemoryStore()) as made:
        made.open()
        yield made


@pytest.mark.parametrize(
    "change",
    [
        {"operator": "../other"},
        {"operator": "a/b"},
        {"operator": ""},
        {"operator": "x" * 129},
        {"operator": "op\n"},
        {"checkpoint_id": -1},
        {"checkpoint_id": 2**53},
        {"epoch": "1"},
        {"epoch": 1.5},
        {"epoch": True},
        {"partition": 32_768},
        {"sqn": None},
        {"service_id": "../x"},
        {"service_url": "file:///etc/passwd"},
        {"service_url": "http://user:password@host"},
        {"service_url": "http://host/?query"},
        {"service_url": "http://host\r\nx: y"},
        {"handle": "text"},
        {"handle": {}},
    ],
    ids=str,
)
def test_reference_beyond_limits_is_refused(change: dict[str, Any], life: Life) -> None:
    """Names that lead elsewhere, numbers of other types or sizes, and malformed addresses are no references."""
    answer = life.persist({**REF, **change})

    assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_input"), answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("epochs", {"owner": "x" * 1001}),
        ("epochs", {"owner": "x", "max_parallelism": 0}),
        ("epochs", {"owner": "x", "max_parallelism": 32_769}),
        ("epochs", {"owner": 5}),
        ("epochs", ["owner"]),
        ("persist", {"epoch": 1, "refs": [], "wait": 1}),
        ("checkpoints/0/begin", {"epoch": -1}),
        ("checkpoints/0/complete", {"epoch": 1, "uid": "a b", "base": None, "refs": [], "operators": []}),
        ("checkpoints/0/complete", {"epoch": 1, "uid": "x" * 65, "base": None, "refs": [], "operators": []}),
        ("checkpoints/1/complete", {"epoch": 1, "uid": "u", "base": {"id": 0}, "refs": [], "operators": []}),
    ],
    ids=str,
)
def test_body_beyond_limits_is_refused(path: str, body: Any, life: Life) -> None:
    """Texts, numbers and flags of requests have types and bounds."""
    answer = life.client.post(f"{life.path}/{path}", json=body)

    assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_input"), answer.text


@pytest.mark.parametrize(
    ("job", "refused"),
    [
        ("..", (404, "not_found")),  # the client leaves both parts of the path out, and there is no route
        (".hidden", (400, "invalid_input")),
        ("a%2Fb", (404, "not_found")),  # the path then has another part, or no route
        ("a%00b", (400, "invalid_input")),
        ("a b", (400, "invalid_input")),
        ("x" * 129, (400, "invalid_input")),
        ("%2e%2e%2fother", (404, "not_found")),
    ],
)
def test_job_that_leads_elsewhere_is_refused(job: str, refused: tuple[int, str], life: Life) -> None:
    """A job's name cannot leave its place in the store, however it is written."""
    answer = life.client.get(f"/v1/jobs/{job}/checkpoints")

    assert (answer.status_code, answer.json()["kind"]) == refused
    assert answer.json().keys() == {"kind", "message", "context"}


def test_number_of_references_is_bounded(life: Life) -> None:
    """The number of change sets in a request is limited, and the document states the limit."""
    answer = life.persist(*[REF] * (REFS_MAX + 1))
    schemas = life.client.get("/openapi.json").json()["components"]["schemas"]

    assert (answer.status_code, "at most" in answer.json()["message"]) == (400, True)
    for name in ("PersistRequest", "CompleteRequest"):
        assert schemas[name]["properties"]["refs"]["maxItems"] == REFS_MAX


@pytest.mark.parametrize(
    ("path", "field", "items"),
    [
        ("persist", "refs", [{}]),
        ("checkpoints/0/flush", "refs", [7]),
        ("checkpoints/0/complete", "materializations", [7]),
        ("checkpoints/0/complete", "operators", [7]),
        (
            "checkpoints/0/complete",
            "operators",
            [{"name": "op", "parallelism": 1, "key_schema": "", "states": {"a": {"earlier": [7] * 1000}}}],
        ),
        (
            "checkpoints/0/complete",
            "operators",
            [{"name": "op", "parallelism": 1, "key_schema": "", "states": {f"s{number}": 7 for number in range(1000)}}],
        ),
    ],
)
def test_first_wrong_item_tells(path: str, field: str, items: list[Any], life: Life) -> None:
    """B13: of a list of wrong items only the first is reported: 100,000 errors stopped all other jobs."""
    body = {"epoch": 1, "uid": "u", "base": None, "refs": [], "operators": [], "query_id": "", "offsets": ""}
    answer = life.client.post(f"{life.path}/{path}", json={**body, field: items * 500})

    assert answer.status_code == 400
    assert " more" not in answer.json()["message"]


def test_every_route_describes_its_errors(life: Life) -> None:
    """The errors of every route have one form, and every route except health needs the token."""
    document = life.client.get("/openapi.json").json()
    schemes = document["components"]["securitySchemes"]
    assert (document["security"], schemes["token"]["scheme"]) == ([{"token": []}], "bearer")
    for path, item in document["paths"].items():
        for operation in item.values():
            for status in ("400", "401", "404", "409", "410", "413", "422", "429", "500", "503"):
                schema = operation["responses"][status]["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorBody"}, (path, status)
            assert operation.get("security") == ([] if path == "/health" else None)


@pytest.mark.parametrize("digits", [20, 400, 5000, 60_000])
@pytest.mark.parametrize("way", ["query", "path", "body", "reference"])
def test_long_number_is_refused(way: str, digits: int, life: Life) -> None:
    """C8: a number of any length, in any place, is refused as one, and never fails the service."""
    number = "9" * digits
    body = f'{{"epoch": {number}, "refs": []}}'
    ways: dict[str, Callable[[], Response]] = {
        "query": lambda: life.append_raw(epoch=number),
        "path": lambda: life.client.get(f"{life.path}/checkpoints/{number}"),
        "body": lambda: life.client.post(f"{life.path}/persist", content=body),
        "reference": lambda: life.restore_raw({"id": number, "generation": 0, "uid": "u"}),
    }
    answer = ways[way]()

    assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_input"), answer.text[:500]
    assert len(answer.text) < 2000
