"""HTTP to a service that answers, refuses, breaks the connection or does not exist."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from backend_client.service.client import ServiceClient
from dstl_service.wire import LogTarget, encode_frame
from storage.errors import (
    CorruptDataError,
    DstlError,
    FencedError,
    InternalError,
    InvalidInputError,
    LostChangesError,
    OverloadedError,
    UnauthorizedError,
    UnavailableError,
)
from storage.key_groups import KeyGroupRange

REASONS = {200: "OK", 204: "No Content"}


def answer(status: int, body: bytes = b"{}", headers: str = "", length: int | None = None) -> bytes:
    """Return the bytes of an HTTP answer; `length` may be wrong."""
    length = len(body) if length is None else length
    head = f"HTTP/1.1 {status} {REASONS.get(status, 'Error')}\r\ncontent-length: {length}\r\n{headers}\r\n"
    return head.encode() + body


def error(status: int, kind: str) -> bytes:
    """Return the answer that reports an error of this kind."""
    return answer(status, json.dumps({"kind": kind, "message": "told so", "context": {"a": 1}}).encode())


BREAK = b""
GOOD = answer(200, b'{"ok":true}')


class ScriptedServer:
    """Answers requests on a Unix socket by a script, in order, over any number of connections; `BREAK` breaks one."""

    def __init__(self, path: Path, *script: bytes) -> None:
        self.path = path
        self.script = list(script)
        self.requests: list[tuple[str, bytes]] = []
        self.connections = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    @property
    def address(self) -> str:
        """The address for a client."""
        return f"unix://{self.path}"

    def close(self) -> None:
        """Stop answering."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            connection.settimeout(60)
            with connection, connection.makefile("rb") as stream:
                self._answer_all(connection, stream)

    def _answer_all(self, connection: socket.socket, stream: Any) -> None:
        while self.script:
            line = stream.readline()
            if not line:
                return
            head = b"".join(iter(stream.readline, b"\r\n"))
            lengths = [
                part.split(b":")[1] for part in head.lower().split(b"\r\n") if part.startswith(b"content-length")
            ]
            body = stream.read(int(lengths[0])) if lengths else b""
            self.requests.append((line.decode().strip() + "\n" + head.decode(), body))
            data = self.script.pop(0)
            connection.sendall(data)
            if not data or b"broken: yes" in data:
                return


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., ScriptedServer]]:
    """Return a function that starts servers; they are stopped after the test."""
    servers: list[ScriptedServer] = []

    def start(*script: bytes) -> ScriptedServer:
        servers.append(ScriptedServer(tmp_path / f"{len(servers)}.sock", *script))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@contextmanager
def client_of(server: ScriptedServer, patience_s: float = 60.0, **options: Any) -> Iterator[ServiceClient]:
    """Return a client of a server, and close it."""
    client = ServiceClient(server.address, patience_s=patience_s, **options)
    try:
        yield client
    finally:
        client.close()


def test_one_connection_serves_all_requests(serve: Callable[..., ScriptedServer]) -> None:
    """Requests share a connection and carry the token."""
    server = serve(GOOD, answer(204, b""), GOOD)
    with client_of(server, token="secret") as client:
        assert client.get("/a") == {"ok": True}
        assert client.post("/b", {"x": 1}) is None
        assert client.get("/c") == {"ok": True}

    assert server.connections == 1
    assert all("authorization: Bearer secret" in head for head, _ in server.requests)
    assert server.requests[1][1] == b'{"x": 1}'


@pytest.mark.parametrize("status", [429, 503])
def test_refused_request_is_retried(serve: Callable[..., ScriptedServer], status: int) -> None:
    """If a service refuses temporarily, the same request is retried."""
    server = serve(error(status, "unavailable"), error(status, "overloaded"), GOOD)
    with client_of(server) as client:
        assert client.post("/p", [1]) == {"ok": True}

    assert [body for _, body in server.requests] == [b"[1]"] * 3


@pytest.mark.parametrize(
    ("status", "kind", "expected"), [(503, "unavailable", UnavailableError), (429, "overloaded", OverloadedError)]
)
def test_patience_ends(
    serve: Callable[..., ScriptedServer],
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    kind: str,
    expected: type[DstlError],
) -> None:
    """When the patience has expired, the last refusal is raised."""
    monkeypatch.setattr("backend_client.service.client._LAST_TRY_S", 60.0)  # a slow answer is not a missing one
    with (
        client_of(serve(*[error(status, kind)] * 50), patience_s=0.1) as client,
        pytest.raises(expected, match="told so"),
    ):
        client.get("/p")


@pytest.mark.parametrize(
    ("status", "kind", "expected"),
    [
        (400, "invalid_input", InvalidInputError),
        (409, "fenced", FencedError),
        (410, "lost_changes", LostChangesError),
        (422, "corrupt_data", CorruptDataError),
        (500, "internal", InternalError),
        (418, "of a newer version", InternalError),
    ],
)
def test_reported_error_is_raised_once(
    serve: Callable[..., ScriptedServer], status: int, kind: str, expected: type[DstlError]
) -> None:
    """An error that a retry cannot fix is raised as its class, and the connection stays open."""
    server = serve(error(status, kind), GOOD)
    with client_of(server) as client:
        with pytest.raises(expected, match="told so"):
            client.get("/p")
        assert client.get("/p") == {"ok": True}

    assert server.connections == 1


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'"text"', b"null", b"\xff"])
def test_foreign_error_is_internal(serve: Callable[..., ScriptedServer], body: bytes) -> None:
    """An error in another format than the service's still becomes one of the project's, which doubts the address."""
    with client_of(serve(answer(404, body))) as client, pytest.raises(InternalError, match=r"unix:.*404.*check the ad"):
        client.get("/p")


def test_answer_of_another_program_is_internal(serve: Callable[..., ScriptedServer]) -> None:
    """An answer that is not JSON, for example from a stranger at the address, becomes an error of the project."""
    with client_of(serve(answer(200, b"<html>"))) as client, pytest.raises(InternalError):
        client.get("/p")


@pytest.mark.parametrize(
    "broken",
    [
        BREAK,
        b"HTTP/1.1 200 OK\r\nbroken: yes\r\ncontent",
        b"garbage broken: yes\r\n\r\n",
        answer(200, b'{"o', "broken: yes\r\n", length=11),
        answer(404, b'{"k', "broken: yes\r\n", length=11),
    ],
)
def test_broken_connection_is_opened_again(serve: Callable[..., ScriptedServer], broken: bytes) -> None:
    """If a connection breaks anywhere in an answer, a new one is opened and the request is sent again."""
    server = serve(GOOD, broken, GOOD)
    with client_of(server) as client:
        assert client.post("/p", 1) == {"ok": True}
        assert client.post("/p", 2) == {"ok": True}

    assert [body for _, body in server.requests] == [b"1", b"2", b"2"]


def test_missing_service_is_ensured(tmp_path: Path, serve: Callable[..., ScriptedServer]) -> None:
    """A client that may start the service starts it if nothing answers, and then sends its request."""
    started: list[ScriptedServer] = []

    def start() -> None:
        if not started:
            started.append(serve(GOOD))

    client = ServiceClient(f"unix://{tmp_path / '0.sock'}", patience_s=60, ensure=start)
    assert client.get("/p") == {"ok": True}
    client.close()

    assert len(started) == 1


@pytest.mark.parametrize("address", ["unix:///nowhere/at/all.sock", "http://127.0.0.1:1"])
def test_missing_service_is_an_error(address: str) -> None:
    """If nothing answers until the patience expires, the error names the address."""
    with pytest.raises(UnavailableError, match=address):
        ServiceClient(address, patience_s=0.05).get("/p")


@pytest.mark.parametrize("address", ["ftp://host", "host:80", "http://"])
def test_impossible_address_is_refused(address: str) -> None:
    """An address of another form is refused with the accepted forms."""
    with pytest.raises(InvalidInputError, match="unix:///path"):
        ServiceClient(address).get("/p")


def test_append_sends_set_as_it_is(serve: Callable[..., ScriptedServer]) -> None:
    """The body of the request is the set's bytes; the query describes the set."""
    ref = {
        "operator": "op",
        "checkpoint_id": 5,
        "epoch": 2,
        "attempt": 77,
        "partition": 3,
        "sqn": 9,
        "size_bytes": 4,
        "service_id": "s",
    }
    server = serve(answer(200, json.dumps(ref).encode()))
    target = LogTarget("job", "op", 5, 2, 77, 3, KeyGroupRange(10, 19))
    with client_of(server) as client:
        taken = client.append(target, 9, b"{\x00\xff}", 0xAB, 1, preemptive=True)

    head, body = server.requests[0]
    assert (taken.sqn, taken.attempt, body) == (9, 77, b"{\x00\xff}")
    assert "sqn=9" in head
    assert "checksum=00000000000000ab" in head
    assert "preemptive=true" in head


HEADERS_AND_PAYLOADS: list[tuple[dict[str, Any], bytes]] = [
    ({"kind": "plan", "full": True}, b""),
    ({"kind": "segment"}, b"x" * 100),
    ({"kind": "end"}, b""),
]
FRAMES = b"".join(b"".join(encode_frame(header, payload)) for header, payload in HEADERS_AND_PAYLOADS)


def restored(client: ServiceClient) -> list[str]:
    """Return the kinds of the frames of a restore."""
    with client.restore("job", "op", KeyGroupRange(0, 9), None, "7.0.u") as frames:
        return [str(header["kind"]) for header, _ in frames]


def test_restore_leaves_connection_usable(serve: Callable[..., ScriptedServer]) -> None:
    """After a whole restore the connection serves the next request."""
    server = serve(answer(200, FRAMES), GOOD)
    with client_of(server) as client:
        assert restored(client) == ["plan", "segment", "end"]
        assert client.get("/p") == {"ok": True}

    assert server.connections == 1


def test_broken_restore_is_unavailable(serve: Callable[..., ScriptedServer]) -> None:
    """A restore whose connection breaks is not damage of stored data: the task may retry."""
    chunked = b"HTTP/1.1 200 OK\r\nbroken: yes\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b" % (
        len(FRAMES),
        FRAMES[:80],
    )
    server = serve(chunked, GOOD)
    with client_of(server) as client:
        with pytest.raises(UnavailableError, match="broke off"):
            restored(client)
        assert client.get("/p") == {"ok": True}


def test_abandoned_restore_costs_connection(serve: Callable[..., ScriptedServer]) -> None:
    """If a reader abandons a restore, nothing of it is left in the next answer."""
    server = serve(answer(200, FRAMES), GOOD)
    with client_of(server) as client:
        with (
            pytest.raises(ValueError, match="given up"),
            client.restore("job", "op", KeyGroupRange(0, 9), "3.0.u", "7.0.u") as frames,
        ):
            next(frames)
            raise ValueError("given up")
        assert client.get("/p") == {"ok": True}

    assert server.connections == 2


REFUSED = b'{"kind": "unauthorized", "message": "a valid token is needed", "context": {}}'


def test_replaced_token_is_used(serve: Callable[..., ScriptedServer]) -> None:
    """After a refused token the token is read again; the request is retried at once with the new one."""
    tokens = ["old", "new"]
    server = serve(answer(401, REFUSED), GOOD)
    with client_of(server, token=lambda: tokens.pop(0)) as client:
        assert client.get("/a") == {"ok": True}

    assert ["Bearer old" in server.requests[0][0], "Bearer new" in server.requests[1][0]] == [True, True]


def test_wrong_token_is_an_error_at_once(serve: Callable[..., ScriptedServer]) -> None:
    """An unchanged token is not retried, and the error does not show it."""
    server = serve(answer(401, REFUSED))
    with client_of(server, token="5ecret", patience_s=600) as client, pytest.raises(UnauthorizedError) as caught:
        client.get("/a")

    assert "5ecret" not in str(caught.value)
    assert "set token_file, DSTL_TOKEN_FILE or DSTL_TOKEN" in str(caught.value)


def test_missing_right_is_told_as_the_service_says_it(serve: Callable[..., ScriptedServer]) -> None:
    """A token that is known and lacks a right is not called a wrong one."""
    server = serve(answer(403, b'{"kind": "unauthorized", "message": "lacks the right", "context": {}}'))
    with client_of(server) as client, pytest.raises(UnauthorizedError, match=r"^lacks the right$"):
        client.get("/a")


def test_missing_authority_is_an_error_at_once(tmp_path: Path) -> None:
    """An unreadable file of certificates stops the first request."""
    with pytest.raises(InvalidInputError, match="ca_file"):
        ServiceClient("https://127.0.0.1:1", patience_s=600, ca_file=str(tmp_path / "none")).get("/a")
