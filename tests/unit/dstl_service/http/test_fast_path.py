"""The fast path of appends and restores: which requests it answers, and how."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import pytest
from starlette.types import Receive, Scope, Send

from dstl_service.http.routes.fast_path import FastPath
from dstl_service.http.task_requests import AppendRequest
from storage.checksum import checksum64
from storage.errors import InvalidInputError
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


def send(life: Life, payload: bytes = PAYLOAD, **changes: Any) -> Any:
    """Send a set; return the answer."""
    return life.client.post(f"{life.path}/change-sets", params={**QUERY, **changes}, content=payload)


def is_passed_on(path: str, method: str, query: str = "") -> bool:
    """Return whether a request is left to the routes after the fast path."""
    passed: list[Scope] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        passed.append(scope)

    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode()}
    with suppress(KeyError):  # there is no application in the scope whose service could be asked
        asyncio.run(FastPath(application)(scope, None, None))  # type: ignore[arg-type]  # neither is called
    return bool(passed)


def text_of(query: dict[str, Any]) -> str:
    """Return a query string."""
    return "&".join(f"{name}={value}" for name, value in query.items())


class TestWhichRequests:
    """The fast path answers each append and each restore, whatever its parameters, and nothing else."""

    @pytest.mark.parametrize(("what", "method"), [("change-sets", "POST"), ("restore", "GET")])
    @pytest.mark.parametrize("job", ["job", ".job", "x" * 200])
    @pytest.mark.parametrize("query", ["", "operator=%2f", text_of(QUERY)])
    def test_both_are_answered(self, what: str, method: str, job: str, query: str) -> None:
        """A request of one of the two kinds never reaches the routes, which only describe them."""
        assert not is_passed_on(f"/v1/jobs/{job}/{what}", method, query)

    @pytest.mark.parametrize(
        ("path", "method"),
        [
            ("/v1/jobs/job/change-sets", "GET"),
            ("/v1/jobs/job/change-sets/", "POST"),
            ("/v1/jobs/a/b/change-sets", "POST"),
            ("/v1/jobs/job/persist", "POST"),
            ("/v1/jobs/job/restore", "POST"),
            ("/v1/jobs/job/restore", "HEAD"),
        ],
    )
    def test_others_are_passed_on(self, path: str, method: str) -> None:
        """Other paths and methods are left to the routes."""
        assert is_passed_on(path, method)


class TestParameters:
    """Each parameter has one form; a refusal names the parameter."""

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *((name, value) for name in QUERY for value in ("", "%2f", "x/y", "ü", "0\n", "+0")),
            *((name, value) for name in QUERY if name != "operator" for value in ("-1", "1.0", "9" * 17)),
            *((name, value) for name in ("partition", "last_key_group") for value in (32_768, 2**53)),
        ],
    )
    def test_odd_values_are_refused(self, name: str, value: str | int) -> None:
        """A value in another form, or beyond its bound, is refused."""
        with pytest.raises(InvalidInputError):
            AppendRequest.parse("job", text_of({**QUERY, name: value}).encode())

    @pytest.mark.parametrize("name", QUERY)
    def test_missing_and_repeated_ones_are_refused(self, name: str) -> None:
        """A parameter that is missing or given twice, even with the same value, is named by the refusal."""
        without = {key: value for key, value in QUERY.items() if key != name}
        queries = [f"{text_of(QUERY)}&{name}={QUERY[name]}"] + [text_of(without)] * (name != "preemptive")
        with service(MemoryStore()) as life:
            life.open()
            for query in queries:
                answer = life.client.post(f"{life.path}/change-sets?{query}", content=PAYLOAD)
                assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_input")
                assert name in answer.json()["message"]

    @pytest.mark.parametrize(
        "wrong",
        [
            {"last_key_group": 99_999},
            {"have": "2.0"},
            {"to": "3.0." + "u" * 65},
            {"to": "x" * 5000},
            {"operator": "a/b"},
            {"output": "1"},
        ],
    )
    def test_malformed_restores_are_refused(self, wrong: dict[str, Any]) -> None:
        """A malformed restore gets 400, and its text comes back only in part."""
        query = {"operator": "op", "first_key_group": 0, "last_key_group": 127, "to": "3.0.u", **wrong}
        with service(MemoryStore()) as life:
            life.open()
            answer = life.client.get(f"{life.path}/restore", params=query)
            assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_input")
            assert len(answer.json()["message"]) < 300

    def test_names_of_jobs_are_checked(self) -> None:
        """The name of a job that cannot exist gets 400 from both requests."""
        with service(MemoryStore()) as life:
            append = life.client.post("/v1/jobs/.job/change-sets", params=QUERY, content=PAYLOAD)
            read = life.client.get("/v1/jobs/.job/restore?operator=op&first_key_group=0&last_key_group=127&to=3.0.u")

            assert (append.status_code, read.status_code) == (400, 400)


NUMBERS = [name for name in QUERY if name not in ("operator", "checksum", "preemptive")]
NO_NUMBERS = ["1_0", "+5", " 5", "5 ", "5.0", "-0", "0x5", "\u0665", "\uff15", ""]


class TestNumbers:
    """Numbers in paths and queries have one form."""

    @pytest.mark.parametrize("value", NO_NUMBERS)
    def test_other_forms_are_refused(self, value: str) -> None:
        """A value that `int` or Pydantic would read as a number, but that is not all digits, is refused by its name."""
        with service(MemoryStore()) as life:
            life.open()
            for name in NUMBERS:
                answer = send(life, PAYLOAD, **{name: value})
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


class TestAppends:
    """The fast path's answers to appends."""

    def test_set_is_taken_once(self) -> None:
        """I8: a set that is sent twice is the same set, with the same reference."""
        with service(MemoryStore()) as life:
            life.open()
            first, second = send(life), send(life)

            assert (first.status_code, second.status_code) == (200, 200)
            assert first.json() == second.json()
            assert first.headers["content-type"] == "application/json"
            assert life.restore(life.complete(0, None, first.json())) == (True, [PAYLOAD])

    def test_preemptive_set_is_uploaded(self) -> None:
        """A preemptive set becomes durable without a request."""
        store = MemoryStore()
        with service(store) as life:
            life.open()
            send(life, preemptive="true")
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
            ({"preemptive": "1"}, 400),
            ({"job_uid": "a/b"}, 400),
            ({f"other{number}": "" for number in range(40)}, 400),
        ],
    )
    def test_refusals(self, changes: dict[str, Any], status: int) -> None:
        """A refusal has its status, whether the service or the parser refuses."""
        with service(MemoryStore()) as life:
            life.open()

            assert send(life, **changes).status_code == status

    def test_large_set_is_refused(self) -> None:
        """I9: a set that can never fit is refused."""
        payload = b"x" * 3000
        with service(MemoryStore()) as life:
            life.open()
            answer = send(life, payload, checksum=f"{checksum64(payload):016x}")

            assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_input")


class TestRestores:
    """The fast path's answers to restores."""

    def test_answers(self) -> None:
        """The frames are the same from memory and from the store; a missing checkpoint gets 404."""
        store = MemoryStore()
        with service(store) as life:
            life.open()
            refs = [life.complete(0, None, life.append(b"one"))]
            refs.append(life.complete(1, refs[0], life.append(b"two", checkpoint_id=1)))
            held = [restored(life, *versions).content for versions in ((None, refs[1]), (refs[0], refs[1]))]
        with service(store) as fresh:
            assert [restored(fresh, *pair).content for pair in ((None, refs[1]), (refs[0], refs[1]))] == held
            # The second one is of a branch that a rewind began: such a generation is a long number.
            for nobody in ("9.0.nobody", "9.999999999999999.nobody"):
                assert restored(fresh, None, nobody).status_code == 404


def restored(life: Life, have: Any, to: Any) -> Any:
    """Send a restore; return the answer."""
    versions = {"to": to} if have is None else {"to": to, "have": have}
    texts = {name: ref if isinstance(ref, str) else ref_text(ref) for name, ref in versions.items()}
    query: dict[str, str | int] = {"operator": "op", "first_key_group": 0, "last_key_group": 127, **texts}
    return life.client.get(f"{life.path}/restore", params=query)
