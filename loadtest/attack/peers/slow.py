"""Slow and silent clients, and more of them than there is room for: they are dropped, and others are served."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from loadtest.attack.harness.attacker_job import AttackerJob
from loadtest.attack.harness.case import Case
from loadtest.attack.harness.raw import Address, closed_within, connected, request
from loadtest.attack.harness.target import Attacked

GROUP = "slow and many clients"
SETTINGS = {
    "DSTL_HTTP_HEAD_TIMEOUT_S": "3",
    "DSTL_HTTP_IDLE_TIMEOUT_S": "3",
    "DSTL_HTTP_BODY_GRACE_S": "3",
}
"""Deadlines of the attacked service, much shorter than by default."""
CUT_WITHIN_S = 15.0
"""How long a client that makes no progress may stay."""
FILES_MAX = 96
_HALF_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
"""The first bytes of a record of 512 bytes."""
_OPEN = "/v1/jobs/claimer/epochs"
_ANSWER_S = 5.0
"""Longest wait of another client for an answer; the machine may have other work."""

_Data = Callable[[Attacked], bytes]


def _silent(make: _Data, drip: bytes = b"", every_s: float = 0.5) -> Callable[[Attacked], str | None]:
    """Send `make`'s data, then single bytes or nothing, on some connections: the service must close them."""

    def run(target: Attacked) -> str | None:
        data = make(target)
        with ExitStack() as stack:
            connections = [stack.enter_context(connected(target.address)) for _ in range(5)]
            for connection in connections:
                connection.sendall(data)
            with _dripping(connections, drip, every_s):
                closed = closed_within(connections, CUT_WITHIN_S)
        return (
            None if closed == len(connections) else f"{len(connections) - closed} of {len(connections)} are still open"
        )

    return run


@contextmanager
def _dripping(connections: list[socket.socket], drip: bytes, every_s: float) -> Iterator[None]:
    ended = threading.Event()

    def run() -> None:
        number = 0
        while drip and not ended.wait(every_s):
            for connection in connections:
                with suppress(OSError):
                    connection.send(drip[number % len(drip) : number % len(drip) + 1])
            number += 1

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _text(data: bytes) -> _Data:
    return lambda _: data


def _asking(target: Attacked, method: str, path: str, length: int | None) -> bytes:
    fields = {"connection": "keep-alive", "authorization": f"Bearer {target.token}"}
    fields |= {"transfer-encoding": "chunked"} if length is None else {"content-length": str(length)}
    data = request(method, path, headers=fields)
    return data.replace(b"content-length: 0\r\n", b"") if length is None else data


def _json(length: int | None) -> _Data:
    return lambda target: _asking(target, "POST", _OPEN, length)


def _set(length: int) -> _Data:
    return lambda target: _asking(target, "POST", AttackerJob(target, "claimer").place_of_sets(), length)


def _health(target: Attacked) -> bytes:
    return _asking(target, "GET", "/health", 0)


def together() -> list[Case]:
    """Return the cases that wait for a deadline, and can run in parallel."""
    attacks = {
        "says nothing": _silent(_text(b"")),
        "half a line": _silent(_text(b"GET /hea")),
        "half a head": _silent(_text(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n")),
        "head, a byte at a time": _silent(_text(b"GET /health HTTP/1.1\r\nx-slow: "), b"a"),
        "line feeds, one at a time": _silent(_text(b""), b"\r\n"),
        "JSON that never comes": _silent(_json(1000)),
        "JSON, a byte at a time": _silent(_json(1_000_000), b" "),
        "JSON in chunks, a byte at a time": _silent(_json(None), b"1\r\n \r\n"),
        "change set that never comes": _silent(_set(1000)),
        "change set, a byte at a time": _silent(_set(50 << 20), b"a"),
        "answered, then nothing": _silent(_health),
        "answered, then half a head": _silent(lambda target: _health(target) + b"GET /health HTTP/1.1\r\n"),
    }
    return [Case(GROUP, name, attack, known=("claimer",)) for name, attack in attacks.items()]


def _open_many(address: Address, count: int, stack: ExitStack) -> list[socket.socket]:
    connections = []
    for _ in range(count):
        with suppress(OSError):
            connections.append(stack.enter_context(connected(address)))
    return connections


def _crowd(count: int, make: _Data) -> Callable[[Attacked], str | None]:
    """Hold many connections: the service still answers others."""

    def run(target: Attacked) -> str | None:
        data = make(target)
        with ExitStack() as stack:
            for connection in _open_many(target.address, count, stack):
                with suppress(OSError):
                    connection.sendall(data)
            end = time.monotonic() + 2.0
            while time.monotonic() < end:
                if not target.answers(_ANSWER_S):
                    return f"no other client was answered beside {count} connections"
        return None

    return run


def _never_reading(target: Attacked) -> str | None:
    """Send requests and never read: the pending answers are bounded."""
    data = request("GET", "/openapi.json", headers={"connection": "keep-alive"}) * 50
    with ExitStack() as stack:
        for connection in _open_many(target.address, 20, stack):
            connection.settimeout(0.2)
            with suppress(OSError):
                for _ in range(40):
                    connection.sendall(data)
        time.sleep(1.0)
    return None


def _resetting(target: Attacked) -> str | None:
    """Connect and disconnect at full speed."""
    for _ in range(500):
        with suppress(OSError), connected(target.address) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\n")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    return None


def alone() -> list[Case]:
    """Return the cases that load the service heavily, to run one after the other."""
    attacks = {
        "400 idle connections": _crowd(400, _text(b"")),
        "400 half heads": _crowd(400, _text(b"GET /health HTTP/1.1\r\nhost: ")),
        "400 bodies that never come": _crowd(400, _json(100_000)),
        "400 change sets that never come": _crowd(400, _set(100_000)),
        "answers that are never read": _never_reading,
        "500 connections that are reset": _resetting,
    }
    return [Case(GROUP, name, attack, known=("claimer",)) for name, attack in attacks.items()]


def _out_of_files(target: Attacked) -> str | None:
    """At the limit of open files, requests with a token are soon answered again, and the log says why they waited."""
    with ExitStack() as stack:
        _open_many(target.address, 3 * FILES_MAX, stack)
        end = time.monotonic() + CUT_WITHIN_S
        while not (answered := _asked(target)) and time.monotonic() < end:
            time.sleep(0.2)
        log = target.log_path.read_text(errors="replace").lower()
    if not answered:
        return "no request with a token was answered"
    said = any(words in log for words in ("too many open files", "connections"))
    return None if said else "the log mentions neither connections nor files"


def _answered_bodies(method: str) -> Callable[[Attacked], str | None]:
    """Announce bodies on an open path, without a token, and send none: they are answered, and others still are."""
    data = request(method, "/health", headers={"connection": "keep-alive", "content-length": "100000"})
    return lambda target: _bodies_that_never_come(target, data)


def _sets_of_one_job(target: Attacked) -> str | None:
    """Begin more change sets of one job than there are connections, and send none: others are answered."""
    headers = {"connection": "keep-alive", "authorization": f"Bearer {target.token}", "content-length": "100000"}
    place = AttackerJob(target, "claimer").place_of_sets()
    return _bodies_that_never_come(target, request("POST", place, headers=headers))


def _bodies_that_never_come(target: Attacked, data: bytes) -> str | None:
    """Send a head on more connections than there are files; return a defect if no other client is answered."""
    with ExitStack() as stack:
        for _ in range(3):  # within the time that a body may take
            for connection in _open_many(target.address, FILES_MAX, stack):
                with suppress(OSError):
                    connection.sendall(data)
            if not (_asked(target) and target.answers(_ANSWER_S)):
                return "no other client was answered"
    return None


def of_handshakes() -> list[Case]:
    """Return the cases for a service with TLS and few files, `FILES_MAX`: those that never end their handshake."""
    return [
        Case(GROUP, "handshakes that never begin", _handshakes(b"")),
        Case(GROUP, "handshakes that never end", _handshakes(_HALF_HELLO), is_short=False),
    ]


def _handshakes(data: bytes) -> Callable[[Attacked], str | None]:
    """Begin three times as many handshakes as there are files, and finish none: others are always served."""

    def run(target: Attacked) -> str | None:
        with ExitStack() as stack:
            connections = []
            for number in range(3 * FILES_MAX):
                connections += _open_many(target.address, 1, stack)
                with suppress(OSError):
                    connections[-1].send(data)
                if number % 32 == 0 and not (_asked(target) and target.answers(_ANSWER_S)):
                    return f"no other client was answered beside {number} handshakes"
            end = time.monotonic() + _ANSWER_S  # evicted connections are closed soon after, not at once
            while (files := target.open_files()) > FILES_MAX * 3 // 4:
                if time.monotonic() > end:
                    return f"{files} of {FILES_MAX} files are open"
                time.sleep(0.1)
            closed = closed_within(connections, CUT_WITHIN_S)
        return None if closed == len(connections) else f"{len(connections) - closed} are still there"

    return run


def _asked(target: Attacked) -> bool:
    try:
        return target.ask("GET", "/v1/info").status == 200
    except OSError:
        return False


def out_of_files() -> list[Case]:
    """Return the cases for a service with few files, `FILES_MAX`."""
    return [
        Case(
            GROUP, "three times as many connections as files", _out_of_files, neighbour_ms_max=60_000.0, is_short=False
        ),
        Case(GROUP, "one job's change sets on all connections", _sets_of_one_job, known=("claimer",)),
        Case(GROUP, "answered, and the body never comes", _answered_bodies("GET")),
        Case(GROUP, "refused, and the body never comes", _answered_bodies("POST"), is_short=False),
    ]
