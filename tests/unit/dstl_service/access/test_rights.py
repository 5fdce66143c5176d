"""Access rights: every existing route with every role."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from dstl_service.access.rights import ROUTES, Identity, Right
from dstl_service.access.tokens import CALLER, Access, Caller, parse_grants
from dstl_service.app import create_app
from dstl_service.settings import ServiceSettings
from storage.errors import InvalidInputError
from storage.memory_store import MemoryStore
from storage.testing import FakeClock
from tests.unit.dstl_service.http_life import Life, text

DIGEST = hashlib.sha256(b"operator-token").hexdigest()
GRANTS = f"""
tokens = [
    {{ name = "orders", role = "writer", jobs = ["mine", "mine.*"], token = "writer-token" }},
    {{ name = "night shift", role = "operator", jobs = ["mine"], sha256 = "{DIGEST}" }},
    {{ name = "monitoring", role = "reader", token = "reader-token" }},
]
certificates = [
    {{ name = "spark-orders.example", role = "writer", jobs = ["mine"] }},
]
"""

ALLOWED: dict[str, set[Right]] = {
    "full-token": set(Right),
    "writer-token": {Right.NONE, Right.KNOWN, Right.LOOK, Right.RUN},
    "operator-token": {Right.NONE, Right.KNOWN, Right.LOOK, Right.OPERATE},
    "reader-token": {Right.NONE, Right.KNOWN, Right.LOOK},
    "unknown-token": {Right.NONE},
}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    """Return a client of a service with a token and an access file."""
    (tmp_path / "access.toml").write_text(GRANTS, encoding="utf-8")
    settings = ServiceSettings("memory://x", token="full-token", access_file=tmp_path / "access.toml", host_id="host")
    with TestClient(create_app(settings, MemoryStore()), raise_server_exceptions=False) as made:
        yield made


def bearer(token: str) -> dict[str, str]:
    """Return the header of a token."""
    return {"authorization": f"Bearer {token}"}


def routes(client: TestClient) -> set[tuple[str, str]]:
    """Return the method and path of all routes of the OpenAPI document."""
    paths: dict[str, Any] = client.get("/openapi.json", headers=bearer("full-token")).json()["paths"]
    return {(method.upper(), path) for path, item in paths.items() for method in item}


def refusal_of(status: int) -> int | None:
    """Return the status if it is 401 or 403, and None otherwise."""
    return {401: 401, 403: 403}.get(status)


def test_each_route_says_what_it_takes(client: TestClient) -> None:
    """The table has exactly the existing routes; a route that is missing from it requires full rights."""
    assert set(ROUTES) == routes(client) | {("GET", "/openapi.json")}


def test_every_route_with_every_role(client: TestClient) -> None:
    """A request is accepted if the role has the right and owns the job; otherwise it gets 403 or 401."""
    for (method, template), token, job in itertools.product(sorted(routes(client)), ALLOWED, ("mine", "other")):
        path = (
            re.sub(r"\{\w+_id\}", "0", template)
            .replace("{job}", job)
            .replace("{savepoint}", "s")
            .replace("{fork}", "mine.fork")
        )
        answer = client.request(method, path, headers=bearer(token))
        taken = ROUTES[method, template]
        is_of_all = "{job}" not in template and Right.LOOK in taken
        own = token in ("full-token", "reader-token") or not ("{job}" in template or is_of_all)
        own = own or (job == "mine" and not is_of_all)
        is_allowed = bool(ALLOWED[token] & set(taken)) and (own or Right.NONE in taken)
        refusal = None if is_allowed else 401 if token == "unknown-token" else 403

        assert refusal_of(answer.status_code) == refusal, (method, path, token, answer.text)


def test_writer_runs_its_job_and_reads_nothing_of_another(client: TestClient) -> None:
    """One job's token suffices to run that job, and neither reads nor destroys anything of another job."""
    client.headers = bearer("full-token")
    theirs = Life(client, "other")
    theirs.open()
    kept = theirs.complete(0, None, theirs.append(b"theirs"))
    client.headers = bearer("writer-token")
    mine = Life(client, "mine.query")
    mine.open()
    ref = mine.complete(0, None, mine.append(b"mine"))

    assert mine.restore(ref) == (True, [b"mine"])
    assert theirs.restore_raw(kept).status_code == 403
    assert theirs.append_raw(b"poison").status_code == 403
    assert client.post(f"{theirs.path}/epochs", json={"owner": "x"}).status_code == 403
    assert client.post(f"{theirs.path}/garbage-collection?dry_run=false").status_code == 403
    assert "orders has the role writer for mine, mine.*" in client.get(theirs.path).json()["message"]


def test_fork_needs_rights_on_both_jobs(client: TestClient) -> None:
    """The right to run a job allows a fork into another one of the caller's jobs, and into no foreign job."""
    client.headers = bearer("writer-token")
    mine = Life(client, "mine")
    mine.open()
    mine.complete(0, None, mine.append(b"mine"))

    assert client.post(f"{mine.path}/forks/mine.fork", json={}).status_code == 200
    assert client.post(f"{mine.path}/forks/other", json={}).status_code == 403
    assert client.post("/v1/jobs/other/forks/mine.second", json={}).status_code == 403
    assert client.post(f"{mine.path}/forks/mine.third", json={}, headers=bearer("operator-token")).status_code == 403
    forked = Life(client, "mine.fork")
    opened = forked.open()
    assert opened["latest"]["forked_from"]["job"] == "mine"
    assert forked.restore(opened["latest"]["ref"]) == (True, [b"mine"])


def test_writer_hands_over_snapshots_of_its_own_job_only(client: TestClient) -> None:
    """The path of another job's table is refused: the service would store the files there, and then remove them."""
    client.headers = bearer("writer-token")
    mine = Life(client, "mine")
    uid = mine.open()["job_uid"]
    ref = mine.complete(0, None, mine.append(b"mine"))
    body = {"operator": "op", "first_key_group": 0, "last_key_group": 127, "version": text(ref)}

    def hand_over(folder: str) -> Any:
        return client.post(f"{mine.path}/materializations", json={**body, "path": f"/l/tables/{folder}/0.snapshot-1"})

    for folder in ("other-uid/op/00000-00127", f"{uid}/op2/00000-00127", f"{uid}/op/../op/00000-00127", "x"):
        refused = hand_over(folder)
        assert refused.json()["kind"] == "unauthorized", folder
        assert refused.status_code == 403
    assert "No such file" in hand_over(f"{uid}/op/00000-00127").json()["message"]


def test_unknown_routes_take_full_rights() -> None:
    """A route that is in no table requires full rights, whatever the method and the path."""
    reader = Identity("r", "reader")
    for method, path in [("PATCH", "/v1/jobs/mine"), ("GET", "/v1/jobs/a/b/c"), ("GET", "/new"), ("HEAD", "/metrics")]:
        assert not reader.may(method, path)
        assert Identity("f").may(method, path)


def test_certificate_takes_the_place_of_a_token(tmp_path: Path) -> None:
    """A name in a verified certificate is as good as a token, but not beside a wrong token."""
    (tmp_path / "access.toml").write_text(GRANTS, encoding="utf-8")
    access = Access(None, None, FakeClock(), tmp_path / "access.toml")
    known = Caller(("x", "spark-orders.example"))

    assert access.identify(None, known) == Identity("spark-orders.example", "writer", ("mine",))
    assert access.identify(b"Bearer wrong", known) is None
    assert access.identify(None, Caller(("x",))) is None
    assert access.identify(None, None) is None
    assert CALLER


def test_access_file_is_read_again(tmp_path: Path) -> None:
    """A token removed from the file is refused without a restart."""
    path, clock = tmp_path / "access.toml", FakeClock()
    path.write_text(GRANTS, encoding="utf-8")
    access = Access(None, None, clock, path)
    assert access.identify(b"Bearer reader-token") is not None
    path.write_text('tokens = [{ name = "a", role = "reader", token = "other" }]', encoding="utf-8")
    os.utime(path, (1, 1))
    clock.advance(1_000)

    assert access.identify(b"Bearer reader-token") is None
    assert access.identify(b"Bearer other") == Identity("a", "reader")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tokens = []",
        "tokens = 1",
        "people = []",
        "no toml",
        'tokens = [{ name = "a", role = "reader" }]',
        'tokens = [{ name = "a", role = "reader", token = "s3cret", sha256 = "00" }]',
        'tokens = [{ name = "a", role = "reader", sha256 = "s3cret" }]',
        'tokens = [{ name = "a", role = "king", token = "s3cret" }]',
        'tokens = [{ name = "a", role = "writer", token = "s3cret" }]',
        'tokens = [{ name = "a", role = "writer", jobs = [], token = "s3cret" }]',
        'tokens = [{ name = "a", role = "writer", jobs = ["a*b"], token = "s3cret" }]',
        'tokens = [{ name = "a", role = "reader", job = ["a"], token = "s3cret" }]',
        'tokens = [{ name = "a", role = "reader", token = "s3cret" }, { name = "b", role = "full", token = "s3cret" }]',
        'tokens = [{ name = "a", role = "reader", token = "s3cret\\nother" }]',
        f'tokens = [{{ name = "a", role = "reader", sha256 = "{hashlib.sha256().hexdigest()}" }}]',
        'certificates = [{ name = "a", role = "reader", token = "s3cret" }]',
        'certificates = ["s3cret"]',
    ],
)
def test_impossible_access_file_is_refused(text: str) -> None:
    """A file that does not define who may do what stops the start, and no token is shown."""
    with pytest.raises(InvalidInputError) as refused:
        parse_grants(text)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(("mode", "is_warned"), [(0o600, False), (0o640, True), (0o604, True)])
def test_secret_that_others_can_read_is_told(
    mode: int, is_warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A token file that other users can read is used, with a warning."""
    (tmp_path / "token").write_text("secret", encoding="utf-8")
    (tmp_path / "token").chmod(mode)
    Access(None, tmp_path / "token", FakeClock())

    assert ("can be read by other users" in caplog.text) is is_warned
