"""The fast path of appends and restores: which requests it accepts, and that it answers like the route."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

import pytest
from starlette.types import Receive, Scope, Send

from dstl_service.http.routes.fast_path import FastPath
from storage.checksum import checksum64
from storage.memory_store import MemoryStore
from tests.unit.dstl_service.http_life import Life, service
from tests.unit.dstl_service.http_life import text as ref_text

pytestmark = pytest.mark.timeout(30)

PAYLOAD = b"payload"
QUERY: dict[str, Any] = {
    # in the order in which the client writes it
    "operator": "op",
    "checkpoint_id": 0,
    "epoch": 1,
    "attempt": 1,
    "partition": 0,
    "sqn": 0,
    "first_key_group": 0,
    "last_key_group": 127,
    "count": 1,
    "checksum": f"{checksum64(PAYLOAD):016x}",
    "preemptive": "false",
}


def both_ways(life: Life, payload: bytes = PAYLOAD, **changes: Any) -> tuple[Any, Any]:
    """Send a set by the fast path and, with its parameters in another order, by the route; return both answers."""
    query = {**QUERY, **changes}
    path = f"{life.path}/change-sets"
    short = life.client.post(path, params=query, content=payload)
    return short, life.client.post(path, params=dict(reversed(query.items())), content=payload)


def turned(query: dict[str, str | int]) -> dict[str, str | int]:
    """Return a query with its parameters in another order."""
    return dict(reversed(query.items()))


def way_of(query: str, path: str = "/v1/jobs/job/change-sets", method: str = "POST") -> str:
    """Return which path a request takes."""
    taken = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        taken.append("route")

    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode()}
    try:
        asyncio.run(FastPath(application)(scope, None, None))  # type: ignore[arg-type]  # neither is called
    except KeyError:  # there is no application in the scope whose service could be asked
        taken.append("short")
    return taken[0]


def text_of(query: dict[str, Any]) -> str:
    """Return a query string."""
    return "&".join(f"{name}={value}" for name, value in query.items())


class TestWhichWay:
    """Which requests are in the client's own form, and which are left to the route."""

    def test_form_of_client_is_short(self) -> None:
        """The client's own form, with or without the last parameter, takes the fast path."""
        assert way_of(text_of(QUERY)) == "short"
        assert way_of(text_of(QUERY).removesuffix("&preemptive=false")) == "short"

    @pytest.mark.parametrize(
        ("path", "method"),
        [
            ("/v1/jobs/job/change-sets", "GET"),
            ("/v1/jobs/job/change-sets/", "POST"),
            ("/v1/jobs/.job/change-sets", "POST"),
            ("/v1/jobs/a/b/change-sets", "POST"),
            ("/v1/jobs/job/persist", "POST"),
        ],
    )
    def test_other_requests_go_to_route(self, path: str, method: str) -> None:
        """Other paths, methods and names do not take the fast path."""
        assert way_of(text_of(QUERY), path, method) == "route"

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *((name, value) for name in QUERY for value in ("", "%30", "x/y", "ü", "0\n")),
            *((name, value) for name in QUERY if name != "operator" for value in ("-1", "1.0", "9" * 17)),
        ],
    )
    def test_odd_parameters_go_to_route(self, name: str, value: str) -> None:
        """A parameter that is no plain value is judged by the route."""
        assert way_of(text_of({**QUERY, name: value})) == "route"

    @pytest.mark.parametrize("value", [32_768, 2**53])
    @pytest.mark.parametrize("name", ["partition", "last_key_group"])
    def test_values_past_bounds_go_to_route(self, name: str, value: int) -> None:
        """Values that the model refuses are judged by the route, which reports the allowed ones."""
        assert way_of(text_of({**QUERY, name: value})) == "route"


NUMBERS = [name for name in QUERY if name not in ("operator", "checksum", "preemptive")]
NO_NUMBERS = ["1_0", "+5", " 5", "5 ", "5.0", "-0", "0x5", "\u0665", "\uff15", ""]


class TestNumbers:
    """Numbers in paths and queries have one form, whichever path a request takes."""

    @pytest.mark.parametrize("value", NO_NUMBERS)
    def test_other_forms_are_refused(self, value: str) -> None:
        """A value that `int` or Pydantic would read as a number, but that is not all digits, is refused by its name."""
        with service(MemoryStore()) as life:
            life.open()
            for name in NUMBERS:
                for answer in both_ways(life, PAYLOAD, **{name: value}):
                    assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_input"), name
                    assert f"query.{name}: " in answer.json()["message"]

    @pytest.mark.parametrize("value", [value for value in NO_NUMBERS if value])
    def test_other_forms_are_refused_elsewhere(self, value: str) -> None:
        """The same holds for a checkpoint in a path and in a restore, and for its key groups."""
        with service(MemoryStore()) as life:
            life.open()
            made = life.complete(0, None, life.append(PAYLOAD))
            restore = {"operator": "op", "first_key_group": "0", "last_key_group": "127", "to": ref_text(made)}
            wrong = [{**restore, name: value} for name in ("first_key_group", "last_key_group")]
            wrong.append({**restore, "to": value + ref_text(made).removeprefix("0")})
            answers = [life.client.get(f"{life.path}/restore", params=query) for query in wrong]
            answers.append(life.client.get(f"{life.path}/checkpoints/{quote(value)}"))

            assert [answer.status_code for answer in answers] == [400] * 4


class TestSameAnswer:
    """Both paths give the same answers."""

    def test_set_is_taken_once(self) -> None:
        """I8: a set that arrives by both paths is the same set, with the same reference."""
        with service(MemoryStore()) as life:
            life.open()
            short, route = both_ways(life)

            assert (short.status_code, route.status_code) == (200, 200)
            assert short.json() == route.json()
            assert short.headers["content-type"] == route.headers["content-type"]
            assert life.restore(life.complete(0, None, short.json())) == (True, [PAYLOAD])

    def test_preemptive_set_is_uploaded(self) -> None:
        """A preemptive set becomes durable without a request."""
        store = MemoryStore()
        with service(store) as life:
            life.open()
            both_ways(life, preemptive="true")
            handle = life.persist(life.append(epoch=1)).json()["handles"][0]

        assert [info.key for info in store.list("job/segments/")] == [handle["object"]]

    @pytest.mark.parametrize(
        ("changes", "status"),
        [
            ({"checksum": "0" * 16}, 422),
            ({"epoch": 0}, 409),
            ({"count": 2**31}, 400),
            ({"last_key_group": 2**15}, 400),
            ({"first_key_group": 5, "last_key_group": 4}, 400),
            ({"operator": "a/b"}, 400),
            ({"preemptive": "perhaps"}, 400),
        ],
    )
    def test_errors_are_the_same(self, changes: dict[str, Any], status: int) -> None:
        """An error has the same status, kind and headers on both paths."""
        with service(MemoryStore()) as life:
            life.open()
            short, route = both_ways(life, **changes)

            assert (short.status_code, route.status_code) == (status, status)
            assert short.json()["kind"] == route.json()["kind"]

    def test_large_set_is_refused(self) -> None:
        """I9: a set that can never fit is refused on both paths."""
        payload = b"x" * 3000
        with service(MemoryStore()) as life:
            life.open()
            answers = both_ways(life, payload, checksum=f"{checksum64(payload):016x}")

            assert [(answer.status_code, answer.json()["kind"]) for answer in answers] == [(400, "invalid_input")] * 2


class TestRestores:
    """Restores in the client's own form."""

    def test_form_of_client_is_short(self) -> None:
        """A restore takes the fast path with or without a version; in another order or damaged, it takes the route."""
        query = "operator=op&first_key_group=0&last_key_group=127&to=3.0.u"
        path, method = "/v1/jobs/job/restore", "GET"

        assert way_of(query, path, method) == "short"
        assert way_of(f"{query}&have=2.0.u", path, method) == "short"
        assert way_of(f"{query}&have=2.999999999999999.u", path, method) == "short"
        assert way_of(f"to=3.0.u&{query}", path, method) == "route"
        assert way_of(query.replace("127", "99999"), path, method) == "route"
        assert way_of(query, path, "POST") == "route"

    def test_answers_are_the_same(self) -> None:
        """Both paths give the same frames, from memory and from the store, and the same errors."""
        store = MemoryStore()
        with service(store) as life:
            life.open()
            refs = [life.complete(0, None, life.append(b"one"))]
            refs.append(life.complete(1, refs[0], life.append(b"two", checkpoint_id=1)))
        with service(store) as fresh:
            for have, want in ((None, refs[1]), (refs[0], refs[1]), (None, refs[0])):
                query: dict[str, str | int] = {
                    "operator": "op",
                    "first_key_group": 0,
                    "last_key_group": 127,
                    "to": ref_text(want),
                }
                if have is not None:
                    query["have"] = ref_text(have)
                path = f"{fresh.path}/restore"
                short = fresh.client.get(path, params=query)
                long = fresh.client.get(path, params=turned(query))
                assert (short.status_code, short.content) == (200, long.content)
                # The second one is of a branch that a rewind began: such a generation is a long number.
                for nobody in ("9.0.nobody", "9.999999999999999.nobody"):
                    missing = {**query, "to": nobody}
                    short = fresh.client.get(path, params=missing)
                    long = fresh.client.get(path, params=turned(missing))
                    assert (short.status_code, short.json()) == (long.status_code, long.json())
                    assert short.status_code == 404
