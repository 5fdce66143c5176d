"""
Hostile hosts: at the listener of links without the job's token, and with the token of a job of their own.

A coordinator listens on its host's network, so any host may connect. A process of one job's executors has the job's
token; it must reach nothing of other jobs, and its frames must cost them nothing.
"""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict

from backend_client.service.client import ServiceClient
from dstl_service.links.certificates import pinned_context
from dstl_service.links.frames import FRAME_BYTES_MAX, HELLO_BYTES_MAX, encode_frame
from dstl_service.wire import ChangeSetRef, LinkAddress, OpenLinks
from loadtest.attack.harness.case import Case
from loadtest.attack.harness.raw import closed_within
from loadtest.attack.harness.target import NEIGHBOUR, Attacked

GROUP = "links"
_JOB = "linked"
_HOST = "127.0.0.1"
_STRANGERS_WITHIN_S = 8.0
_RSS_GROWTH_MAX = 320 << 20
"""What frames of one job may cost: its share of the room of links, and one frame while it is decoded."""

_Hello = Callable[[LinkAddress], bytes]


def _address(target: Attacked, job: str = _JOB) -> LinkAddress:
    client = ServiceClient(target.url, target.token, patience_s=30.0)
    epoch = client.post(f"/v1/jobs/{job}/epochs", {"owner": "host"})["epoch"]
    found = client.post(f"/v1/jobs/{job}/link-address", asdict(OpenLinks(int(epoch), _HOST, _HOST)))
    client.close()
    return LinkAddress(**found)


def _hello(address: LinkAddress, **changes: object) -> bytes:
    return encode_frame({"job": _JOB, "token": address.token, "service_id": "host", **changes})


@contextmanager
def _connected(address: LinkAddress) -> Iterator[ssl.SSLSocket]:
    with (
        socket.create_connection((address.host, address.port), 20) as plain,
        pinned_context(address.certificate).wrap_socket(plain) as connection,
    ):
        yield connection


@contextmanager
def _linked(address: LinkAddress, service_id: str = "host") -> Iterator[ssl.SSLSocket]:
    with _connected(address) as connection:
        connection.sendall(_hello(address, service_id=service_id))
        connection.recv(1_000)
        yield connection


def _received(connection: ssl.SSLSocket, until: bytes, within_s: float = 20.0) -> bytes:
    """Return what came until some text, or until the end."""
    data, deadline = b"", time.monotonic() + within_s
    with suppress(OSError):
        while until not in data and time.monotonic() < deadline:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            piece = connection.recv(65_536)
            if not piece:
                break
            data += piece
    return data


def _request(number: int, body: object) -> bytes:
    return encode_frame({"id": number, "request": body})


def _persist(epoch: int, ref: ChangeSetRef, **fields: object) -> dict[str, object]:
    return {"persist": {"epoch": epoch, "refs": [asdict(ref)], "wait": True, "note": None, **fields}}


def _ref(epoch: int, **fields: object) -> ChangeSetRef:
    return ChangeSetRef(
        **{  # type: ignore[arg-type]  # wrong types are among the attacks
            "operator": "op",
            "checkpoint_id": 0,
            "epoch": epoch,
            "attempt": 1,
            "partition": 0,
            "sqn": 1,
            "size_bytes": 1,
            "service_id": "gone",
            **fields,
        }
    )


# What a stranger sends: nothing may be answered, and the connection ends.
_STRANGERS: dict[str, _Hello] = {
    "HTTP request": lambda _: b"POST /v1/jobs/linked/epochs HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}",
    "no token": lambda address: _hello(address, token=None),
    "empty token": lambda address: _hello(address, token=""),
    "a part of the token": lambda address: _hello(address, token=address.token[:-1]),
    "token as a list": lambda address: _hello(address, token=[address.token]),
    "token in capitals": lambda address: _hello(address, token=address.token.swapcase()),
    "no job": lambda address: _hello(address, job=None),
    "job that does not exist": lambda address: _hello(address, job="none"),
    "path as a job": lambda address: _hello(address, job="../linked"),
    "id with a path": lambda address: _hello(address, service_id="../../x"),
    "id of 5,000 letters": lambda address: _hello(address, service_id="a" * 5_000),
    "request before the introduction": lambda _: _request(1, _persist(1, _ref(1))),
    "largest frame": lambda _: b"\xff\xff\xff\xff",
    "frame above the limit": lambda _: (HELLO_BYTES_MAX + 1).to_bytes(4, "big"),
    "frame of no object": lambda _: b"\0\0\0\2[]",
    "frame of deep lists": lambda _: (8_000).to_bytes(4, "big") + b"[" * 8_000,
    "half a frame": lambda _: (100).to_bytes(4, "big") + b"{",
    "nothing": lambda _: b"",
}


def _stranger(hello: _Hello) -> Callable[[Attacked], str | None]:
    def run(target: Attacked) -> str | None:
        address = _address(target)
        with _connected(address) as connection:
            connection.sendall(hello(address))
            said = _received(connection, b"service_id", _STRANGERS_WITHIN_S)
            if said:
                return f"was answered: {said[:80]!r}"
            return None if closed_within([connection], 1.0) else "the connection stays"

    return run


def _token_of_another_job(target: Attacked) -> str | None:
    address, other = _address(target), _address(target, NEIGHBOUR + "-2")
    with _connected(address) as connection:
        connection.sendall(_hello(address, token=other.token))
        return "was let in" if _received(connection, b"service_id", _STRANGERS_WITHIN_S) else None


def _token_of_the_former_driver(target: Attacked) -> str | None:
    former = _address(target)
    with _linked(former) as link:
        address = _address(target)
        if address.token == former.token:
            return "the new driver got the old token"
        if not closed_within([link], 5.0):
            return "a link of the former driver stays"
    with _connected(address) as connection:
        connection.sendall(_hello(former))
        return "was let in" if _received(connection, b"service_id", _STRANGERS_WITHIN_S) else None


def _asks(body: Callable[[int], object], refused: bytes = b'"error"') -> Callable[[Attacked], str | None]:
    """Return a case whose request over a link must be answered with an error."""

    def run(target: Attacked) -> str | None:
        epoch = _epoch(target)
        with _linked(_address(target)) as link:
            link.sendall(_request(1, body(epoch)))
            said = _received(link, b'"id"')
            return None if refused in said else f"was not refused: {said[:200]!r}"

    return run


def _epoch(target: Attacked) -> int:
    neighbour = target.neighbour
    return 1 if neighbour is None else neighbour.epoch


def _sets_of_another_job(target: Attacked) -> str | None:
    """The job is that of the link, whatever a request says; sets of the neighbour are never handed out."""
    assert target.neighbour is not None
    taken = asdict(_ref(target.neighbour.epoch, service_id=_service_id(target)))
    body = {"persist": {"epoch": 1, "refs": [taken], "job": NEIGHBOUR}, "job": NEIGHBOUR}
    with _linked(_address(target)) as link:
        link.sendall(_request(1, body))
        said = _received(link, b'"id"')
        return f"handles of another job: {said[:200]!r}" if NEIGHBOUR.encode() + b"/" in said else None


def _service_id(target: Attacked) -> str:
    return str(json.loads(target.ask("GET", "/v1/info").data.partition(b"\r\n\r\n")[2])["service_id"])


def _address_is_not_called(target: Attacked) -> str | None:
    with socket.create_server((_HOST, 0)) as trap, _linked(_address(target)) as link:
        trap.settimeout(1.0)
        url = f"http://{_HOST}:{trap.getsockname()[1]}"
        link.sendall(_request(1, _persist(1, _ref(1, service_url=url))))
        _received(link, b'"id"')
        with suppress(TimeoutError):
            trap.accept()
            return "the address in the request was called"
    return None


def _bomb(body: bytes) -> Callable[[Attacked], str | None]:
    """A frame that is small to send and large to parse ends its link; or is answered, if it is harmless."""

    def run(target: Attacked) -> str | None:
        with _linked(_address(target)) as link:
            with suppress(OSError):
                link.sendall(len(body).to_bytes(4, "big") + body)
            said = _received(link, b'"error"')
            return None if b'"answer"' not in said else f"was answered: {said[:200]!r}"

    return run


def _incomplete_frames(target: Attacked) -> str | None:
    """Many links of one job, each with nearly a whole frame: they take its share, and no more."""
    address = _address(target)
    with ExitStack() as stack:
        for number in range(24):
            link = stack.enter_context(_linked(address, f"host-{number}"))
            with suppress(OSError):
                link.sendall((FRAME_BYTES_MAX - 1).to_bytes(4, "big") + b" " * (FRAME_BYTES_MAX // 2))
        time.sleep(1.0)
    return None


def _unanswered_requests(target: Attacked) -> str | None:
    """Requests that wait for a host which never answers, each with many values."""
    address = _address(target)
    with _linked(address, "waiting") as host, _linked(address, "asking") as link:
        body = {"persist": asdict(_ref(1, service_id="waiting")), "empty": [[]] * 200_000}
        for number in range(200):
            with suppress(OSError):
                link.sendall(_request(number, body))
        del host
        return None


def _flood_of_tiny_requests(target: Attacked) -> str | None:
    with _linked(_address(target)) as link:
        data, ends = _request(1, {}) * 2_000, time.monotonic() + 3.0
        while time.monotonic() < ends:
            try:
                link.sendall(data)
            except OSError:
                return None
    return None


def _one_frame_byte_by_byte(target: Attacked) -> str | None:
    with _connected(_address(target)) as connection:
        for byte in b"\0\0\0\x7f" + b" " * 120:
            try:
                connection.sendall(bytes([byte]))
            except OSError:
                return None
            time.sleep(0.2)
    return "a stranger may send for longer than its introduction may take"


def _many_names(target: Attacked) -> str | None:
    """A host of ever new names: each link ends at once, and the next one has another name."""
    address = _address(target)
    for number in range(150):
        with _linked(address, f"name-{number}"):
            pass
    return None


def cases() -> list[Case]:
    """Return the cases of this group."""
    known = (_JOB, NEIGHBOUR + "-2")
    strangers = [Case(GROUP, f"stranger: {name}", _stranger(hello), known) for name, hello in _STRANGERS.items()]
    quick = ("half a frame", "nothing")
    strangers = [
        Case(case.group, case.name, case.run, known, is_short=not case.name.endswith(quick)) for case in strangers
    ]
    lists = b'{"x":[' + b"[]," * (FRAME_BYTES_MAX // 3 - 10) + b"[]]}"
    asked: dict[str, Callable[[Attacked], str | None]] = {
        "token of another job": _token_of_another_job,
        "token and link of the former driver": _token_of_the_former_driver,
        "request of no kind": _asks(lambda _: {"delete": {}}),
        "request without references": _asks(lambda _: {"persist": None}),
        "reference with a path": _asks(lambda epoch: _persist(epoch, _ref(epoch, operator="../x"))),
        "reference of the notes": _asks(lambda epoch: _persist(epoch, _ref(epoch, operator="_note"))),
        "epoch that nobody has": _asks(lambda _: _persist(10**15, _ref(10**15))),
        "negative epoch": _asks(lambda _: _persist(-1, _ref(-1))),
        "set that nobody holds": _asks(lambda _: _persist(1, _ref(1))),
        "handle of another job": _asks(
            lambda _: _persist(1, _ref(1, handle={"key": f"{NEIGHBOUR}/segments/x/y.seg", "offset": 0, "size": 1}))
        ),
        "note of no form": _asks(lambda _: _persist(1, _ref(1), note="x")),
        "sets of another job": _sets_of_another_job,
        "address in a request": _address_is_not_called,
        "flood of tiny requests": _flood_of_tiny_requests,
        "frame byte by byte": _one_frame_byte_by_byte,
        "many names": _many_names,
    }
    large: dict[str, Callable[[Attacked], str | None]] = {
        "frame of 22 million lists": _bomb(lists),
        "frame of deep lists": _bomb(b'{"x":' + b"[" * 1_000_000),
        "frame of one long number": _bomb(b'{"id":' + b"9" * 1_000_000 + b"}"),
        "frame above the limit": _bomb(b" " * (FRAME_BYTES_MAX + 1)),
        "incomplete frames on many links": _incomplete_frames,
        "requests that nobody answers": _unanswered_requests,
    }
    return [
        *strangers,
        *(Case(GROUP, name, run, known) for name, run in asked.items()),
        *(Case(GROUP, name, run, known, rss_growth_max=_RSS_GROWTH_MAX) for name, run in large.items()),
    ]
